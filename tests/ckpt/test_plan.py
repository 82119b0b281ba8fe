"""The save plan: one writer per cell, every element written once, and mistakes found before a byte is written."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.errors import CoverError, DtypeMismatch, ShapeMismatch
from mcore_ckpt.grid import Box, GridRule, boxes_of_range, whole
from mcore_ckpt.plan import Entry, plan_save

SMALL = GridRule(parts=4, smallest=8, largest=64)


def splits(draw, total, parts):
    """``parts`` consecutive ranges of 0 .. total, some perhaps empty."""
    edges = sorted(draw(st.integers(0, total)) for _ in range(parts - 1))
    return list(zip([0, *edges], [*edges, total], strict=True))


@st.composite
def tables(draw):
    """Entries by rank of a few arrays, each cut along one dim over tp, and over dp in flat ranges or replicated."""
    tp, dp = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    found = [[] for _ in range(tp * dp)]
    for number in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.integers(1, 9), max_size=3).map(tuple))
        cut = draw(st.integers(0, len(shape) - 1)) if shape and draw(st.booleans()) else None
        ranges = splits(draw, shape[cut], tp) if cut is not None else [None] * tp
        sharded = draw(st.booleans())
        for t, span in enumerate(ranges):
            offset, extent = [0] * len(shape), list(shape)
            if span is not None:
                offset[cut], extent[cut] = span[0], span[1] - span[0]
            flat = splits(draw, math.prod(extent), dp) if sharded and (span is not None or t == 0) else None
            if sharded and span is None and t > 0:
                continue  # replicated over tp, so the first rank's shards are all there is to it here
            for d in range(dp):
                local = boxes_of_range(extent, *flat[d]) if flat else [whole(extent)]
                found[t * dp + d] += [
                    Entry(
                        f"model/a{number}",
                        "float32",
                        shape,
                        Box(tuple(o + b for o, b in zip(offset, box.offset, strict=True)), box.shape),
                        () if cut is None else (cut,),
                    )
                    for box in local
                ]
    return found


@given(tables())
@settings(max_examples=150, deadline=None)
def test_every_element_is_written_once_by_one_rank_that_gets_it_from_a_holder(found):
    plan = plan_save(found, SMALL)
    assert plan == plan_save(found, SMALL)
    written = {spec.key: np.zeros(spec.shape, dtype=int) for spec in plan.arrays}
    seen = set()
    for cell in plan.cells:
        assert (cell.spec.key, cell.index) not in seen
        seen.add((cell.spec.key, cell.index))
        inside = np.zeros(cell.box.shape, dtype=int)
        for part in cell.fragments:
            entry = found[part.source][part.entry]
            assert entry.key == cell.spec.key
            part_of_entry = np.zeros(entry.box.shape)[part.box.within(entry.box)]
            assert part_of_entry.shape == part.box.shape, "a fragment outside its holder's box"
            inside[part.box.within(cell.box)] += 1
        assert (inside == 1).all()
        written[cell.spec.key][cell.box.within(whole(cell.spec.shape))] += 1
    assert all((count == 1).all() for count in written.values())
    owners = [cell.owner for cell in plan.cells]
    assert sum(len(plan.written_by(rank)) for rank in range(len(found))) == len(owners)


def entry(key="model/w", shape=(8, 4), offset=(0, 0), extent=(8, 4), **more):
    return Entry(key, "float32", shape, Box(offset, extent), (0,), **more)


def test_the_rank_with_most_of_a_cell_writes_it():
    table = [[entry(extent=(3, 4))], [entry(offset=(3, 0), extent=(5, 4))]]
    (cell,) = plan_save(table).cells
    assert cell.owner == 1
    assert [(part.source, str(part.box)) for part in cell.fragments] == [(1, "[3:8, 0:4]"), (0, "[0:3, 0:4]")]
    assert [part.source for _, part in plan_save(table).handovers()] == [0]


def test_replicas_share_the_writing_and_hand_nothing_over():
    table = [[entry(key=f"model/w{i}") for i in range(8)] for _ in range(4)]
    plan = plan_save(table)
    assert [len(plan.written_by(rank)) for rank in range(4)] == [2, 2, 2, 2]
    assert plan.handovers() == []


def test_a_hole_is_named():
    table = [[entry(extent=(3, 4))], [entry(offset=(4, 0), extent=(4, 4))]]
    with pytest.raises(CoverError, match=r"'model/w' of shape \[8, 4\]: no rank holds \[3:4, 0:4\]"):
        plan_save(table)


def test_an_overlap_is_named():
    table = [[entry(extent=(5, 4))], [entry(offset=(4, 0), extent=(4, 4))]]
    with pytest.raises(CoverError, match=r"\[0:5, 0:4\] and \[4:8, 0:4\] overlap in \[4:5, 0:4\]"):
        plan_save(table)


@given(tables(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_shifted_box_is_always_found(found, data):
    """Without copies to fill in for it, a wrong offset leaves a hole or an overlap."""
    places = [(r, i) for r, table in enumerate(found) for i, e in enumerate(table) if e.box.num_elements]
    r, i = data.draw(st.sampled_from(places))
    old = found[r][i]
    copies = [e for table in found for e in table if (e.key, e.box) == (old.key, old.box)]
    room = [d for d, (o, n, g) in enumerate(zip(old.box.offset, old.box.shape, old.global_shape, strict=True)) if n < g]
    if len(copies) > 1 or not room:
        return
    dim = data.draw(st.sampled_from(room))
    step = 1 if old.box.end[dim] < old.global_shape[dim] else -1
    offset = tuple(o + step * (d == dim) for d, o in enumerate(old.box.offset))
    found[r][i] = replace(old, box=Box(offset, old.box.shape))
    with pytest.raises(CoverError, match=old.key):
        plan_save(found, SMALL)


def test_shared_boxes_may_be_cut_differently():
    """A tied embedding on two stages, whose optimizer shards end elsewhere."""
    table = [
        [entry(extent=(3, 4), shared=True)],
        [entry(offset=(3, 0), extent=(5, 4), shared=True)],
        [entry(extent=(6, 4), shared=True)],
        [entry(offset=(6, 0), extent=(2, 4), shared=True)],
    ]
    (cell,) = plan_save(table).cells
    assert sum(part.box.num_elements for part in cell.fragments) == 32
    with pytest.raises(CoverError, match="no rank holds"):
        plan_save([table[0], [], [], table[3]])


def test_ranks_that_disagree_are_named():
    with pytest.raises(ShapeMismatch, match=r"\[8, 4\] cut along \[0\] on rank 0 but \[9, 4\] cut"):
        plan_save([[entry()], [entry(shape=(9, 4))]])
    with pytest.raises(DtypeMismatch, match="float32 on rank 0 but float64 on rank 1"):
        plan_save([[entry()], [replace(entry(), dtype="float64")]])


def test_an_array_without_elements_has_no_cells():
    plan = plan_save([[entry(shape=(0, 4), extent=(0, 4))]])
    assert [spec.num_cells for spec in plan.arrays] == [0]
    assert plan.cells == ()


def test_an_empty_shard_among_full_ones_is_legal():
    table = [[entry(shape=(6, 4), offset=(min(2 * r, 6), 0), extent=(2 if r < 3 else 0, 4))] for r in range(4)]
    assert {part.source for cell in plan_save(table).cells for part in cell.fragments} == {0, 1, 2}
