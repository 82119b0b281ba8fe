"""Where parameters lie in a flat buffer: buckets, alignment, pieces and padding. Arithmetic only, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_parallel.placement import Piece, Placement

ALIGNMENT = 64  # elements; parameters, buckets and shards start on it, so vector kernels treat every element alike


def round_up(value: int, unit: int) -> int:
    """The smallest multiple of ``unit`` that is at least ``value``."""
    return -(-value // unit) * unit


@dataclass(frozen=True)
class Span:
    """Elements ``begin : end`` of a flat buffer hold parameter number ``index`` (in build order)."""

    index: int
    begin: int
    end: int


@dataclass(frozen=True)
class BucketPlan:
    """Elements ``begin : end`` of a flat buffer, reduced together; ``spans`` in order of offset."""

    begin: int
    end: int
    spans: tuple[Span, ...]

    def shard(self, rank: int, num_shards: int) -> tuple[int, int]:
        """The range of the buffer that ``rank`` of ``num_shards`` owns under ZeRO."""
        extent = (self.end - self.begin) // num_shards
        return self.begin + rank * extent, self.begin + (rank + 1) * extent


def plan_buckets(sizes: Sequence[tuple[int, int]], *, bucket_size: int, num_shards: int) -> tuple[BucketPlan, ...]:
    """Lay out parameters given as ``(index, num_elements)`` in the order given, never cutting one in two.

    A bucket closes once it holds at least ``bucket_size`` elements; its length is a multiple of
    ``ALIGNMENT * num_shards``.
    """
    buckets: list[BucketPlan] = []
    spans: list[Span] = []
    begin = at = 0
    for position, (index, size) in enumerate(sizes):
        spans.append(Span(index, at, at + size))
        at += round_up(size, ALIGNMENT)
        if at - begin >= bucket_size or position == len(sizes) - 1:
            end = begin + max(round_up(at - begin, ALIGNMENT * num_shards), ALIGNMENT * num_shards)
            buckets.append(BucketPlan(begin, end, tuple(spans)))
            begin = at = end
            spans = []
    return tuple(buckets)


def piece_range(piece: Piece, local_shape: tuple[int, ...]) -> tuple[int, int]:
    """The elements of the flattened local parameter that ``piece`` covers.

    Raises:
        ValueError: the piece does not fit the local shape.
    """
    if not local_shape:
        return 0, 1
    if piece.shape[1:] != local_shape[1:] or piece.start + piece.shape[0] > local_shape[0]:
        raise ValueError(
            f"piece {piece.name!r} of shape {piece.shape} at row {piece.start} does not fit a parameter of shape "
            f"{local_shape}"
        )
    row = math.prod(local_shape[1:])
    return piece.start * row, (piece.start + piece.shape[0]) * row


def padding_ranges(placement: Placement, local_shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """The elements of the flattened local parameter that no piece covers, as ascending ranges."""
    gaps = []
    at = 0
    for begin, end in sorted(piece_range(piece, local_shape) for piece in placement.pieces):
        if begin > at:
            gaps.append((at, begin))
        at = max(at, end)
    total = math.prod(local_shape)
    if total > at:
        gaps.append((at, total))
    return gaps


def merge_ranges(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending ranges with touching or overlapping neighbours joined and empty ones dropped."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if begin >= end:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def intersect(ranges: Sequence[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """The parts of ``ranges`` inside ``begin : end``."""
    clipped = ((max(b, begin), min(e, end)) for b, e in ranges)
    return [(b, e) for b, e in clipped if b < e]
