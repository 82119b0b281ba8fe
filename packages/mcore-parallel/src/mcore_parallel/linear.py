"""Column- and row-parallel linear layers whose weight gradients go straight into the main-grad buffer, at once or
through the queue of :mod:`mcore_parallel.weight_grad`.

Legend: ``s`` sequence, ``b`` micro-batch, ``/tp`` split over the tensor axis. Shoeybi et al., "Megatron-LM"
(arXiv:1909.08053); sequence parallelism: Korthikanti et al. (arXiv:2205.05198).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from mcore_parallel.axis import Axis
from mcore_parallel.collectives import (
    Work,
    all_gather_into,
    all_reduce,
    check_divides,
    gathered,
    reduce_from,
    reduce_scatter_into,
    scatter_sequence,
)
from mcore_parallel.placement import Placement, place
from mcore_parallel.weight_grad import accumulate_weight_grad, mark_grad_ready, matmul, queue_of

_HALF = (torch.bfloat16, torch.float16)


class _Linear(torch.autograd.Function):
    """``y = gather(x) @ W.T + bias`` with the input's collective overlapped with the weight gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, sequence: bool) -> Tensor:
        ctx.save_for_backward(x)
        # Not saved by autograd: under recomputation that would give a copy without main_grad and queue.
        ctx.weight = weight
        ctx.axis, ctx.sequence, ctx.has_bias = axis, sequence, bias is not None
        full = gathered(x, axis) if sequence else x
        flat = full.reshape(-1, full.shape[-1])
        if bias is not None and flat.dtype not in _HALF:
            out = torch.addmm(bias, flat, weight.t())
        else:
            out = matmul(flat, weight.t())
            if bias is not None:
                out += bias
        return out.view(*full.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        weight, axis = ctx.weight, ctx.axis
        flat_grad = grad.reshape(-1, grad.shape[-1])
        product = _WeightGrad(weight, flat_grad, x, axis if ctx.sequence else None)
        queue = queue_of(weight) if ctx.needs_input_grad[1] else None
        runs_now = ctx.needs_input_grad[1] and queue is None
        if runs_now:
            product.start()
        dx = work = None
        if ctx.needs_input_grad[0]:
            length = x.shape[0] * (axis.size if ctx.sequence else 1)
            full = matmul(flat_grad, weight).view(length, *x.shape[1:])
            dx, work = _start_input_grad(full, axis, ctx.sequence)
        weight_grad = bias_grad = None
        if queue is not None:
            queue.put(product)
        elif runs_now:
            weight_grad = product.run()
        if ctx.has_bias and ctx.needs_input_grad[2]:
            bias_grad = flat_grad.sum(0)
        if work is not None:
            work.wait()
        return dx, weight_grad, bias_grad, None, None


class _WeightGrad:
    """``grad.T @ gather(x)`` of one use of ``weight``: at once, or later from the queue.

    Holds ``x`` ``[s, b, in]`` and ``grad`` ``[s * b, out]``; under sequence parallelism (``axis`` given) the slice of x
    ``[s/tp, b, in]`` alone, which is gathered when the product runs: the communication of a step stays the same, and
    what is held while it waits is smaller.
    """

    def __init__(self, weight: Tensor, grad: Tensor, x: Tensor, axis: Axis | None) -> None:
        self.weight, self.grad, self.x, self.axis = weight, grad, x, axis
        self._full, self._gathering = x, cast(Work, None)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.grad, self.x))

    def start(self) -> None:
        if self.axis is not None:
            self._full, self._gathering = _start_gather(self.x, self.axis)

    def run(self) -> Tensor | None:
        """Add to the main grad and return None, or return the gradient for autograd."""
        if self.axis is not None:
            self._gathering.wait()
        weight_grad = accumulate_weight_grad(self.weight, self.grad, self._full.reshape(-1, self._full.shape[-1]))
        mark_grad_ready(self.weight)
        return weight_grad

    def finish(self) -> None:
        weight_grad = self.run()
        if weight_grad is not None:
            self.weight.grad = weight_grad if self.weight.grad is None else self.weight.grad + weight_grad


def _start_gather(x: Tensor, axis: Axis) -> tuple[Tensor, Work]:
    full = x.new_empty((x.shape[0] * axis.size, *x.shape[1:]))
    return full, all_gather_into(full, x, axis, async_op=True)


def _start_input_grad(full: Tensor, axis: Axis, sequence: bool) -> tuple[Tensor, Work]:
    if not sequence:
        return full, all_reduce(full, axis, async_op=True)
    out = full.new_empty((full.shape[0] // axis.size, *full.shape[1:]))
    return out, reduce_scatter_into(out, full, axis, async_op=True)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, axis: Axis, sequence_parallel: bool = False) -> Tensor:
    """``x`` ``[s, b, in]`` (``[s/axis, b, in]`` with ``sequence_parallel``) -> ``[s, b, out]``; the input's gradient is
    summed over ``axis`` (and scattered along the sequence again)."""
    sequence = sequence_parallel and axis.size > 1
    return cast(Tensor, _Linear.apply(x, weight, bias, axis, sequence))


def _parameter(shape: tuple[int, ...], placement: Placement, dtype: torch.dtype, device: Any) -> nn.Parameter:
    return cast(nn.Parameter, place(nn.Parameter(torch.empty(shape, dtype=dtype, device=device)), placement))


class ColumnParallelLinear(nn.Module):
    """Output features split over tp: ``[s, b, in]`` (``[s/tp, b, in]`` sequence parallel) -> ``[s, b, out/tp]``."""

    def __init__(
        self,
        in_features: int,
        local_out_features: int,
        *,
        tp: Axis,
        weight: Placement,
        bias: Placement | None = None,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = tp, sequence_parallel
        self.weight = _parameter((local_out_features, in_features), weight, dtype, device)
        self.bias = _parameter((local_out_features,), bias, dtype, device) if bias is not None else None

    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, in]`` or ``[s/tp, b, in]`` -> ``[s, b, out/tp]``."""
        return linear(x, self.weight, self.bias, axis=self.tp, sequence_parallel=self.sequence_parallel)


class RowParallelLinear(nn.Module):
    """Input features split over tp: ``[s, b, in/tp]`` -> ``[s, b, out]`` (``[s/tp, b, out]`` sequence parallel).

    The bias is added once, after the sum over tp.
    """

    def __init__(
        self,
        local_in_features: int,
        out_features: int,
        *,
        tp: Axis,
        weight: Placement,
        bias: Placement | None = None,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = tp, sequence_parallel
        self.alone = Axis(tp.name, (tp.ranks[tp.rank],), recorder=tp.recorder)
        self.weight = _parameter((out_features, local_in_features), weight, dtype, device)
        self.bias = _parameter((out_features,), bias, dtype, device) if bias is not None else None

    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, in/tp]`` -> ``[s, b, out]`` or ``[s/tp, b, out]``."""
        if self.tp.size == 1:
            return linear(x, self.weight, self.bias, axis=self.alone)
        partial = linear(x, self.weight, None, axis=self.alone)
        if self.sequence_parallel:
            check_divides(x.shape[0], self.tp)
        out = scatter_sequence(partial, self.tp) if self.sequence_parallel else reduce_from(partial, self.tp)
        return out if self.bias is None else out + self.bias
