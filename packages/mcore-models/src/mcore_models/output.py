"""The output side of the last stage: final norm, and the output layer as a loss or as logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mcore_models.norm import LayerNorm, RMSNorm
from mcore_parallel.axis import Axis
from mcore_parallel.collectives import gather_along
from mcore_parallel.cross_entropy import linear_cross_entropy
from mcore_parallel.linear import linear


class Output(nn.Module):
    """Final norm and output weight ``[v/tp, h]`` (with padding rows), which may be the word embedding's own."""

    def __init__(
        self,
        norm: LayerNorm | RMSNorm,
        weight: nn.Parameter,
        *,
        vocab_size: int,
        tp: Axis,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        self.final_layernorm = norm
        self.weight = weight
        self.vocab_size, self.tp, self.sequence_parallel = vocab_size, tp, sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """Final norm: ``[s, b, h]`` (``[s/tp, b, h]`` under sequence parallelism) -> the same."""
        normed: Tensor = self.final_layernorm(hidden)
        return normed

    def loss(self, hidden: Tensor, labels: Tensor, loss_mask: Tensor | None) -> Tensor:
        """Sum of the token losses (float64 scalar) of normed hidden states, never holding all logits."""
        if loss_mask is None:
            loss_mask = torch.ones(labels.shape, dtype=torch.float32, device=labels.device)
        return linear_cross_entropy(
            hidden,
            self.weight,
            labels,
            loss_mask,
            tp=self.tp,
            vocab_size=self.vocab_size,
            sequence_parallel=self.sequence_parallel,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[s, b, v]`` of normed hidden states, gathered over tp and without padding."""
        local = linear(hidden, self.weight, None, axis=self.tp, sequence_parallel=self.sequence_parallel)
        return gather_along(local, self.tp, dim=2)[..., : self.vocab_size]
