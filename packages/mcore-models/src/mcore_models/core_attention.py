"""Causal attention on q, k, v: torch's fused kernels, or the plain formula when probabilities are dropped.

Legend: ``s`` queries, ``t`` keys (``t >= s``; the queries are the last ``s`` positions), ``b`` micro-batch,
``n`` heads, ``g`` KV heads, ``d`` head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from mcore_models.pointwise import at_least_fp32

_HALF = (torch.bfloat16, torch.float16)


def core_attention(q: Tensor, k: Tensor, v: Tensor, *, keep: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """``softmax(q k^T / sqrt(d)) v`` under the causal mask (Vaswani et al., arXiv:1706.03762).

    q ``[s, b, n, d]``, k, v ``[t, b, g, d]`` -> ``[s, b, n * d]``; head ``i`` reads KV head ``i // (n / g)``. ``keep``
    ``[b, n, s, t]`` says which probabilities survive; those are divided by ``1 - dropout``. Softmax in at least fp32.
    """
    dtype = q.dtype
    if q.device.type == "cpu" and dtype in _HALF:
        # 16-bit attention on a CPU is slower than fp32 (5x in backward), and less exact
        q, k, v = q.float(), k.float(), v.float()
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    out = _fused(q, k, v) if keep is None else _explicit(q, k, v, keep, dropout)
    return out.permute(2, 0, 1, 3).flatten(2).to(dtype)


def _fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``[b, n, s, d]``; torch's ``is_causal`` aligns at the first position, so fewer queries than keys need a mask."""
    queries, keys = q.shape[2], k.shape[2]
    grouped = q.shape[1] != k.shape[1]
    if queries == keys:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    mask = None if queries == 1 else causal_mask(queries, keys, q.device)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Which key each query may see: bool ``[s, t]``, aligned at the last position."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def _explicit(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, dropout: float) -> Tensor:
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    scores = at_least_fp32(q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~causal_mask(q.shape[2], k.shape[2], q.device), float("-inf"))
    probabilities = torch.softmax(scores, dim=-1)
    dropped = probabilities * (keep.to(probabilities.dtype) / (1.0 - dropout))
    return dropped.to(v.dtype) @ v
