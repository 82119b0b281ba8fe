"""Logical arrays in and out of a stage's parameters: whole tensors by global name, and the boxes a rank holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from mcore_parallel.placement import Piece, placement_of

Read = Callable[[nn.Parameter], Tensor]


def logical_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Global shape of every logical array that ``model`` holds (boxes of), in the order of its parameters."""
    pieces = (piece for parameter in model.parameters() for piece in placement_of(parameter).pieces)
    return {piece.name: piece.global_shape for piece in pieces}


def load_logical(model: nn.Module, arrays: Mapping[str, Tensor]) -> None:
    """Copy from whole arrays the boxes that this rank holds; padding rows stay as they are.

    Raises:
        ValueError: an array of this stage is missing or has another shape; all are named, and nothing is copied.
    """
    wrong = [
        f"{name}: have {tuple(arrays[name].shape)}, need {shape}" if name in arrays else f"{name}: missing"
        for name, shape in logical_shapes(model).items()
        if name not in arrays or tuple(arrays[name].shape) != shape
    ]
    if wrong:
        raise ValueError("the arrays do not fit the model: " + "; ".join(wrong))
    with torch.no_grad():
        for parameter in model.parameters():
            for piece in placement_of(parameter).pieces:
                _local_rows(parameter, piece).copy_(arrays[piece.name][_box(piece)])


def _itself(parameter: nn.Parameter) -> Tensor:
    return parameter.detach()


def export_logical(model: nn.Module, *, read: Read = _itself) -> dict[str, Tensor]:
    """Whole arrays by global name, from a rank that holds all of them (tp 1). Padding is left out; no copies are made.

    ``read`` takes a parameter's values from elsewhere, say ``lambda p: p.grad`` or ``lambda p: p.main_grad``.

    Raises:
        ValueError: this rank holds only a part of some array.
    """
    found: dict[str, Tensor] = {}
    for parameter in model.parameters():
        values = read(parameter)
        for piece in placement_of(parameter).pieces:
            if piece.shape != piece.global_shape:
                raise ValueError(
                    f"{piece.name}: this rank holds {piece.shape} of {piece.global_shape}; "
                    "export from one rank, or save a checkpoint, which gathers"
                )
            found[piece.name] = _local_rows(values, piece)
    return found


def _box(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + extent) for begin, extent in zip(piece.offset, piece.shape, strict=True))


def _local_rows(values: Tensor, piece: Piece) -> Tensor:
    return values[piece.start : piece.start + piece.shape[0]]
