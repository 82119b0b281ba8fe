"""Raw collectives, their conjugate pairs against explicit sums, and what the recorder sees."""

from __future__ import annotations

import pytest
import torch

from mcore_parallel import collectives as c
from mcore_parallel.axis import Axis, build_layout, single_layout
from mcore_parallel.mesh import build_mesh
from mcore_parallel.testing import run_ranks

D64 = torch.float64


def _layout(rank, world, **sizes):
    return build_layout(build_mesh(world, **sizes), rank)


def _values(rank):
    return torch.arange(8, dtype=D64).view(4, 2) + 10 * rank


def _pairs(rank, world):
    """For each pair: forward value, and the gradient of sum(weight_of_rank * y) with respect to x."""
    tp = _layout(rank, world, tp=world).axis("tp")
    out = {}
    for name, fn in {
        "copy_to": lambda x: c.copy_to(x, tp),
        "reduce_from": lambda x: c.reduce_from(x, tp),
        "gather_along": lambda x: c.gather_along(x, tp, dim=1),
        "split_along": lambda x: c.split_along(x, tp, dim=1),
        "gather_sequence": lambda x: c.gather_sequence(x, tp),
        "scatter_sequence": lambda x: c.scatter_sequence(x, tp),
    }.items():
        x = _values(rank).requires_grad_()
        y = fn(x)
        (y * (rank + 1)).sum().backward()
        out[name] = (y.detach(), x.grad)
    return out


def test_pairs_are_conjugate():
    a, b = run_ranks(_pairs, 2)
    x0, x1 = _values(0), _values(1)
    one = torch.ones(4, 2, dtype=D64)
    assert torch.equal(a["copy_to"][0], x0)
    assert torch.equal(a["copy_to"][1], 3 * one)
    assert torch.equal(a["reduce_from"][0], x0 + x1)
    assert torch.equal(b["reduce_from"][1], 2 * one)
    assert torch.equal(b["gather_along"][0], torch.cat([x0, x1], 1))
    assert torch.equal(b["gather_along"][1], 2 * one)
    assert torch.equal(b["split_along"][0], x1[:, 1:])
    assert torch.equal(a["split_along"][1], torch.tensor([[1.0, 2.0]] * 4, dtype=D64))
    assert torch.equal(a["gather_sequence"][0], torch.cat([x0, x1]))
    assert torch.equal(a["gather_sequence"][1], 3 * one)
    assert torch.equal(b["scatter_sequence"][0], (x0 + x1)[2:])
    assert torch.equal(b["scatter_sequence"][1], torch.tensor([[1.0] * 2] * 2 + [[2.0] * 2] * 2, dtype=D64))


def _raw(rank, world):
    layout = _layout(rank, world)
    dp = layout.axis("dp")
    layout.recorder.enabled = True
    half = torch.full((4,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    c.all_reduce(half, dp)
    top = torch.tensor([float(rank)])
    c.all_reduce(top, dp, op="max")
    flat = torch.arange(8.0) * (rank + 1)
    c.reduce_scatter_into(flat[rank * 2 : rank * 2 + 2], flat, dp, async_op=True).wait()
    c.all_gather_into(flat, flat[rank * 2 : rank * 2 + 2], dp)
    seen = c.broadcast(torch.tensor([float(rank)]), dp, source=2).item()
    right, left = (rank + 1) % world, (rank - 1) % world
    buffer = torch.empty(3)
    for work in c.exchange(dp, sends=[(right, torch.full((3,), float(rank)))], receives=[(left, buffer)]):
        work.wait()
    events = [(e.op, e.axis, e.num_bytes, e.order) for e in layout.recorder.events]
    return half.tolist(), top.item(), flat.tolist(), seen, buffer.tolist(), events, layout.recorder.totals()


def test_raw_operations_and_the_recorder():
    results = run_ranks(_raw, 4)
    for rank, (half, top, flat, seen, buffer, events, totals) in enumerate(results):
        assert half == [260.0] * 4  # 259 in fp32, rounded to bf16 once at the end
        assert top == 3.0
        assert flat == [10.0 * i for i in range(8)]
        assert seen == 2.0
        assert buffer == [float((rank - 1) % 4)] * 3
        assert [e[0] for e in events] == [
            "all_reduce", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "send", "recv",
        ]  # fmt: skip
        assert [e[3] for e in events] == list(range(7))
        assert totals["dp", "all_reduce"] == 4 * 4 + 4
        assert totals["dp", "reduce_scatter"] == totals["dp", "all_gather"] == 32
        assert totals["dp", "send"] == totals["dp", "recv"] == 12


def test_everything_is_the_identity_at_size_one():
    axis = single_layout().axis("tp")
    x = _values(0)
    for fn in (c.copy_to, c.reduce_from, c.gather_sequence, c.scatter_sequence):
        assert fn(x, axis) is x
    c.all_reduce(x, axis).wait()
    out = torch.empty_like(x)
    c.all_gather_into(out, x, axis).wait()
    assert torch.equal(out, _values(0))
    assert c.exchange(axis) == []


def test_uneven_splits_are_refused_with_the_numbers():
    axis = Axis("tp", (0, 1, 2))
    with pytest.raises(ValueError, match=r"4 does not divide over the 3 ranks of axis 'tp'"):
        c.check_divides(4, axis)


def _axes(rank, world):
    layout = build_layout(build_mesh(world, tp=4, pp=2), rank, kv_heads=2)
    return {name: layout.axis(*name.split("+")).ranks for name in ("tp", "pp", "dp", "dp+cp", "kv_copy", "embedding")}


def test_layout_makes_the_axes_of_training():
    results = run_ranks(_axes, 8)
    assert results[6]["tp"] == (4, 5, 6, 7)
    assert results[6]["pp"] == (2, 6)
    assert results[6]["dp"] == results[6]["dp+cp"] == (6,)
    assert results[6]["kv_copy"] == (6, 7)
    assert results[1]["kv_copy"] == (0, 1)
    assert results[3]["embedding"] == (3, 7)


def test_asking_for_an_axis_that_was_not_made_names_those_that_were():
    with pytest.raises(ValueError, match=r"axis 'ep' was not made at start \(made: tp, pp"):
        single_layout().axis("ep")
