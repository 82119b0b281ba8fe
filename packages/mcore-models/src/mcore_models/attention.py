"""Self-attention with a fused q|k|v projection, grouped KV heads and an optional KV cache."""

from __future__ import annotations

from torch import Tensor, nn

from mcore_models.dropout import AttentionDropout, DropoutState
from mcore_models.heads import HeadSplit
from mcore_models.kernels import KernelSet
from mcore_models.kv_cache import LayerCache
from mcore_models.rope import RopeTables
from mcore_parallel.linear import ColumnParallelLinear, RowParallelLinear
from mcore_parallel.placement import Init, Piece, Placement, rows, shared


class SelfAttention(nn.Module):
    """Causal self-attention of this rank's heads (Vaswani et al., arXiv:1706.03762; GQA: arXiv:2305.13245)."""

    def __init__(
        self,
        qkv: ColumnParallelLinear,
        projection: RowParallelLinear,
        *,
        heads: HeadSplit,
        dropout: AttentionDropout,
        kernels: KernelSet,
    ) -> None:
        super().__init__()
        self.linear_qkv = qkv
        self.linear_proj = projection
        self.heads, self.dropout, self.kernels = heads, dropout, kernels

    def forward(
        self,
        x: Tensor,
        *,
        rope: RopeTables | None = None,
        dropout: DropoutState | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """``[s, b, h]`` (``[s/tp, b, h]`` under sequence parallelism) -> the same.

        With a ``cache``, the keys and values seen before count as earlier positions, and the new ones are kept.
        """
        q, k, v = self.kernels.apply_rope(self.linear_qkv(x), rope, self.heads)
        if cache is not None:
            k, v = cache.extend(k, v)
        keep = self.dropout.keep(q.shape[0], dropout, q.device)
        out = self.kernels.core_attention(q, k, v, keep=keep, dropout=self.dropout.probability)
        projected: Tensor = self.linear_proj(out)
        return projected


def qkv_pieces(name: str, heads: HeadSplit, *, columns: tuple[int, ...], init: Init) -> tuple[Piece, ...]:
    """The pieces q, k, v of a fused weight (``columns=(h,)``) or bias (``columns=()``), one under the other.

    ``name`` has a ``{}`` for the letter. Where tp ranks share a KV head, each sees only its query heads' part of the
    gradient of k and v: a partial sum over the axis ``kv_copy``.
    """
    size = heads.head_size
    pieces = []
    start = 0
    for letter, total, first, extent in (
        ("q", heads.num_heads, heads.first_head, heads.local_heads),
        ("k", heads.num_kv_heads, heads.first_kv_head, heads.local_kv_heads),
        ("v", heads.num_kv_heads, heads.first_kv_head, heads.local_kv_heads),
    ):
        begin, end = first * size, (first + extent) * size
        piece = rows(name.format(letter), (total * size, *columns), begin=begin, end=end, init=init, start=start)
        if letter != "q" and heads.shares_kv_head:
            piece = shared(piece, partial_over=("kv_copy",))
        pieces.append(piece)
        start += end - begin
    return tuple(pieces)


def qkv_placements(
    prefix: str, heads: HeadSplit, *, hidden: int, init: Init, has_bias: bool
) -> tuple[Placement, Placement | None]:
    """Placements of the fused weight ``[(n + 2g)d/tp, h]`` and bias of layer ``prefix``."""
    weight = Placement(qkv_pieces(f"{prefix}.linear_{{}}.weight", heads, columns=(hidden,), init=init))
    if not has_bias:
        return weight, None
    bias = qkv_pieces(f"{prefix}.linear_{{}}.bias", heads, columns=(), init=Init("zeros"))
    return weight, Placement(bias, decay=False)
