"""Which layers each pipeline stage holds. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_parallel.pipeline.actions import Flow, looped_flow


class PlacementError(ValueError):
    """Layers cannot be placed as asked: what was asked, why it cannot be, and the nearest that can."""

    def __init__(self, values: str, reason: str, nearest: str = "") -> None:
        self.values = values
        self.reason = reason
        self.nearest = nearest
        super().__init__(f"{values}: {reason}" + (f"; nearest: {nearest}" if nearest else ""))


@dataclass(frozen=True)
class LayerSplit:
    """How layers are to be split over the stages; the default is evenly."""


def place_layers(num_layers: int, flow: Flow, split: LayerSplit | None = None) -> tuple[range, ...]:
    """The global layer numbers of every stage, in model order: together exactly ``0 .. num_layers - 1``.

    Stage ``i`` lives at ``flow.places[i]``; the first stage has the embedding, the last one the output layer. A range
    may be empty.

    Raises:
        PlacementError: the layers cannot be split so; the nearest numbers that can are named.
    """
    if num_layers < 1:
        raise PlacementError(f"--num-layers {num_layers}", "a model needs layers", "--num-layers 1")
    if num_layers % flow.num_stages:
        raise _uneven(num_layers, flow)
    return _ranges([num_layers // flow.num_stages] * flow.num_stages)


def _ranges(sizes: list[int]) -> tuple[range, ...]:
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def _uneven(num_layers: int, flow: Flow) -> PlacementError:
    ranks, chunks, stages = flow.num_ranks, flow.num_chunks, flow.num_stages
    virtual = f" x {chunks} virtual stages each" if chunks > 1 else ""
    below, above = num_layers // stages * stages, (num_layers // stages + 1) * stages
    layers = " or ".join(str(number) for number in (below, above) if number)
    nearest = [f"--num-layers {layers}"]
    sizes = nearest_stage_counts(num_layers // chunks, ranks) if num_layers % chunks == 0 else []
    if sizes:
        nearest.append(f"--pipeline-model-parallel-size {' or '.join(map(str, sizes))}")
    return PlacementError(
        f"--num-layers {num_layers} over --pipeline-model-parallel-size {ranks}{virtual}",
        f"{num_layers} layers do not divide evenly into {stages} pipeline stages, no layer is dropped",
        "; ".join(nearest),
    )


def stage_layers(num_layers: int, num_stages: int, stage: int) -> range:
    """The global numbers of the layers of ``stage`` when ``num_layers`` are split evenly over ``num_stages``.

    Raises:
        ValueError: the layers do not divide (the nearest numbers of stages that would work are named), or there is
            no such stage.
    """
    if num_layers < 1 or num_stages < 1:
        raise ValueError(f"a pipeline needs layers and stages, got {num_layers} layers and {num_stages} stages")
    if not 0 <= stage < num_stages:
        raise ValueError(f"stage {stage} is outside the {num_stages} stages 0 to {num_stages - 1}")
    return place_layers(num_layers, looped_flow(num_stages))[stage]


def nearest_stage_counts(num_layers: int, num_stages: int) -> list[int]:
    """The largest divisor of ``num_layers`` below ``num_stages`` and the smallest above it, where they exist."""
    divisors = [size for size in range(1, num_layers + 1) if num_layers % size == 0]
    below = [size for size in divisors if size < num_stages][-1:]
    above = [size for size in divisors if size > num_stages][:1]
    return below + above
