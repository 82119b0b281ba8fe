"""Vocab-parallel cross-entropy, and the output layer fused with it in token chunks: no full logits anywhere.

Legend: ``s`` sequence, ``b`` micro-batch, ``t = s * b`` tokens, ``v`` vocabulary, ``/tp`` split over the tensor axis.
Columns beyond the true vocabulary (padding) never get probability. Losses are sums over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from mcore_parallel.axis import Axis
from mcore_parallel.collectives import all_reduce, gathered, reduce_scattered
from mcore_parallel.weight_grad import accumulate_weight_grad, mark_grad_ready, matmul

_CHUNK_ELEMENTS = 1 << 24


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _losses_and_probabilities(logits: Tensor, labels: Tensor, axis: Axis, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Per-token losses ``[t]`` and softmax ``[t, v/tp]`` written over ``logits`` (fp32 or wider)."""
    width = logits.shape[1]
    first = axis.rank * width
    own = max(0, min(width, vocab_size - first))
    if own < width:
        logits[:, own:] = float("-inf")
    top = logits.amax(1)
    all_reduce(top, axis, op="max")
    column = labels - first
    foreign = (column < 0) | (column >= own)
    column = column.masked_fill(foreign, 0).unsqueeze(1)
    probabilities = logits.sub_(top.unsqueeze(1))
    target = probabilities.gather(1, column).squeeze(1).masked_fill_(foreign, 0)
    probabilities.exp_()
    sums = torch.stack([probabilities.sum(1), target])
    all_reduce(sums, axis)
    probabilities.div_(sums[0].unsqueeze(1))
    return sums[0].log() - sums[1], probabilities


def _subtract_one_hot(probabilities: Tensor, labels: Tensor, axis: Axis) -> None:
    """``softmax - onehot(labels)`` in place, ``[t, v/tp]``."""
    width = probabilities.shape[1]
    column = labels - axis.rank * width
    own = (column >= 0) & (column < width)
    ones = own.to(probabilities.dtype).neg_().unsqueeze(1)
    probabilities.scatter_add_(1, column.masked_fill(~own, 0).unsqueeze(1), ones)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, axis: Axis, vocab_size: int) -> Tensor:
        work = _at_least_fp32(logits)
        work = work.clone() if work is logits else work
        losses, probabilities = _losses_and_probabilities(work, labels, axis, vocab_size)
        ctx.save_for_backward(probabilities, labels)
        ctx.axis, ctx.dtype = axis, logits.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, labels = ctx.saved_tensors
        delta = probabilities.clone()
        _subtract_one_hot(delta, labels, ctx.axis)
        return delta.mul_(grad.unsqueeze(1)).to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, *, tp: Axis, vocab_size: int) -> Tensor:
    """Loss of every token ``[b, s]`` from logits ``[s, b, v/tp]`` and labels ``[b, s]``; at least fp32 inside."""
    seq, batch, width = logits.shape
    flat = logits.reshape(seq * batch, width)
    losses = _VocabParallelCrossEntropy.apply(flat, labels.t().reshape(-1), tp, vocab_size)
    return cast(Tensor, losses).view(seq, batch).t()


@dataclass(frozen=True)
class _Mode:
    """``grad``: the caller's grad mode, which a Function's forward cannot see for itself."""

    sequence: bool
    grad: bool


class _LinearCrossEntropy(torch.autograd.Function):
    """Summed loss of ``hidden @ weight.T``. Gradients are made chunk by chunk in forward, while the logits exist.

    The weight's gradient is added to its main grad in forward already, which is right because losses are sums and the
    backward pass is seeded with 1 (no scale factor exists anywhere).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, axis: Axis, vocab_size: int, mode: _Mode
    ) -> Tensor:
        full = gathered(hidden, axis) if mode.sequence else hidden
        flat = full.reshape(-1, full.shape[-1])
        d_hidden = torch.empty_like(flat) if mode.grad else None
        d_weight: Tensor | None = None
        total = torch.zeros((), dtype=torch.float64, device=flat.device)
        chunk = max(1, _CHUNK_ELEMENTS // weight.shape[0])
        for begin in range(0, flat.shape[0], chunk):
            part = slice(begin, begin + chunk)
            logits = _chunk_logits(flat[part], weight)
            losses, delta = _losses_and_probabilities(logits, labels[part], axis, vocab_size)
            total += (losses * mask[part]).sum(dtype=torch.float64)
            if d_hidden is None:
                continue
            _subtract_one_hot(delta, labels[part], axis)
            delta = delta.mul_(mask[part].to(delta.dtype).unsqueeze(1)).to(flat.dtype)
            d_hidden[part] = matmul(delta, weight)
            piece = accumulate_weight_grad(weight, delta, flat[part]) if ctx.needs_input_grad[1] else None
            if piece is not None:
                d_weight = piece if d_weight is None else d_weight.add_(piece)
        ctx.save_for_backward(d_hidden, d_weight, weight)
        ctx.axis, ctx.sequence, ctx.shape = axis, mode.sequence, full.shape
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, weight = ctx.saved_tensors
        if d_weight is None and grad.device.type == "cpu":
            assert grad.item() == 1.0, "the summed loss must be seeded with 1: its weight gradient is already in place"
        if d_weight is not None:
            d_weight = d_weight * grad.to(d_weight.dtype)
        else:
            mark_grad_ready(weight)
        d_full = (d_hidden * grad.to(d_hidden.dtype)).view(ctx.shape)
        if ctx.sequence:
            d_full = reduce_scattered(d_full, ctx.axis)
        else:
            all_reduce(d_full, ctx.axis)
        return d_full, d_weight, None, None, None, None, None


def _chunk_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    if hidden.device.type == "cpu" and hidden.dtype in (torch.bfloat16, torch.float16):
        return hidden.float() @ weight.float().t()  # what matmul would do, without rounding the logits
    return _at_least_fp32(hidden @ weight.t())


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    *,
    tp: Axis,
    vocab_size: int,
    sequence_parallel: bool = False,
) -> Tensor:
    """Sum over tokens of ``loss_mask * cross_entropy(hidden @ weight.T, labels)`` as a float64 scalar.

    ``hidden`` ``[s, b, h]`` (``[s/tp, b, h]`` with sequence parallelism), ``weight`` ``[v/tp, h]`` (padded), ``labels``
    and ``loss_mask`` ``[b, s]``. Communication per token chunk: a max and a two-row sum over tp.
    """
    mode = _Mode(sequence=sequence_parallel and tp.size > 1, grad=torch.is_grad_enabled())
    flat_labels, flat_mask = labels.t().reshape(-1), loss_mask.t().reshape(-1)
    total = _LinearCrossEntropy.apply(hidden, weight, flat_labels, flat_mask, tp, vocab_size, mode)
    return cast(Tensor, total)
