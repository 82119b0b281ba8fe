"""Which layers each pipeline stage holds. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from mcore_parallel.pipeline.actions import Flow
from mcore_parallel.pipeline.balance import LayerCosts, balanced_sizes
from mcore_parallel.pipeline.layout_string import layout_text, stage_sizes

LAYERS = "--num-layers"
PP = "--pipeline-model-parallel-size"
FIRST = "--decoder-first-pipeline-num-layers"
LAST = "--decoder-last-pipeline-num-layers"
EMBEDDING = "--account-for-embedding-in-pipeline-split"
LOSS = "--account-for-loss-in-pipeline-split"
LAYOUT = "--pipeline-model-parallel-layout"
AUTO = "--pipeline-split auto"


class PlacementError(ValueError):
    """Layers cannot be placed as asked: what was asked, why it cannot be, and the nearest that can."""

    def __init__(self, values: str, reason: str, nearest: str = "") -> None:
        self.values = values
        self.reason = reason
        self.nearest = nearest
        super().__init__(f"{values}: {reason}" + (f"; nearest: {nearest}" if nearest else ""))


@dataclass(frozen=True)
class LayerSplit:
    """How layers are to be split over the stages; the default is evenly.

    At most one of three families: ``first`` and ``last`` (layers of the first and of the last pipeline rank; the
    other ranks share the rest evenly), ``count_embedding`` and ``count_loss`` (the embedding or the output layer
    counts as one layer of an even split), ``layout`` (a string that names each stage's layers), ``costs`` (balance
    by them).
    """

    first: int | None = None
    last: int | None = None
    count_embedding: bool = False
    count_loss: bool = False
    layout: str | None = None
    costs: LayerCosts | None = None

    @property
    def families(self) -> list[str]:
        """The families that are used, each by the flags that ask for it."""
        flags = (
            ((FIRST, self.first is not None), (LAST, self.last is not None)),
            ((EMBEDDING, self.count_embedding), (LOSS, self.count_loss)),
            ((LAYOUT, self.layout is not None),),
            ((AUTO, self.costs is not None),),
        )
        given = [[flag for flag, is_given in family if is_given] for family in flags]
        return [", ".join(family) for family in given if family]


def place_layers(num_layers: int, flow: Flow, split: LayerSplit | None = None) -> tuple[range, ...]:
    """The global layer numbers of every stage, in model order: together exactly ``0 .. num_layers - 1``.

    Stage ``i`` lives at ``flow.places[i]``; the first stage has the embedding, the last one the output layer. A range
    may be empty.

    Raises:
        PlacementError: the layers cannot be split so; the nearest numbers that can are named.
    """
    split = split or LayerSplit()
    if num_layers < 1:
        raise PlacementError(f"{LAYERS} {num_layers}", "a model needs layers", f"{LAYERS} 1")
    if len(split.families) > 1:
        raise PlacementError(" with ".join(split.families), "each says by itself where the layers go; keep one")
    sizes = _sizes(num_layers, flow, split)
    assert len(sizes) == flow.num_stages, "one size for every stage"
    assert sum(sizes) == num_layers, "no layer lost or doubled"
    _refuse_idle_ranks(sizes, flow, split)
    ends = list(accumulate(sizes))
    return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))


def _refuse_idle_ranks(sizes: list[int], flow: Flow, split: LayerSplit) -> None:
    """A stage may be empty, but not all stages of a rank: it would only pass on what it receives."""
    busy = {flow.places[0].rank, flow.places[-1].rank}
    busy |= {place.rank for place, size in zip(flow.places, sizes, strict=True) if size}
    idle = [rank for rank in range(flow.num_ranks) if rank not in busy]
    if idle:
        raise PlacementError(
            f'{LAYOUT} "{split.layout}" over {_stages_text(flow)}',
            f"rank {idle[0]} would hold no layer, no embedding and no output layer",
            f"{_layout_example(sum(sizes), flow)}; {PP} {len(busy)}",
        )


def _sizes(num_layers: int, flow: Flow, split: LayerSplit) -> list[int]:
    if split.layout is not None:
        return _from_layout(num_layers, flow, split.layout)
    if split.costs is not None:
        return _balanced(num_layers, flow, split.costs)
    if split.first is not None or split.last is not None:
        return _ends_given(num_layers, flow, split)
    return _evenly(num_layers, flow, split)


def _evenly(num_layers: int, flow: Flow, split: LayerSplit) -> list[int]:
    """Equal stages; an embedding or output layer that counts takes the place of one layer on its stage."""
    extra = split.count_embedding + split.count_loss
    each, rest = divmod(num_layers + extra, flow.num_stages)
    sizes = [each] * flow.num_stages
    sizes[0] -= split.count_embedding
    sizes[-1] -= split.count_loss
    if rest == 0 and min(sizes) >= 0:
        return sizes
    counted = f" + {extra} counted by {', '.join(split.families)}" if extra else ""
    values = f"{LAYERS} {num_layers}{counted} over {_stages_text(flow)}"
    if rest == 0:
        raise PlacementError(values, f"a stage of {each} layers has no room for what is counted", "drop one of them")
    raise PlacementError(
        values,
        f"{num_layers} layers{counted and f' and {extra} more'} do not divide evenly into {flow.num_stages} pipeline "
        "stages, no layer is dropped",
        "; ".join(_nearest_even(num_layers, extra, flow)),
    )


def _nearest_even(num_layers: int, extra: int, flow: Flow) -> list[str]:
    chunks = flow.num_chunks

    def divides(layers: int, ranks: int) -> bool:
        return layers > 0 and (layers + extra) % (ranks * chunks) == 0

    layers = _around(num_layers, lambda n: divides(n, flow.num_ranks), highest=num_layers + flow.num_stages)
    ranks = _around(flow.num_ranks, lambda n: n > 0 and divides(num_layers, n), highest=num_layers + extra)
    found = [f"{LAYERS} {layers}"] + ([f"{PP} {ranks}"] if ranks else [])
    if num_layers >= flow.num_stages:
        found.append(f'{LAYOUT} "{layout_text(balanced_sizes(LayerCosts((1,) * num_layers), flow.num_stages))}"')
    return found


def _ends_given(num_layers: int, flow: Flow, split: LayerSplit) -> list[int]:
    """The first and/or last rank hold a given number, the others share the rest evenly; chunks of a rank are equal."""
    asked = [(FIRST, split.first), (LAST, split.last)]
    given = " ".join(f"{flag} {number}" for flag, number in asked if number is not None)
    values = f"{given} with {LAYERS} {num_layers} over {_stages_text(flow)}"
    ends = (flow.places[0].rank, flow.places[-1].rank)
    if ends != (0, flow.num_ranks - 1):
        raise PlacementError(
            values,
            f"this schedule's first and last stage live on ranks {ends[0]} and {ends[1]}, not at the ends",
            f"{AUTO}, or a {LAYOUT}",
        )
    per_rank = _per_rank(num_layers, flow, split.first, split.last)
    if per_rank is not None:
        return [per_rank[place.rank] // flow.num_chunks for place in flow.places]
    first = _around(
        split.first or 0, lambda n: _per_rank(num_layers, flow, n, split.last) is not None, highest=num_layers
    )
    last = _around(
        split.last or 0, lambda n: _per_rank(num_layers, flow, split.first, n) is not None, highest=num_layers
    )
    nearest = [
        f"{flag} {found}"
        for (flag, number), found in zip(asked, (first, last), strict=True)
        if found and number is not None
    ]
    raise PlacementError(values, _why_not_ends(num_layers, flow, split), "; ".join(nearest) or AUTO)


def _per_rank(num_layers: int, flow: Flow, first: int | None, last: int | None) -> list[int] | None:
    """Layers of each rank, None if they do not come out even."""
    ranks, chunks = flow.num_ranks, flow.num_chunks
    if ranks == 1:
        return [num_layers] if {first, last} <= {None, num_layers} and num_layers % chunks == 0 else None
    ends = [number for number in (first, last) if number is not None]
    between, remaining = ranks - len(ends), num_layers - sum(ends)
    each, rest = divmod(remaining, between) if between else (0, remaining)
    if remaining < 0 or rest or (between and each == 0):
        return None
    front = [] if first is None else [first]
    back = [] if last is None else [last]
    per_rank = [*front, *[each] * between, *back]
    return per_rank if all(number % chunks == 0 for number in per_rank) else None


def _why_not_ends(num_layers: int, flow: Flow, split: LayerSplit) -> str:
    if flow.num_ranks == 1:
        return f"one rank holds all {num_layers} layers"
    ends = [number for number in (split.first, split.last) if number is not None]
    between = flow.num_ranks - len(ends)
    equal = f", each rank's a multiple of {flow.num_chunks}" if flow.num_chunks > 1 else ""
    if between == 0:
        return f"together the two ranks must hold all {num_layers} layers{equal}"
    return (
        f"the other {between} rank{'s' if between > 1 else ''} must share the remaining {num_layers - sum(ends)} "
        f"layers evenly, at least one each{equal}"
    )


def _from_layout(num_layers: int, flow: Flow, layout: str) -> list[int]:
    values = f'{LAYOUT} "{layout}"'
    try:
        sizes = stage_sizes(layout)
    except ValueError as error:
        raise PlacementError(values, str(error), _layout_example(num_layers, flow)) from None
    if len(sizes) != flow.num_stages:
        raise PlacementError(
            f"{values} over {_stages_text(flow)}",
            f"it has {len(sizes)} stages, not {flow.num_stages}",
            _layout_example(num_layers, flow),
        )
    if sum(sizes) != num_layers:
        raise PlacementError(
            f"{values} with {LAYERS} {num_layers}",
            f"it places {sum(sizes)} layers, not {num_layers}",
            f"{LAYERS} {sum(sizes)}; {_layout_example(num_layers, flow)}",
        )
    return list(sizes)


def _layout_example(num_layers: int, flow: Flow) -> str:
    stages = min(flow.num_stages, num_layers)
    sizes = balanced_sizes(LayerCosts((1,) * num_layers), stages) + [0] * (flow.num_stages - stages)
    return f'{LAYOUT} "{layout_text(sizes)}"'


def _balanced(num_layers: int, flow: Flow, costs: LayerCosts) -> list[int]:
    assert len(costs.layers) == num_layers, "a cost for every layer"
    try:
        return balanced_sizes(costs, flow.num_stages)
    except ValueError as error:
        largest = max(1, (num_layers + 1) // flow.num_chunks)
        raise PlacementError(
            f"{AUTO} with {LAYERS} {num_layers} over {_stages_text(flow)}", str(error), f"{PP} {largest}"
        ) from None


def _stages_text(flow: Flow) -> str:
    virtual = f" x {flow.num_chunks} virtual stages each" if flow.num_chunks > 1 else ""
    return f"{PP} {flow.num_ranks}{virtual}"


def _around(number: int, is_legal: Callable[[int], bool], *, highest: int) -> str:
    """The nearest legal numbers below and above ``number``, as text: ``4 or 8``; empty if there are none."""
    below = next((n for n in range(min(number, highest + 1) - 1, -1, -1) if is_legal(n)), None)
    above = next((n for n in range(number + 1, highest + 1) if is_legal(n)), None)
    return " or ".join(str(n) for n in (below, above) if n is not None)
