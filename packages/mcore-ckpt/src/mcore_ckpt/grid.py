"""Boxes of a logical array and the grid of cells (chunks) it is stored in. Pure integer arithmetic, no torch.

The grid is a function of the global shape and of the dims that some layout may cut, never of the layout that wrote:
any tensor-parallel degree that divides 16 then reads and writes whole cells.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, order=True)
class Box:
    """The elements ``offset[i] <= index[i] < offset[i] + shape[i]`` of an array."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def end(self) -> tuple[int, ...]:
        """First index after the box on every dim."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    @property
    def num_elements(self) -> int:
        """Elements in the box; 1 for a scalar."""
        return math.prod(self.shape)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The slices that select this box in a tensor that holds exactly ``outer``."""
        return tuple(slice(o - p, o - p + n) for o, p, n in zip(self.offset, outer.offset, self.shape, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{e}" for o, e in zip(self.offset, self.end, strict=True)) + "]"


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole array."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """The common elements of two boxes, None when there are none."""
    offset = tuple(max(x, y) for x, y in zip(a.offset, b.offset, strict=True))
    end = tuple(min(x, y) for x, y in zip(a.end, b.end, strict=True))
    if any(e <= o for o, e in zip(offset, end, strict=True)):
        return None
    return Box(offset, tuple(e - o for o, e in zip(offset, end, strict=True)))


def subtract(a: Box, b: Box) -> list[Box]:
    """The elements of ``a`` that are not in ``b``, as at most ``2n`` disjoint boxes."""
    common = intersect(a, b)
    if common is None:
        return [a] if a.num_elements else []
    rest: list[Box] = []
    offset, shape = list(a.offset), list(a.shape)
    for dim in range(len(shape)):
        below = common.offset[dim] - offset[dim]
        above = offset[dim] + shape[dim] - common.end[dim]
        if below:
            rest.append(Box(tuple(offset), (*shape[:dim], below, *shape[dim + 1 :])))
        if above:
            start = (*offset[:dim], common.end[dim], *offset[dim + 1 :])
            rest.append(Box(start, (*shape[:dim], above, *shape[dim + 1 :])))
        offset[dim], shape[dim] = common.offset[dim], common.shape[dim]
    return rest


def remainder(box: Box, holes: Iterable[Box]) -> list[Box]:
    """The elements of ``box`` that are in none of ``holes``, as disjoint boxes in index order."""
    rest = [box] if box.num_elements else []
    for hole in holes:
        rest = [piece for part in rest for piece in subtract(part, hole)]
    return sorted(rest)


def boxes_of_range(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Elements ``begin : end`` of the flattened array as at most ``2n - 1`` boxes, in the order of the elements.

    For a matrix: the rest of a row, whole rows, the start of a row. Each box is contiguous in the flattened array.
    """
    if begin >= end:
        return []
    if not shape:
        return [Box((), ())]
    inner = tuple(shape[1:])
    row = math.prod(inner)
    first, last = begin // row, (end - 1) // row
    if first == last and end - begin < row:
        return _in_row(inner, first, begin - first * row, end - first * row)
    boxes: list[Box] = []
    if begin % row:
        boxes += _in_row(inner, first, begin - first * row, row)
        first += 1
    stop = end // row
    if stop > first:
        boxes.append(Box((first, *(0 for _ in inner)), (stop - first, *inner)))
    if end % row:
        boxes += _in_row(inner, last, 0, end - last * row)
    return boxes


def _in_row(inner: tuple[int, ...], row: int, begin: int, end: int) -> list[Box]:
    return [Box((row, *box.offset), (1, *box.shape)) for box in boxes_of_range(inner, begin, end)]


@dataclass(frozen=True)
class GridRule:
    """How arrays are cut into cells: up to ``parts`` along a cuttable dim while cells stay at or above
    ``smallest`` bytes, then along any dim until they are at most ``largest`` bytes."""

    parts: int = 16
    smallest: int = MIB
    largest: int = 16 * MIB


def cell_shape(shape: Sequence[int], cut_dims: Iterable[int], itemsize: int, rule: GridRule) -> tuple[int, ...]:
    """The shape of one cell (zarr's chunk shape) of an array of ``shape``.

    Cell edges divide the dims where a divisor exists, so that no cell is padded; an array of at most
    ``rule.smallest`` bytes is one cell.
    """
    cell = [max(1, n) for n in shape]
    for dim in cut_dims:
        parts = rule.parts
        while parts > 1 and (shape[dim] % parts or math.prod(cell) * itemsize < parts * rule.smallest):
            parts //= 2
        cell[dim] //= max(1, parts)
    for dim in range(len(cell)):
        pieces = -(-math.prod(cell) * itemsize // rule.largest)
        if pieces > 1:
            cell[dim] = _edge(cell[dim], max(1, cell[dim] // pieces))
    return tuple(cell)


def _edge(extent: int, target: int) -> int:
    """A cell edge of at most ``target``: a divisor of ``extent`` if one is not much smaller, else an even split."""
    for edge in range(target, target // 4, -1):
        if extent % edge == 0:
            return edge
    pieces = -(-extent // target)
    return -(-extent // pieces)


def cell_box(index: Sequence[int], cell: Sequence[int], shape: Sequence[int]) -> Box:
    """The elements of cell ``index``, clipped to the array."""
    offset = tuple(i * c for i, c in zip(index, cell, strict=True))
    return Box(offset, tuple(min(c, n - o) for c, n, o in zip(cell, shape, offset, strict=True)))


def cells_touching(box: Box, cell: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Indices of the cells that hold elements of ``box``, in index order."""
    if box.num_elements == 0:
        return
    yield from itertools.product(
        *(range(o // c, (e - 1) // c + 1) for o, e, c in zip(box.offset, box.end, cell, strict=True))
    )
