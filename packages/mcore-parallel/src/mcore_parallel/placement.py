"""What a parameter is: which boxes of which logical arrays it holds, who shares them, how its gradient is completed.

A local parameter may hold several *pieces* (fused q|k|v, fused gate|up): rows of several logical arrays stacked
along dim 0. Initialisation, gradient reduction, norms, ties, optimizer shards and checkpoints all read this one
description. Rows that no piece covers are padding: always zero, in no norm and in no checkpoint. No torch here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

DATA_AXES = ("dp", "cp")


@dataclass(frozen=True)
class Init:
    """How a logical array starts: ``normal`` with ``std``, or ``zeros`` / ``ones``; a function of global indices."""

    kind: Literal["normal", "zeros", "ones"] = "normal"
    std: float = 0.02


@dataclass(frozen=True)
class Piece:
    """A box of one logical array, stored in rows ``start : start + shape[0]`` of the local parameter.

    ``partial_over``: axes whose ranks hold copies of this box that each saw only part of its gradient (sum them).
    ``copied_over``: axes whose ranks hold copies that all saw the whole gradient already.
    ``cut_dims``: dims of the logical array that some layout may cut (for checkpoint grids).
    """

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int = 0
    init: Init = field(default_factory=Init)
    partial_over: tuple[str, ...] = ()
    copied_over: tuple[str, ...] = ()
    cut_dims: tuple[int, ...] = ()

    @property
    def num_elements(self) -> int:
        """Elements of the local box."""
        return math.prod(self.shape)

    @property
    def shared_over(self) -> tuple[str, ...]:
        """All axes along which copies of this box exist, besides the data axes."""
        return self.partial_over + self.copied_over


@dataclass(frozen=True)
class Placement:
    """The pieces of one local parameter, and the axes that replicate it whole for data parallelism.

    ``decay``: whether weight decay applies (biases, norms and other vectors have none). ``chunk``: which of the rank's
    model chunks it belongs to; gradients of one chunk are reduced together.
    """

    pieces: tuple[Piece, ...]
    data_axes: tuple[str, ...] = DATA_AXES
    decay: bool = True
    chunk: int = 0

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """Axes over which some piece's gradient is still a partial sum after backward."""
        return tuple(dict.fromkeys(axis for piece in self.pieces for axis in piece.partial_over))


def replicated(
    name: str,
    shape: tuple[int, ...],
    *,
    init: Init,
    partial_over: tuple[str, ...] = (),
    copied_over: tuple[str, ...] = (),
) -> Placement:
    """Every rank holds all of ``shape``; vectors get no weight decay."""
    piece = Piece(name, shape, (0,) * len(shape), shape, init=init, partial_over=partial_over, copied_over=copied_over)
    return Placement((piece,), decay=len(shape) > 1)


def rows(name: str, global_shape: tuple[int, ...], *, begin: int, end: int, init: Init, start: int = 0) -> Piece:
    """Rows ``begin : end`` of a logical array (column-parallel weights, vocabulary rows), clipped to its extent."""
    end = max(min(end, global_shape[0]), min(begin, global_shape[0]))
    begin = min(begin, global_shape[0])
    rest = global_shape[1:]
    return Piece(
        name, global_shape, (begin,) + (0,) * len(rest), (end - begin, *rest), start=start, init=init, cut_dims=(0,)
    )


def columns(name: str, global_shape: tuple[int, int], *, begin: int, end: int, init: Init) -> Piece:
    """Columns ``begin : end`` of a logical matrix (row-parallel weights)."""
    return Piece(name, global_shape, (0, begin), (global_shape[0], end - begin), init=init, cut_dims=(1,))


def shared(piece: Piece, *, partial_over: tuple[str, ...] = (), copied_over: tuple[str, ...] = ()) -> Piece:
    """``piece`` with further axes along which copies of it exist."""
    return replace(
        piece,
        partial_over=piece.partial_over + partial_over,
        copied_over=piece.copied_over + copied_over,
    )


def place(parameter: Any, placement: Placement) -> Any:
    """Attach ``placement`` to a parameter and return the parameter."""
    parameter.placement = placement
    return parameter


def placement_of(parameter: Any) -> Placement:
    """The placement attached to ``parameter``.

    Raises:
        ValueError: the parameter has none (a layer forgot to place it).
    """
    placement = getattr(parameter, "placement", None)
    if not isinstance(placement, Placement):
        raise ValueError(f"parameter of shape {tuple(parameter.shape)} has no placement; layers must call place()")
    return placement
