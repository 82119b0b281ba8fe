"""Column- and row-parallel linear layers whose weight gradients go straight into the main-grad buffer.

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

_HALF = (torch.bfloat16, torch.float16)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in the dtype of ``a``; on CPUs through fp32, where 16-bit GEMMs can be 10-45x slower."""
    if a.device.type == "cpu" and a.dtype in _HALF:
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


def accumulate_weight_grad(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """Add ``grad.T @ x`` to ``weight.main_grad`` and return None; without a main grad, return it for autograd.

    ``grad`` ``[t, out]``, ``x`` ``[t, in]``. The caller calls ``grad_ready`` when its micro-batch is done.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return matmul(grad.t(), x)
    if grad.dtype == main_grad.dtype:
        torch.addmm(main_grad, grad.t(), x, out=main_grad)
    elif grad.device.type == "cpu":
        torch.addmm(main_grad, grad.t().to(main_grad.dtype), x.to(main_grad.dtype), out=main_grad)
    else:
        main_grad.add_(torch.mm(grad.t(), x, out_dtype=main_grad.dtype))
    return None


def mark_grad_ready(parameter: Tensor) -> None:
    """Tell the gradient buffer, if there is one, that this use of ``parameter`` has added its gradient."""
    ready = getattr(parameter, "grad_ready", None)
    if ready is not None:
        ready()


class _Linear(torch.autograd.Function):
    """``y = gather(x) @ W.T + bias`` with the input's collective overlapped with the weight gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, sequence: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
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
        x, weight = ctx.saved_tensors
        axis, sequence = ctx.axis, ctx.sequence
        full, gathering = _start_gather(x, axis) if sequence else (x, None)
        flat_grad = grad.reshape(-1, grad.shape[-1])
        dx = work = None
        if ctx.needs_input_grad[0]:
            dx, work = _start_input_grad(matmul(flat_grad, weight).view_as(full), axis, sequence)
        weight_grad = bias_grad = None
        if gathering is not None:
            gathering.wait()
        if ctx.needs_input_grad[1]:
            weight_grad = accumulate_weight_grad(weight, flat_grad, full.reshape(-1, full.shape[-1]))
            mark_grad_ready(weight)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            bias_grad = flat_grad.sum(0)
        if work is not None:
            work.wait()
        return dx, weight_grad, bias_grad, None, None


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
