"""From a rank's memory to boxes of logical arrays: views, never copies.

A fused parameter (q|k|v, gate|up) becomes one box per logical array; a ZeRO shard, which is a run of the flattened
parameter, becomes a few boxes that are views of the shard. Padding rows belong to no piece and are never seen here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mcore_ckpt.arrays import check_key, itemsize
from mcore_ckpt.errors import ShapeMismatch
from mcore_ckpt.grid import Box, boxes_of_range
from mcore_ckpt.plan import Entry
from mcore_parallel.placement import Piece, Placement


@dataclass(frozen=True)
class LocalArray:
    """A box of a logical array and the local memory that holds it.

    ``key``: ``"model/<name>"`` or ``"optimizer/<slot>/<name>"``. ``tensor``: exactly ``shape``, any strides; it is
    read by a save and written in place by a load. ``cut_dims``: dims that some layout may cut (they shape the grid).
    ``shared``: other ranks may hold the same elements cut elsewhere. A box may have no elements.

    Raises:
        ShapeMismatch: box, tensor and global shape do not fit together.
        CheckpointError: a key that is no safe path, or a dtype that cannot be stored.
    """

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    tensor: torch.Tensor
    cut_dims: tuple[int, ...] = ()
    shared: bool = False

    def __post_init__(self) -> None:
        check_key(self.key)
        itemsize(self.dtype)
        if not len(self.global_shape) == len(self.offset) == len(self.shape):
            raise ShapeMismatch(
                f"array {self.key!r}: global shape {list(self.global_shape)}, offset {list(self.offset)} and shape "
                f"{list(self.shape)} must have as many dims as each other"
            )
        if tuple(self.tensor.shape) != self.shape:
            raise ShapeMismatch(
                f"array {self.key!r}: the local tensor has shape {list(self.tensor.shape)}, its box {list(self.shape)}"
            )
        if any(o < 0 or o + n > g for o, n, g in zip(self.offset, self.shape, self.global_shape, strict=True)):
            raise ShapeMismatch(
                f"array {self.key!r}: the box {self.box} reaches beyond the global shape {list(self.global_shape)}"
            )

    @property
    def box(self) -> Box:
        """The box in global coordinates."""
        return Box(self.offset, self.shape)

    @property
    def dtype(self) -> str:
        """The zarr name of the tensor's dtype."""
        return dtype_name(self.tensor.dtype)

    def entry(self) -> Entry:
        """What other ranks need to know of this box."""
        return Entry(self.key, self.dtype, self.global_shape, self.box, self.cut_dims, self.shared)


def dtype_name(dtype: torch.dtype) -> str:
    """zarr's name of a torch dtype; they are the same words."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype that zarr calls ``name``.

    Raises:
        CheckpointError: it cannot be stored.
    """
    itemsize(name)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The elements of ``tensor`` in row-major order as a flat uint8 array; its own memory when it is contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    bytes_of: np.ndarray = flat.view(torch.uint8).numpy()
    return bytes_of


def parameter_arrays(prefix: str, tensor: torch.Tensor, placement: Placement) -> list[LocalArray]:
    """The pieces of a parameter-shaped tensor (the parameter itself, or a full optimizer state of it).

    ``tensor``: ``[rows, ...]`` as the parameter lies in memory, padding included. One array per piece, a view of its
    rows. ``prefix``: ``"model"`` or ``"optimizer/<slot>"``.

    Raises:
        ShapeMismatch: a piece does not lie inside the tensor.
    """
    arrays = []
    for piece in placement.pieces:
        _check_piece(piece, tuple(tensor.shape))
        view = tensor.detach()
        if piece.shape:
            view = view[piece.start : piece.start + piece.shape[0]]
        arrays.append(_local_array(prefix, piece, Box(piece.offset, piece.shape), view))
    return arrays


def flat_range_arrays(
    prefix: str, flat: torch.Tensor, placement: Placement, *, local_shape: Sequence[int], begin: int
) -> list[LocalArray]:
    """The boxes of a ZeRO shard: elements ``begin : begin + n`` of the flattened local parameter, in ``flat`` ``[n]``.

    ``local_shape``: shape of the local parameter, padding included. Each piece that the range meets gives at most
    ``2 * ndim - 1`` boxes, all views of ``flat``; elements of padding give none.

    Raises:
        ShapeMismatch: ``flat`` is not flat, or a piece does not lie inside ``local_shape``.
    """
    if flat.dim() != 1:
        raise ShapeMismatch(f"a shard must be flat, got shape {list(flat.shape)} for {placement.pieces[0].name!r}")
    flat = flat.detach()
    arrays = []
    for piece in placement.pieces:
        _check_piece(piece, tuple(local_shape))
        first = piece.start * math.prod(local_shape[1:])
        low = max(begin, first)
        high = min(begin + flat.numel(), first + piece.num_elements)
        at = low - begin
        for box in boxes_of_range(piece.shape, low - first, high - first):
            offset = tuple(p + o for p, o in zip(piece.offset, box.offset, strict=True))
            view = flat[at : at + box.num_elements].view(box.shape)
            arrays.append(_local_array(prefix, piece, Box(offset, box.shape), view))
            at += box.num_elements
    return arrays


def _local_array(prefix: str, piece: Piece, box: Box, view: torch.Tensor) -> LocalArray:
    return LocalArray(
        f"{prefix}/{piece.name}",
        piece.global_shape,
        box.offset,
        box.shape,
        view,
        cut_dims=piece.cut_dims,
        shared=bool(piece.shared_over),
    )


def _check_piece(piece: Piece, local_shape: tuple[int, ...]) -> None:
    fits = len(piece.shape) == len(local_shape) and piece.shape[1:] == local_shape[1:]
    if not fits or (piece.shape and piece.start + piece.shape[0] > local_shape[0]):
        raise ShapeMismatch(
            f"piece {piece.name!r} of shape {list(piece.shape)} at row {piece.start} does not lie inside the local "
            f"parameter of shape {list(local_shape)}"
        )
