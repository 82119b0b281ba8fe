"""Rank arithmetic against Megatron's formula, written out independently, and the algebra of groups and views."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_parallel.mesh import DEFAULT_ORDER, TP_PP_DP_ORDER, Mesh, build_mesh

SIZES = st.fixed_dictionaries({name: st.integers(1, 4) for name in ("tp", "cp", "dp", "pp")})
ORDERS = {"tp-cp-dp-pp": DEFAULT_ORDER, "tp-cp-pp-dp": TP_PP_DP_ORDER}


def build(sizes: dict[str, int], order: tuple[str, ...] = DEFAULT_ORDER) -> Mesh:
    return build_mesh(math.prod(sizes.values()), tp=sizes["tp"], pp=sizes["pp"], cp=sizes["cp"], order=order)


def megatron_coordinates(rank: int, sizes: dict[str, int], order: str) -> dict[str, int]:
    """The first axis of the order varies fastest: a mixed-radix number read from its lowest digit."""
    found = {}
    for name in order.split("-"):
        rank, found[name] = divmod(rank, sizes[name])
    return found


@pytest.mark.parametrize("order", ORDERS)
@settings(deadline=None, max_examples=25)
@given(sizes=SIZES)
def test_coordinates_follow_megatrons_order(order: str, sizes: dict[str, int]) -> None:
    mesh = build(sizes, ORDERS[order])
    for rank in range(mesh.world_size):
        expected = megatron_coordinates(rank, sizes, order)
        assert mesh.coordinates(rank) == expected
        assert mesh.rank(expected) == rank


@pytest.mark.parametrize("order", ORDERS)
@settings(deadline=None, max_examples=25)
@given(sizes=SIZES, names=st.sets(st.sampled_from(["tp", "cp", "dp", "pp"]), min_size=1))
def test_groups_are_disjoint_and_cover(order: str, sizes: dict[str, int], names: set[str]) -> None:
    mesh = build(sizes, ORDERS[order])
    groups = mesh.groups(*sorted(names))
    assert groups.shape == (mesh.world_size // mesh.size(*names), mesh.size(*names))
    assert sorted(groups.ravel().tolist()) == list(range(mesh.world_size))
    for group in groups.tolist():
        others = {tuple((k, v) for k, v in mesh.coordinates(r).items() if k not in names) for r in group}
        assert len(others) == 1
        assert group == sorted(group)
        assert mesh.group(group[-1], *names) == tuple(group)


def test_the_known_example() -> None:
    """16 ranks, tp 2, pp 4, dp 2: the groups that Megatron's documentation lists."""
    mesh = build_mesh(16, tp=2, pp=4)
    assert mesh.sizes == {"pp": 4, "dp": 2, "cp": 1, "tp": 2}
    assert mesh.groups("tp").tolist() == [[i, i + 1] for i in range(0, 16, 2)]
    assert mesh.groups("dp").tolist() == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert mesh.groups("pp").tolist() == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


@settings(deadline=None, max_examples=25)
@given(sizes=SIZES, data=st.data())
def test_an_expert_view_covers_the_replicas_of_each_stage(sizes: dict[str, int], data: st.DataObject) -> None:
    """(dp, cp, tp) refactored as (edp, ep, etp): the same ranks of every stage, cut another way."""
    mesh = build(sizes)
    product = mesh.size("dp", "cp", "tp")
    divisors = [n for n in range(1, product + 1) if product % n == 0]
    etp = data.draw(st.sampled_from(divisors))
    ep = data.draw(st.sampled_from([n for n in divisors if (product // etp) % n == 0]))
    view = mesh.view(("tp", "cp", "dp"), {"edp": product // etp // ep, "ep": ep, "etp": etp})
    assert view.sizes == {"pp": sizes["pp"], "edp": product // etp // ep, "ep": ep, "etp": etp}
    assert sorted(view.grid.ravel().tolist()) == list(range(mesh.world_size))
    assert view.groups("pp").tolist() == mesh.groups("pp").tolist()
    stages = mesh.groups("dp", "cp", "tp").tolist()
    assert view.groups("edp", "ep", "etp").tolist() == stages
    for rank, stage in itertools.product(range(mesh.world_size), stages):
        if rank in stage:
            offset = stage.index(rank)
            at = view.coordinates(rank)
            assert at["etp"] == offset % etp
            assert at["ep"] == offset // etp % ep


def test_a_view_equal_to_the_mesh_changes_nothing() -> None:
    mesh = build_mesh(24, tp=2, pp=3, cp=2)
    view = mesh.view(("tp",), {"tp": 2})
    assert view.names == mesh.names
    assert np.array_equal(view.grid, mesh.grid)


def test_a_view_keeps_the_other_axes() -> None:
    mesh = build_mesh(16, tp=4, pp=2)
    view = mesh.view(("tp",), {"kv": 2, "copy": 2})
    assert view.groups("copy").tolist()[:2] == [[0, 1], [2, 3]]
    assert view.groups("dp").tolist() == mesh.groups("dp").tolist()


def test_sixteen_thousand_ranks() -> None:
    mesh = build_mesh(16_384, tp=8, pp=16, cp=2)
    assert mesh.size("dp") == 64
    for names in (("tp",), ("cp",), ("dp",), ("pp",), ("dp", "cp")):
        groups = mesh.groups(*names)
        assert np.array_equal(np.sort(groups, axis=None), np.arange(16_384))
    assert mesh.coordinates(16_383) == {"pp": 15, "dp": 63, "cp": 1, "tp": 7}
    assert mesh.group(5, "tp") == tuple(range(8))


def test_one_rank() -> None:
    mesh = build_mesh(1)
    assert mesh.coordinates(0) == {"pp": 0, "dp": 0, "cp": 0, "tp": 0}
    assert mesh.groups("tp").tolist() == [[0]]


@pytest.mark.parametrize(
    ("world", "sizes", "text"),
    [
        (6, {"tp": 4}, r"a world of 6 ranks does not divide into tp 4 x pp 1 x cp 1 = 4 ranks a replica"),
        (2, {"tp": 2, "pp": 2}, r"a world of 2 ranks does not divide into tp 2 x pp 2 x cp 1 = 4"),
        (0, {}, r"a world of 0 ranks"),
    ],
)
def test_a_world_that_does_not_divide_is_refused(world: int, sizes: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build_mesh(world, **sizes)


def test_mistakes_are_named() -> None:
    mesh = build_mesh(8, tp=2)
    with pytest.raises(ValueError, match=r"mesh has no axis 'ep' \(it has pp, dp, cp, tp\)"):
        mesh.groups("ep")
    with pytest.raises(ValueError, match=r"rank 8 is outside a world of 8"):
        mesh.coordinates(8)
    with pytest.raises(ValueError, match=r"view \{'a': 3, 'b': 2\} has 6 ranks.* dpxtp has 8"):
        mesh.view(("dp", "tp"), {"a": 3, "b": 2})
    with pytest.raises(ValueError, match="one distinct name per axis"):
        Mesh(("tp", "tp"), np.arange(4).reshape(2, 2))
