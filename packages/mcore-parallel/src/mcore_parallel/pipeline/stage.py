"""Which layers a pipeline stage holds. No torch."""

from __future__ import annotations


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
    if num_layers % num_stages:
        nearest = " or ".join(str(size) for size in nearest_stage_counts(num_layers, num_stages))
        raise ValueError(
            f"{num_layers} layers do not divide evenly into {num_stages} pipeline stages; "
            f"nearest pipeline sizes that do: {nearest}"
        )
    per_stage = num_layers // num_stages
    return range(stage * per_stage, (stage + 1) * per_stage)


def nearest_stage_counts(num_layers: int, num_stages: int) -> list[int]:
    """The largest divisor of ``num_layers`` below ``num_stages`` and the smallest above it, where they exist."""
    divisors = [size for size in range(1, num_layers + 1) if num_layers % size == 0]
    below = [size for size in divisors if size < num_stages][-1:]
    above = [size for size in divisors if size > num_stages][:1]
    return below + above
