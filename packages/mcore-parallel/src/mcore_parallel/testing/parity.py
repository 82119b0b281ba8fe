"""The parity oracle's arithmetic: logical arrays put together from the boxes that ranks hold, and compared.

The error of an array is ``max|a - b| / max(max|b|, 1e-3 * M)`` where ``M`` is the largest ``max|b|`` of any array:
some true gradients are zero (key biases under softmax) and have no relative error of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BOUND_FLOAT64 = 1e-10
BOUND_FLOAT32 = 1e-5
_FLOOR = 1e-3


class Box(NamedTuple):
    """A box of one logical array: ``tensor`` has the box's shape and starts at ``offset`` of the global array."""

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True)
class Comparison:
    """Error of one named quantity against the reference."""

    name: str
    error: float


def assemble(ranks: Sequence[Iterable[Box]]) -> dict[str, Tensor]:
    """Logical arrays from every rank's boxes; where several ranks hold copies, they must be bit-equal.

    Raises:
        AssertionError: copies differ, or an element of an array is held by no rank.
    """
    arrays: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for rank, boxes in enumerate(ranks):
        for box in boxes:
            if box.name not in arrays:
                arrays[box.name] = box.tensor.new_zeros(box.global_shape)
                filled[box.name] = torch.zeros(box.global_shape, dtype=torch.bool)
            at = tuple(slice(o, o + n) for o, n in zip(box.offset, box.tensor.shape, strict=True))
            held, there = filled[box.name][at], arrays[box.name][at]
            if not torch.equal(there[held], box.tensor[held]):
                worst = (there[held] - box.tensor[held]).abs().max().item()
                raise AssertionError(f"rank {rank} holds a copy of {box.name} that differs by {worst:.3e}")
            arrays[box.name][at] = box.tensor
            filled[box.name][at] = True
    for name, mask in filled.items():
        if not bool(mask.all()):
            raise AssertionError(f"{int((~mask).sum())} of {mask.numel()} elements of {name} are held by no rank")
    return arrays


def compare(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> list[Comparison]:
    """Errors of every array, worst first.

    Raises:
        AssertionError: the two sides do not hold the same names.
    """
    if got.keys() != want.keys():
        raise AssertionError(
            f"arrays differ: only here {got.keys() - want.keys()}, only there {want.keys() - got.keys()}"
        )
    largest = max((_peak(array) for array in want.values()), default=0.0)
    errors = [Comparison(name, _error(got[name], want[name], largest)) for name in want]
    return sorted(errors, key=lambda c: c.error, reverse=True)


def scalar_error(got: float, want: float) -> float:
    """Relative error of one number."""
    return abs(got - want) / max(abs(want), 1e-30)


def _peak(array: Tensor) -> float:
    return float(array.abs().max()) if array.numel() else 0.0


def _error(got: Tensor, want: Tensor, largest: float) -> float:
    if not want.numel():
        return 0.0
    difference = float((got - want).abs().max())
    if difference == 0.0:
        return 0.0
    error = difference / max(_peak(want), _FLOOR * largest)
    return error if error == error else float("inf")  # NaN anywhere is as wrong as it gets
