"""Dropout whose masks are a pure function of (seed, step, sample, layer, site, position, channel), so that no layout,
micro-batch split or recomputation can change them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_models.heads import HeadSplit
from mcore_parallel import rng
from mcore_parallel.axis import Axis


@dataclass(frozen=True)
class DropoutState:
    """What identifies the masks of one micro-batch: run seed, step, and the global sample numbers ``[b]`` (int64)."""

    seed: int
    step: int
    sample_ids: Tensor

    def keys(self, layer: int, site: str, device: torch.device) -> Tensor:
        """One key per sample ``[b]`` for one site."""
        return rng.site_keys(self.sample_ids.to(device), seed=self.seed, step=self.step, layer=layer, site=site)


@dataclass(frozen=True)
class HiddenDropout:
    """Dropout of hidden states at one site of one (global) layer."""

    probability: float
    layer: int
    site: str
    tp: Axis
    sequence_parallel: bool

    def __call__(self, x: Tensor, state: DropoutState | None) -> Tensor:
        """``[s, b, h]`` (``[s/tp, b, h]`` under sequence parallelism) -> the same; identity without a state."""
        if state is None or self.probability == 0.0:
            return x
        first = self.tp.rank * x.shape[0] if self.sequence_parallel else 0
        mask = rng.keep_mask(
            state.keys(self.layer, self.site, x.device),
            positions=torch.arange(first, first + x.shape[0], device=x.device),
            channels=torch.arange(x.shape[2], device=x.device),
            probability=self.probability,
        )
        return rng.dropout(x, mask, self.probability)


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout of the attention probabilities of one (global) layer."""

    probability: float
    layer: int
    heads: HeadSplit

    def keep(self, sequence: int, state: DropoutState | None, device: torch.device) -> Tensor | None:
        """Which probabilities of this rank's heads survive: bool ``[b, n/tp, s, s]``; None when none is dropped."""
        if state is None or self.probability == 0.0:
            return None
        positions = torch.arange(sequence, device=device)
        first = self.heads.first_head
        head = torch.arange(first, first + self.heads.local_heads, device=device)
        mask = rng.keep_mask(
            state.keys(self.layer, "attention_probabilities", device),
            positions=positions,
            channels=(head.unsqueeze(1) * sequence + positions).flatten(),
            probability=self.probability,
        )
        return mask.unflatten(2, (self.heads.local_heads, sequence)).permute(1, 2, 0, 3)
