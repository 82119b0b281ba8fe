"""Layers on stages: every layer once, in model order, or a refusal that names the nearest legal numbers."""

from __future__ import annotations

import re
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_parallel.pipeline.actions import Flow, Place, looped_flow
from mcore_parallel.pipeline.balance import LayerCosts, balanced_sizes
from mcore_parallel.pipeline.layout_string import layout_text, stage_sizes
from mcore_parallel.pipeline.stage import LayerSplit, PlacementError, place_layers

CELLS = [(layers, pp, vpp) for layers in range(1, 25) for pp in range(1, 7) for vpp in range(1, 5)]


def sizes(num_layers: int, flow: Flow, split: LayerSplit | None = None) -> list[int]:
    """The number of layers of each stage, once it is sure that every layer is there once and in order."""
    placed = place_layers(num_layers, flow, split)
    assert len(placed) == flow.num_stages
    assert [layer for stage in placed for layer in stage] == list(range(num_layers))
    return [len(stage) for stage in placed]


def v_shaped(ranks: int) -> Flow:
    down = [Place(rank, 0) for rank in range(ranks)]
    return Flow((*down, *(Place(rank, 1) for rank in reversed(range(ranks)))))


def numbers_after(flag: str, text: str) -> list[int]:
    found = re.search(rf"{flag} (\d+)(?: or (\d+))?", text)
    return [int(number) for number in found.groups() if number] if found else []


def test_even_split_holds_every_layer_once_or_names_the_numbers() -> None:
    for layers, pp, vpp in CELLS:
        flow = looped_flow(pp, vpp)
        if layers % (pp * vpp) == 0:
            assert set(sizes(layers, flow)) == {layers // (pp * vpp)}
            continue
        with pytest.raises(PlacementError, match=rf"{layers} layers .* {pp * vpp} pipeline stages") as refusal:
            place_layers(layers, flow)
        assert f"--num-layers {layers} over --pipeline-model-parallel-size {pp}" in refusal.value.values
        assert vpp == 1 or f"x {vpp} virtual stages" in refusal.value.values


def test_nearest_numbers_of_an_even_split_work() -> None:
    for layers, pp, vpp in CELLS:
        for split in (LayerSplit(), LayerSplit(count_embedding=True, count_loss=True)):
            try:
                place_layers(layers, looped_flow(pp, vpp), split)
            except PlacementError as refusal:
                nearest = refusal.nearest
                assert numbers_after("--num-layers", nearest) or "drop one" in nearest
                for number in numbers_after("--num-layers", nearest):
                    place_layers(number, looped_flow(pp, vpp), split)
                for size in numbers_after("--pipeline-model-parallel-size", nearest):
                    assert (layers + len(split.families) * 2) % (size * vpp) == 0
                layout = re.search(r'layout "(.*)"', nearest)
                if layout:
                    sizes(layers, looped_flow(pp, vpp), LayerSplit(layout=layout[1]))


@pytest.mark.parametrize(
    ("layers", "pp", "nearest"),
    [
        (30, 4, "--num-layers 28 or 32; --pipeline-model-parallel-size 3 or 5"),
        (7, 2, "--num-layers 6 or 8; --pipeline-model-parallel-size 1 or 7"),
        (5, 3, "--num-layers 3 or 6; --pipeline-model-parallel-size 1 or 5"),
        (3, 4, "--num-layers 4; --pipeline-model-parallel-size 3"),
        (80, 48, "--num-layers 48 or 96; --pipeline-model-parallel-size 40 or 80"),
    ],
)
def test_nearest_even_splits(layers: int, pp: int, nearest: str) -> None:
    with pytest.raises(PlacementError) as refusal:
        place_layers(layers, looped_flow(pp))
    assert refusal.value.nearest.startswith(nearest)


def test_layers_that_integer_division_would_drop_are_refused() -> None:
    """80 layers on 16 ranks of 2 layers per virtual stage: 5 layers per rank make no whole number of stages."""
    with pytest.raises(PlacementError, match="80 layers do not divide evenly into 32 pipeline stages"):
        place_layers(80, looped_flow(16, 2))


def test_interleaved_stages_are_dealt_round_the_ranks() -> None:
    flow = looped_flow(2, 2)
    held = {place: list(layers) for place, layers in zip(flow.places, place_layers(8, flow), strict=True)}
    assert held == {(0, 0): [0, 1], (1, 0): [2, 3], (0, 1): [4, 5], (1, 1): [6, 7]}


def test_embedding_and_loss_count_as_layers() -> None:
    embedding, loss = LayerSplit(count_embedding=True), LayerSplit(count_loss=True)
    both = LayerSplit(count_embedding=True, count_loss=True)
    assert sizes(7, looped_flow(4), embedding) == [1, 2, 2, 2]
    assert sizes(7, looped_flow(4), loss) == [2, 2, 2, 1]
    assert sizes(10, looped_flow(4), both) == [2, 3, 3, 2]
    assert sizes(10, looped_flow(2, 2), both) == [2, 3, 3, 2]
    assert sizes(2, looped_flow(4), both) == [0, 1, 1, 0]
    with pytest.raises(PlacementError, match=r"8 layers and 2 more|8 layers .* and 2 more"):
        place_layers(8, looped_flow(4), both)


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "first", "last", "expected"),
    [
        (10, 4, 1, 1, None, [1, 3, 3, 3]),
        (10, 4, 1, None, 1, [3, 3, 3, 1]),
        (10, 4, 1, 2, 2, [2, 3, 3, 2]),
        (10, 2, 1, 9, None, [9, 1]),
        (10, 2, 1, 7, 3, [7, 3]),
        (10, 1, 1, 10, None, [10]),
        (10, 1, 1, 10, 10, [10]),
        (16, 4, 2, 2, 2, [1, 3, 3, 1, 1, 3, 3, 1]),
        (9, 4, 1, 0, None, [0, 3, 3, 3]),
    ],
)
def test_first_and_last_rank(
    layers: int, pp: int, vpp: int, first: int | None, last: int | None, expected: list[int]
) -> None:
    assert sizes(layers, looped_flow(pp, vpp), LayerSplit(first=first, last=last)) == expected


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "first", "last", "reason"),
    [
        (10, 1, 1, None, 1, "one rank holds all 10 layers; nearest: --decoder-last-pipeline-num-layers 10"),
        (10, 1, 1, 1, 10, "one rank holds all 10 layers; nearest: --decoder-first-pipeline-num-layers 10"),
        (10, 2, 1, 9, 2, "the two ranks must hold all 10 layers; nearest: --decoder-first-pipeline-num-layers 8"),
        (10, 4, 1, 2, None, "the other 3 ranks must share the remaining 8 layers evenly"),
        (10, 4, 1, 10, None, "at least one each; nearest: --decoder-first-pipeline-num-layers 7"),
        (10, 4, 1, 11, 2, "nearest: --decoder-first-pipeline-num-layers 6"),
        (16, 4, 2, 1, 3, "each rank's a multiple of 2"),
    ],
)
def test_first_and_last_rank_refused(
    layers: int, pp: int, vpp: int, first: int | None, last: int | None, reason: str
) -> None:
    with pytest.raises(PlacementError, match=re.escape(reason)) as refusal:
        place_layers(layers, looped_flow(pp, vpp), LayerSplit(first=first, last=last))
    assert f"--num-layers {layers}" in refusal.value.values
    for flag, number in (("first", first), ("last", last)):
        assert number is None or f"--decoder-{flag}-pipeline-num-layers {number}" in refusal.value.values


@given(
    layers=st.integers(1, 24),
    pp=st.integers(1, 6),
    vpp=st.integers(1, 4),
    first=st.none() | st.integers(0, 25),
    last=st.none() | st.integers(0, 25),
)
def test_first_and_last_are_kept_or_refused(
    layers: int, pp: int, vpp: int, first: int | None, last: int | None
) -> None:
    flow, split = looped_flow(pp, vpp), LayerSplit(first=first, last=last)
    try:
        placed = sizes(layers, flow, split)
    except PlacementError as refusal:
        for name, other in (("first", {"last": last}), ("last", {"first": first})):
            for number in numbers_after(f"--decoder-{name}-pipeline-num-layers", refusal.nearest):
                sizes(layers, flow, LayerSplit(**{name: number, **other}))
        return
    per_rank = [sum(placed[rank::pp]) for rank in range(pp)]
    assert first is None or per_rank[0] == first
    assert last is None or per_rank[-1] == last
    assert all(len(set(placed[rank::pp])) == 1 for rank in range(pp))


def test_first_and_last_rank_need_a_flow_that_ends_on_the_last_rank() -> None:
    with pytest.raises(PlacementError, match="first and last stage live on ranks 0 and 0"):
        place_layers(16, v_shaped(4), LayerSplit(last=2))
    assert sizes(16, v_shaped(4)) == [2] * 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("EtttL", [3]),
        ("E|tL", [0, 1]),
        ("Et*3|(tt|)*29,L", [3, *[2] * 29, 0]),
        ("E t*2 | ((t|)*2 tt|)*2 L", [2, 1, 1, 2, 1, 1, 2, 0]),
        ("E|t*2|*1tL", [0, 2, 1]),
    ],
)
def test_layout_strings(text: str, expected: list[int]) -> None:
    assert list(stage_sizes(text)) == expected
    assert sizes(sum(expected), looped_flow(len(expected)), LayerSplit(layout=text)) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "E, the embedding, must stand exactly once and first in the first stage, it stands 0 times"),
        ("ttL", "E, the embedding"),
        ("tEtL", "E, the embedding"),
        ("t|EtL", "E, the embedding"),
        ("EtEL", "it stands 2 times"),
        ("Et|t", "L, the output layer with the loss"),
        ("EtLt", "and not last in the last stage"),
        ("Et*3|(tt|)*29,m|L", "multi-token prediction"),
        ("Etx|L", "'x' is none of E t L m | * ( ) (character 3)"),
        ("E(tt|L", "this ( is not closed (character 2)"),
        ("Ett)|L", "a ) closes nothing (character 4)"),
        ("Et*|L", "* needs a number of repeats, 1 or more (character 4)"),
        ("Et*0|L", "* needs a number of repeats, 1 or more (character 4)"),
        ("*3EtL", "'*' is none of"),
        ("Et*999999999999|L", "* needs a number"),
        ("Et*99999999|L", "more than 100000 symbols"),
        ("E((((t*99)*99)*99)*99)L", "more than 100000 symbols"),
        ("E" + "(" * 5000 + "t" + ")" * 5000 + "L", "not closed"),
        ("Et|__import__('os')", "'_' is none of"),
        ("Et*²L", "* needs a number"),
    ],
)
def test_broken_layout_strings_say_where(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        stage_sizes(text)
    with pytest.raises(PlacementError, match=re.escape(reason)) as refusal:
        place_layers(6, looped_flow(2), LayerSplit(layout=text))
    assert refusal.value.nearest == '--pipeline-model-parallel-layout "Ettt|tttL"'


@given(st.text("EtLm|*()0123456789, x", max_size=40))
@settings(max_examples=500)
def test_any_text_is_a_layout_or_refused(text: str) -> None:
    try:
        found = stage_sizes(text)
    except ValueError:
        return
    assert stage_sizes(layout_text(found)) == found


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_layout_text_is_the_inverse(layers: list[int]) -> None:
    assert list(stage_sizes(layout_text(layers))) == layers


def test_layout_must_match_layers_and_stages() -> None:
    with pytest.raises(PlacementError, match=re.escape("it has 3 stages, not 4")):
        place_layers(3, looped_flow(2, 2), LayerSplit(layout="Et|t|tL"))
    with pytest.raises(PlacementError, match=re.escape("it places 3 layers, not 4; nearest: --num-layers 3;")):
        place_layers(4, looped_flow(3), LayerSplit(layout="Et|t|tL"))


def test_a_stage_may_be_empty_but_not_a_whole_rank() -> None:
    assert list(stage_sizes("Et|t||tL")) == [1, 1, 0, 1]
    assert sizes(3, looped_flow(2, 2), LayerSplit(layout="Et|t||tL")) == [1, 1, 0, 1]
    assert sizes(2, v_shaped(2), LayerSplit(layout="E|t|t|L")) == [0, 1, 1, 0]
    with pytest.raises(PlacementError, match="rank 2 would hold no layer") as refusal:
        place_layers(3, looped_flow(4), LayerSplit(layout="Et|t||tL"))
    assert refusal.value.nearest == '--pipeline-model-parallel-layout "Et|t|t|L"; --pipeline-model-parallel-size 3'


def partitions(costs: LayerCosts, stages: int) -> list[list[int]]:
    """Every contiguous partition that gives each stage but the last a layer."""
    count = len(costs.layers)
    cuts = [(0, *middle, count) for middle in combinations(range(1, count + 1), stages - 1)]
    return [[b - a for a, b in pairwise(cut)] for cut in cuts]


def stage_costs(costs: LayerCosts, split: list[int]) -> list[int]:
    ends = [sum(split[: stage + 1]) for stage in range(len(split))]
    held = [sum(costs.layers[end - size : end]) for end, size in zip(ends, split, strict=True)]
    held[0] += costs.embedding
    held[-1] += costs.output
    return held


@given(
    layers=st.lists(st.integers(1, 30), min_size=1, max_size=9),
    ends=st.tuples(st.integers(0, 80), st.integers(0, 80)),
    stages=st.integers(1, 6),
)
def test_balance_is_the_best_of_all_partitions(layers: list[int], ends: tuple[int, int], stages: int) -> None:
    costs = LayerCosts(tuple(layers), *ends)
    if len(layers) < stages - 1:
        with pytest.raises(ValueError, match=f"{len(layers)} layers cannot give each of {stages} stages one"):
            balanced_sizes(costs, stages)
        return
    found = balanced_sizes(costs, stages)
    best = min(max(stage_costs(costs, split)) for split in partitions(costs, stages))
    assert sum(found) == len(layers)
    assert max(stage_costs(costs, found)) == best


def test_balance_moves_layers_away_from_a_dear_output_layer() -> None:
    costs = LayerCosts((10,) * 8, output=50)
    assert sizes(8, looped_flow(2), LayerSplit(costs=costs)) == [6, 2]
    assert sizes(8, looped_flow(4), LayerSplit(costs=costs)) == [2, 3, 3, 0]
    assert sizes(8, looped_flow(1), LayerSplit(costs=costs)) == [8]
    with pytest.raises(PlacementError, match="nearest: --pipeline-model-parallel-size 9"):
        place_layers(8, looped_flow(10), LayerSplit(costs=costs))


def test_families_exclude_each_other() -> None:
    families = [{"first": 2}, {"count_loss": True}, {"layout": "Et|tL"}, {"costs": LayerCosts((1,) * 4)}]
    for one, other in combinations(families, 2):
        with pytest.raises(PlacementError, match="each says by itself where the layers go"):
            place_layers(4, looped_flow(2), LayerSplit(**one, **other))
