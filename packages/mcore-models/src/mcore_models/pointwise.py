"""RMSNorm, SwiGLU and rotary embeddings as autograd functions with few passes over memory and nothing extra saved."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from mcore_models.heads import HeadSplit
from mcore_models.rope import RopeTables


def at_least_fp32(x: Tensor) -> Tensor:
    """``x`` in fp32, or as it is if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = at_least_fp32(x)
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean_square.add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        rows = x.shape[-1]
        wide, wide_grad = at_least_fp32(x).reshape(-1, rows), at_least_fp32(grad).reshape(-1, rows)
        scale, wide_weight = scale.view(-1, 1), at_least_fp32(weight)
        # one product serves the weight's gradient and the projection onto x, both as matrix-vector products
        product = wide_grad * wide
        d_weight = scale.view(-1) @ product
        projection = (product @ wide_weight).unsqueeze(1).mul_(scale.pow(3)).div_(-rows)
        d_x = (wide_grad * wide_weight).mul_(scale).addcmul_(wide, projection)
        return d_x.view_as(x).to(x.dtype), d_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """``x * rsqrt(mean(x^2) + epsilon) * weight`` over the last dim of ``[..., h]`` (arXiv:1910.07467)."""
    return cast(Tensor, _RMSNorm.apply(x, weight, epsilon))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fused: Tensor) -> Tensor:
        ctx.save_for_backward(fused)
        gate, up = fused.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (fused,) = ctx.saved_tensors
        gate, up = fused.chunk(2, dim=-1)
        d_fused = torch.empty_like(fused)
        d_gate, d_up = d_fused.chunk(2, dim=-1)
        torch.mul(functional.silu(gate), grad, out=d_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=d_gate)
        return d_fused


def swiglu(fused: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[gate | up]`` ``[..., 2f]`` -> ``[..., f]`` (arXiv:2002.05202); saves only its input."""
    return cast(Tensor, _SwiGLU.apply(fused))


def _rotate(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn the channel pairs (i, i + r/2) of ``x`` ``[s, b, heads, d]`` into ``out``; copy channels from ``r`` on."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]


class _SplitAndRotate(torch.autograd.Function):
    """One buffer out, q, k and v as views of it; backward writes one gradient buffer, without zero-fill or concat."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: HeadSplit) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.heads, ctx.dtype = heads, qkv.dtype
        source = qkv.view(*qkv.shape[:-1], -1, heads.head_size)
        rotated = heads.local_heads + heads.local_kv_heads
        out = torch.empty_like(source, dtype=cos.dtype)
        _rotate(out[:, :, :rotated], source[:, :, :rotated], cos, sin)
        out[:, :, rotated:] = source[:, :, rotated:]
        out = out.to(qkv.dtype)
        q, k, v = out.split([heads.local_heads, heads.local_kv_heads, heads.local_kv_heads], dim=2)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        heads: HeadSplit = ctx.heads
        shape = (*grads[0].shape[:2], heads.local_heads + 2 * heads.local_kv_heads, heads.head_size)
        out = torch.empty(shape, dtype=cos.dtype, device=cos.device)
        begin = 0
        for grad, turns in zip(grads, (True, True, False), strict=True):
            part = out[:, :, begin : begin + grad.shape[2]]
            if turns:
                _rotate(part, grad, cos, -sin)  # a rotation's transpose turns back
            else:
                part.copy_(grad)
            begin += grad.shape[2]
        return out.flatten(2).to(ctx.dtype), None, None, None


def split_and_rotate(qkv: Tensor, tables: RopeTables | None, heads: HeadSplit) -> tuple[Tensor, Tensor, Tensor]:
    """``[q | k | v]`` ``[s, b, (n + 2g)d]`` -> q ``[s, b, n, d]``, k and v ``[s, b, g, d]`` (arXiv:2104.09864).

    q and k are rotated by ``tables``, not at all when that is None. ``n`` and ``g`` are this rank's heads.
    """
    if tables is None:
        source = qkv.view(*qkv.shape[:-1], -1, heads.head_size)
        q, k, v = source.split([heads.local_heads, heads.local_kv_heads, heads.local_kv_heads], dim=2)
        return q, k, v
    return cast(
        tuple[Tensor, Tensor, Tensor],
        _SplitAndRotate.apply(qkv, tables.cos, tables.sin, heads),
    )
