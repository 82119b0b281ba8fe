"""Rotary position embeddings: frequencies (with Llama-3.1 scaling) and the cosine and sine tables of one forward pass.

Su et al., "RoFormer" (arXiv:2104.09864); channels are paired in halves (i, i + r/2) as in HF's Llama.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3.1 scaling (arXiv:2407.21783): long wavelengths are stretched by ``factor``, short ones kept, those
    between blended linearly.

    Raises:
        ValueError: ``high_freq_factor`` is not above ``low_freq_factor`` (there would be nothing to blend over).
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rope-scaling-high-freq-factor {self.high_freq_factor} must be above "
                f"rope-scaling-low-freq-factor {self.low_freq_factor}"
            )

    def apply(self, frequencies: Tensor) -> Tensor:
        """Scaled frequencies ``[r/2]``."""
        turns = self.original_max_positions * frequencies / (2.0 * math.pi)
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = blend.clamp(0.0, 1.0)
        return frequencies * (blend + (1.0 - blend) / self.factor)


def inverse_frequencies(rotary_size: int, *, base: float, scaling: RopeScaling | None = None) -> Tensor:
    """``base ** (-2i / r)`` as float64 ``[r/2]`` for ``rotary_size`` ``r`` rotated channels."""
    exponents = torch.arange(0, rotary_size, 2, dtype=torch.float64) / rotary_size
    frequencies = base**-exponents
    return frequencies if scaling is None else scaling.apply(frequencies)


@dataclass(frozen=True)
class RopeTables:
    """Cosines and sines ``[s, 1 or b, 1, r/2]`` of one forward pass."""

    cos: Tensor
    sin: Tensor


class RotaryEmbedding:
    """Makes the tables of given positions. Angles are float64 until the cosine, so far positions lose nothing."""

    def __init__(self, rotary_size: int, *, base: float, scaling: RopeScaling | None = None) -> None:
        if rotary_size < 2 or rotary_size % 2:
            raise ValueError(
                f"rotary embeddings turn pairs of channels, but rotary-percent x head size gives {rotary_size}; "
                "it must be even and at least 2"
            )
        self.rotary_size = rotary_size
        self.frequencies = inverse_frequencies(rotary_size, base=base, scaling=scaling)

    def tables(self, positions: Tensor, dtype: torch.dtype) -> RopeTables:
        """Tables of global ``positions`` ``[s]`` or ``[b, s]``, in ``dtype`` or fp32, whichever is wider."""
        if positions.dim() == 1:
            positions = positions.unsqueeze(0)
        frequencies = self.frequencies.to(positions.device)
        angles = positions.t().unsqueeze(-1).to(torch.float64) * frequencies
        wide = torch.promote_types(dtype, torch.float32)
        return RopeTables(angles.cos().to(wide).unsqueeze(2), angles.sin().to(wide).unsqueeze(2))


def rotary_size(head_size: int, rotary_percent: float) -> int:
    """Rotated channels of a head."""
    return int(head_size * rotary_percent)
