"""Who writes which cell: a pure function of the boxes that all ranks hold. No torch, no communication.

Every rank computes the same plan from the same table. Each cell gets exactly one writer, which is given the parts
that others hold before it writes; there is no partial write and no read-modify-write, so no two ranks ever touch
one file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mcore_ckpt.arrays import ArraySpec, itemsize
from mcore_ckpt.errors import CoverError, DtypeMismatch, ShapeMismatch
from mcore_ckpt.grid import Box, GridRule, cell_box, cell_shape, cells_touching, intersect, remainder, subtract, whole


@dataclass(frozen=True)
class Entry:
    """What one rank holds of one array, without the data.

    ``shared``: other ranks may hold the same elements in boxes cut elsewhere (a tied embedding on two pipeline
    stages whose optimizer shards differ); without it, boxes must be identical or disjoint.
    """

    key: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    cut_dims: tuple[int, ...] = ()
    shared: bool = False


@dataclass(frozen=True)
class Fragment:
    """The part ``box`` (global coordinates) of a cell, taken from entry number ``entry`` of rank ``source``."""

    source: int
    entry: int
    box: Box


@dataclass(frozen=True)
class CellPlan:
    """One cell: its only writer and the disjoint fragments that fill it."""

    spec: ArraySpec
    index: tuple[int, ...]
    box: Box
    owner: int
    fragments: tuple[Fragment, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements (an edge cell is padded to more)."""
        return self.box.num_elements * self.spec.itemsize


@dataclass(frozen=True)
class SavePlan:
    """All arrays and all cells, in one order that is the same on every rank."""

    arrays: tuple[ArraySpec, ...]
    cells: tuple[CellPlan, ...]

    def written_by(self, rank: int) -> list[CellPlan]:
        """The cells that ``rank`` writes."""
        return [cell for cell in self.cells if cell.owner == rank]

    def handovers(self) -> list[tuple[CellPlan, Fragment]]:
        """The fragments that travel to the writer of their cell from another rank."""
        return [(cell, part) for cell in self.cells for part in cell.fragments if part.source != cell.owner]


@dataclass(frozen=True)
class _Holding:
    """A distinct box of an array and the ranks that hold it (rank -> its entry number)."""

    box: Box
    shared: bool
    holders: dict[int, int]


def plan_save(tables: Sequence[Sequence[Entry]], rule: GridRule | None = None) -> SavePlan:
    """Plan the write of ``tables[rank]``.

    A cell goes to the rank that holds most of its bytes; among equals (replicas) to the one with least to write so
    far, then to the lowest rank, the largest cells first.

    Raises:
        CoverError: the boxes leave a hole in an array, or overlap without being copies.
        ShapeMismatch, DtypeMismatch: ranks disagree about an array.
    """
    by_key: dict[str, list[tuple[int, int, Entry]]] = {}
    for rank, table in enumerate(tables):
        for number, entry in enumerate(table):
            by_key.setdefault(entry.key, []).append((rank, number, entry))
    specs: list[ArraySpec] = []
    pending: list[tuple[ArraySpec, tuple[int, ...], Box, list[_Holding]]] = []
    for key in sorted(by_key):
        spec = _spec(by_key[key], rule or GridRule())
        holdings = _holdings(by_key[key])
        check_cover(key, spec.shape, [(h.box, h.shared) for h in holdings])
        specs.append(spec)
        touching: dict[tuple[int, ...], list[_Holding]] = {}
        for holding in holdings:
            for index in cells_touching(holding.box, spec.cell):
                touching.setdefault(index, []).append(holding)
        pending += [(spec, i, cell_box(i, spec.cell, spec.shape), touching[i]) for i in sorted(touching)]
    return SavePlan(tuple(specs), _assign(pending, len(tables)))


def _spec(entries: Sequence[tuple[int, int, Entry]], rule: GridRule) -> ArraySpec:
    first_rank, _, first = entries[0]
    for rank, _, entry in entries:
        if entry.global_shape != first.global_shape or entry.cut_dims != first.cut_dims:
            raise ShapeMismatch(
                f"array {first.key!r} has global shape {list(first.global_shape)} cut along {list(first.cut_dims)} on "
                f"rank {first_rank} but {list(entry.global_shape)} cut along {list(entry.cut_dims)} on rank {rank}; "
                "all ranks must present it alike"
            )
        if entry.dtype != first.dtype:
            raise DtypeMismatch(
                f"array {first.key!r} is {first.dtype} on rank {first_rank} but {entry.dtype} on rank {rank}; "
                "all ranks must present it alike"
            )
    cell = cell_shape(first.global_shape, first.cut_dims, itemsize(first.dtype), rule)
    return ArraySpec(first.key, first.global_shape, first.dtype, cell)


def _holdings(entries: Sequence[tuple[int, int, Entry]]) -> list[_Holding]:
    holders: dict[Box, dict[int, int]] = {}
    shared: dict[Box, bool] = {}
    for rank, number, entry in entries:
        if entry.box.num_elements == 0:
            continue
        holders.setdefault(entry.box, {}).setdefault(rank, number)
        shared[entry.box] = shared.get(entry.box, False) or entry.shared
    return [_Holding(box, shared[box], holders[box]) for box in sorted(holders)]


def check_cover(key: str, shape: Sequence[int], boxes: Sequence[tuple[Box, bool]]) -> None:
    """Check that distinct ``(box, shared)`` make up the array: no hole, no overlap except between shared ones.

    Raises:
        CoverError: names the array and the first hole or overlap.
    """
    ordered = sorted(boxes)
    for i, (box, shared) in enumerate(ordered):
        for other, other_shared in ordered[i + 1 :]:
            if shape and other.offset[0] >= box.end[0]:
                break
            common = intersect(box, other)
            if common is not None and not (shared or other_shared):
                raise CoverError(
                    f"array {key!r}: the boxes {box} and {other} overlap in {common} without being copies; "
                    "fix the placement that says where this parameter lies"
                )
    volume = sum(box.num_elements for box, _ in ordered)
    if volume == whole(shape).num_elements and not any(shared for _, shared in ordered):
        return
    holes = remainder(whole(shape), (box for box, _ in ordered))
    if holes:
        raise CoverError(
            f"array {key!r} of shape {list(shape)}: no rank holds {holes[0]}; "
            "every stage and shard must present its part"
        )


def _assign(
    pending: Sequence[tuple[ArraySpec, tuple[int, ...], Box, list[_Holding]]], num_ranks: int
) -> tuple[CellPlan, ...]:
    load = [0] * num_ranks
    cells: list[CellPlan | None] = [None] * len(pending)
    sizes = [box.num_elements * spec.itemsize for spec, _, box, _ in pending]
    for i in sorted(range(len(pending)), key=lambda i: (-sizes[i], i)):
        spec, index, box, holdings = pending[i]
        owner = min(_held(box, holdings).items(), key=lambda item: (-item[1], load[item[0]], item[0]))[0]
        load[owner] += sizes[i]
        cells[i] = CellPlan(spec, index, box, owner, _fragments(box, holdings, owner))
    return tuple(cell for cell in cells if cell is not None)


def _held(box: Box, holdings: Iterable[_Holding]) -> dict[int, int]:
    """Elements of ``box`` that each rank holds."""
    held: dict[int, int] = {}
    for holding in holdings:
        common = intersect(box, holding.box)
        assert common is not None
        for rank in holding.holders:
            held[rank] = held.get(rank, 0) + common.num_elements
    return held


def _fragments(box: Box, holdings: Sequence[_Holding], owner: int) -> tuple[Fragment, ...]:
    rest, fragments = [box], []
    for holding in sorted(holdings, key=lambda h: (owner not in h.holders, h.box)):
        source = owner if owner in holding.holders else min(holding.holders)
        parts = [part for hole in rest if (part := intersect(hole, holding.box)) is not None]
        fragments += [Fragment(source, holding.holders[source], part) for part in parts]
        rest = [piece for hole in rest for piece in subtract(hole, holding.box)]
    assert not rest, f"cell {box} left {rest} although its array is covered"
    return tuple(fragments)
