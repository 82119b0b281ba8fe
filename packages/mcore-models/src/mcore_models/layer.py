"""One pre-norm transformer layer."""

from __future__ import annotations

from torch import Tensor, nn

from mcore_models.attention import SelfAttention
from mcore_models.dropout import DropoutState, HiddenDropout
from mcore_models.kv_cache import LayerCache
from mcore_models.mlp import MLP
from mcore_models.norm import LayerNorm, RMSNorm
from mcore_models.rope import RopeTables


class TransformerLayer(nn.Module):
    """``x += attention(norm(x)); x += mlp(norm(x))``, with dropout on both branches.

    ``dropouts``: those of the attention branch and of the MLP branch.
    """

    def __init__(
        self,
        attention: SelfAttention,
        mlp: MLP,
        *,
        input_norm: LayerNorm | RMSNorm,
        mlp_norm: LayerNorm | RMSNorm,
        dropouts: tuple[HiddenDropout, HiddenDropout],
    ) -> None:
        super().__init__()
        self.input_layernorm = input_norm
        self.self_attention = attention
        self.pre_mlp_layernorm = mlp_norm
        self.mlp = mlp
        self.attention_dropout, self.mlp_dropout = dropouts

    def forward(
        self,
        x: Tensor,
        *,
        rope: RopeTables | None = None,
        dropout: DropoutState | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """``[s, b, h]`` (``[s/tp, b, h]`` under sequence parallelism) -> the same."""
        attended = self.self_attention(self.input_layernorm(x), rope=rope, dropout=dropout, cache=cache)
        x = x + self.attention_dropout(attended, dropout)
        return x + self.mlp_dropout(self.mlp(self.pre_mlp_layernorm(x)), dropout)
