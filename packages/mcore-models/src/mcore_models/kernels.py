"""A kernel set: the six functions that layers call, as one frozen value. The built-in one is plain torch.

A plugin offers another set (fused CUDA kernels, say) through the hook ``mcore_kernels``; layers never ask which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional

from mcore_models.core_attention import core_attention
from mcore_models.heads import HeadSplit
from mcore_models.pointwise import rms_norm, split_and_rotate, swiglu
from mcore_models.rope import RopeTables


class RMSNormKernel(Protocol):
    """``x / rms(x) * weight`` over the last dim (arXiv:1910.07467); at least fp32 inside, result as ``x``."""

    def __call__(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor: ...


class LayerNormKernel(Protocol):
    """Layer normalisation over the last dim (arXiv:1607.06450); at least fp32 inside, result as ``x``."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor: ...


class ActivationKernel(Protocol):
    """``gelu``: ``[..., f]`` -> ``[..., f]``. ``swiglu``: ``[..., 2f]`` as ``[gate | up]`` -> ``[..., f]``."""

    def __call__(self, x: Tensor, /) -> Tensor: ...


class RopeKernel(Protocol):
    """``[s, b, (n + 2g)d]`` as ``[q | k | v]`` -> q ``[s, b, n, d]``, k and v ``[s, b, g, d]``; q and k rotated by
    ``tables`` (their first ``r`` channels, paired in halves), not at all when it is None. Heads are this rank's."""

    def __call__(self, qkv: Tensor, tables: RopeTables | None, heads: HeadSplit) -> tuple[Tensor, Tensor, Tensor]: ...


class AttentionKernel(Protocol):
    """Causal attention: q ``[s, b, n, d]``, k, v ``[t, b, g, d]`` -> ``[s, b, n * d]``.

    The queries are the last ``s`` of ``t`` positions. ``keep`` ``[b, n, s, t]``: which probabilities survive dropout,
    None when none is dropped.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, keep: Tensor | None = None, dropout: float = 0.0
    ) -> Tensor: ...


@dataclass(frozen=True)
class KernelSet:
    """What a transformer layer computes with, besides its matrix products."""

    rms_norm: RMSNormKernel
    layer_norm: LayerNormKernel
    swiglu: ActivationKernel
    gelu: ActivationKernel
    apply_rope: RopeKernel
    core_attention: AttentionKernel


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    # torch's kernel keeps its statistics in fp32 (or wider) for every dtype
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, epsilon)


def _gelu(x: Tensor) -> Tensor:
    # the tanh form, as in GPT-2 and Megatron (arXiv:1606.08415)
    return functional.gelu(x, approximate="tanh")


def torch_kernels() -> KernelSet:
    """The kernel set of plain torch operations, for CPU and CUDA (``--transformer-impl local``)."""
    return KernelSet(
        rms_norm=rms_norm,
        layer_norm=_layer_norm,
        swiglu=swiglu,
        gelu=_gelu,
        apply_rope=split_and_rotate,
        core_attention=core_attention,
    )
