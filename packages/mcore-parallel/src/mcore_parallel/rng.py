"""Randomness as a pure function of identity: initial values and dropout masks that no layout can change.

Every value is ``mix(key + index)``: ``key`` names what is drawn (seed, parameter name; or seed, step, sample, layer,
site), ``index`` where (global element, position, channel). ``mix`` is the output function of SplitMix64 (Steele,
Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), computed in wrapping int64.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import torch
from torch import Tensor

from mcore_parallel.placement import Piece, Placement

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_INIT_ROWS_BYTES = 1 << 25


def key(*parts: int | str) -> int:
    """A 64-bit key from any mix of integers and strings; distinct tuples give unrelated keys."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """SplitMix64's output function of int64 counters (any shape)."""
    x = x * _GOLDEN
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform(bits: Tensor) -> Tensor:
    """int64 random bits to float64 in (0, 1), from the top 53 bits."""
    return (_shift_right(bits, 11).to(torch.float64) + 0.5) * 2.0**-53


def normal(bits_key: int, index: Tensor) -> Tensor:
    """Standard normal float64 at global element ``index`` (Box-Muller on two counters per element)."""
    first = uniform(mix(index * 2 + bits_key))
    second = uniform(mix(index * 2 + 1 + bits_key))
    return torch.sqrt(-2.0 * torch.log(first)) * torch.cos(2.0 * math.pi * second)


def box_values(piece: Piece, *, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Initial values of a piece's box, float64 ``piece.shape``: a function of seed, name and global index alone."""
    return _normal_box(piece, seed=seed, device=device) if piece.init.kind == "normal" else _constant_box(piece, device)


def _constant_box(piece: Piece, device: torch.device | str) -> Tensor:
    value = {"zeros": 0.0, "ones": 1.0}[piece.init.kind]
    return torch.full(piece.shape, value, dtype=torch.float64, device=device)


def _normal_box(piece: Piece, *, seed: int, device: torch.device | str) -> Tensor:
    parameter_key = key("init", seed, piece.name)
    index = torch.zeros((1,) * len(piece.shape), dtype=torch.int64, device=device)
    for dim, (begin, extent) in enumerate(zip(piece.offset, piece.shape, strict=True)):
        stride = math.prod(piece.global_shape[dim + 1 :])
        along = torch.arange(begin, begin + extent, device=device) * stride
        index = index + along.view([-1 if d == dim else 1 for d in range(len(piece.shape))])
    return normal(parameter_key, index) * piece.init.std


def initialise(parameter: Tensor, placement: Placement, *, seed: int) -> None:
    """Fill a local parameter from its placement, in place, a few rows at a time; padding rows become zero."""
    with torch.no_grad():
        parameter.zero_()
        for piece in placement.pieces:
            _fill(parameter, piece, seed)


def _fill(parameter: Tensor, piece: Piece, seed: int) -> None:
    row_elements = max(1, math.prod(piece.shape[1:]))
    step = max(1, _INIT_ROWS_BYTES // (8 * row_elements))
    for row in range(0, piece.shape[0], step):
        extent = min(step, piece.shape[0] - row)
        part = replace(
            piece,
            offset=(piece.offset[0] + row, *piece.offset[1:]),
            shape=(extent, *piece.shape[1:]),
        )
        target = parameter[piece.start + row : piece.start + row + extent]
        target.copy_(box_values(part, seed=seed, device=parameter.device))


def site_keys(samples: Tensor, *, seed: int, step: int, layer: int, site: str) -> Tensor:
    """One int64 key per sample ``[b]`` for the masks of one dropout site in one step."""
    return mix(samples * 2 + key("dropout", seed, step, layer, site))


def keep_mask(keys: Tensor, *, positions: Tensor, channels: Tensor, probability: float) -> Tensor:
    """Which elements survive dropout: bool ``[s, b, c]``.

    ``keys`` ``[b]`` from :func:`site_keys`; ``positions`` ``[s]`` and ``channels`` ``[c]`` are global;
    ``probability`` that an element is dropped.
    """
    rows = mix(keys.view(1, -1) + positions.view(-1, 1))
    bits = mix(rows.unsqueeze(-1) + channels)
    threshold = round(probability * 2.0**53)
    return _shift_right(bits, 11) >= threshold


def dropout(x: Tensor, mask: Tensor, probability: float) -> Tensor:
    """``x`` where ``mask``, scaled by ``1 / (1 - probability)``; the mask decides, so recomputation is exact."""
    return x * (mask.to(x.dtype) / (1.0 - probability))
