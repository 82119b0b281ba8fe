"""Every collective of mcore, in one file: raw operations, and conjugate autograd pairs built from them.

All take an :class:`~mcore_parallel.axis.Axis`, are the identity at size 1 and report to its recorder. On CPU, bf16 and
fp16 buffers are reduced in fp32 (gloo would otherwise add in 16 bits); the recorder counts what moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_parallel.axis import Axis

Reduction = Literal["sum", "max", "min"]
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Work(Protocol):
    """Something to wait for before its buffers may be touched."""

    def wait(self) -> Any: ...


class Done:
    """The work of an operation that has nothing left to do."""

    def wait(self) -> None:
        """Return at once."""


class _ThenCopy:
    """Work whose result must be copied (and cast) back into the caller's buffer."""

    def __init__(self, work: Work, target: Tensor, source: Tensor) -> None:
        self.work, self.target, self.source = work, target, source

    def wait(self) -> None:
        self.work.wait()
        self.target.copy_(self.source)


def _needs_upcast(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)


def _single_tensor_op(new: str, old: str) -> Callable[..., Any]:
    # torch 2.13 renamed these and deprecates the old names; older torch has only the old.
    return cast(Callable[..., Any], getattr(dist, new, None) or getattr(dist, old))


def all_reduce(x: Tensor, axis: Axis, *, op: Reduction = "sum", async_op: bool = False) -> Work:
    """Reduce ``x`` (any shape) over ``axis`` in place."""
    if axis.size == 1:
        return Done()
    buffer = x.float() if _needs_upcast(x) else x.contiguous()
    axis.record("all_reduce", buffer)
    work = dist.all_reduce(buffer, op=_OPS[op], group=axis.group, async_op=async_op)
    if buffer is x:
        return work if work is not None else Done()
    if work is None:
        x.copy_(buffer)
        return Done()
    return _ThenCopy(work, x, buffer)


def all_gather_into(out: Tensor, x: Tensor, axis: Axis, *, async_op: bool = False) -> Work:
    """Gather every rank's ``x`` ``[n, ...]`` into ``out`` ``[n * size, ...]``; ``x`` may be a slice of ``out``."""
    if axis.size == 1:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x.view_as(out))
        return Done()
    axis.record("all_gather", out)
    gather = _single_tensor_op("all_gather_single", "all_gather_into_tensor")
    work = gather(out, x.contiguous(), group=axis.group, async_op=async_op)
    return work if work is not None else Done()


def reduce_scatter_into(out: Tensor, x: Tensor, axis: Axis, *, async_op: bool = False) -> Work:
    """Sum ``x`` ``[n * size, ...]`` over ``axis``; ``out`` ``[n, ...]`` takes this rank's slice, maybe in ``x``."""
    if axis.size == 1:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x.view_as(out))
        return Done()
    source = x.float() if _needs_upcast(x) else x.contiguous()
    target = torch.empty_like(out, dtype=source.dtype) if source.dtype != out.dtype else out
    axis.record("reduce_scatter", source)
    scatter = _single_tensor_op("reduce_scatter_single", "reduce_scatter_tensor")
    work = scatter(target, source, group=axis.group, async_op=async_op)
    if target is out:
        return work if work is not None else Done()
    if work is None:
        out.copy_(target)
        return Done()
    return _ThenCopy(work, out, target)


def broadcast(x: Tensor, axis: Axis, *, source: int = 0) -> Tensor:
    """Give every rank the ``x`` of the rank with index ``source`` on ``axis``, in place; returns ``x``."""
    if axis.size > 1:
        axis.record("broadcast", x)
        dist.broadcast(x, src=axis.ranks[source], group=axis.group)
    return x


def exchange(
    axis: Axis, *, sends: Sequence[tuple[int, Tensor]] = (), receives: Sequence[tuple[int, Tensor]] = ()
) -> list[Work]:
    """Post sends and receives together (no order between them can deadlock). Peers are indices on ``axis``.

    Sent tensors must stay untouched, and received buffers unread, until the returned works are waited for.
    """
    ops = []
    for peer, tensor in sends:
        axis.record("send", tensor)
        ops.append(dist.P2POp(dist.isend, tensor, axis.ranks[peer], group=axis.group))
    for peer, buffer in receives:
        axis.record("recv", buffer)
        ops.append(dist.P2POp(dist.irecv, buffer, axis.ranks[peer], group=axis.group))
    return list(dist.batch_isend_irecv(ops)) if ops else []


def gathered(x: Tensor, axis: Axis) -> Tensor:
    """All ranks' ``x`` concatenated along dim 0, without autograd."""
    if axis.size == 1:
        return x
    out = x.new_empty((x.shape[0] * axis.size, *x.shape[1:]))
    all_gather_into(out, x, axis)
    return out


def reduce_scattered(x: Tensor, axis: Axis) -> Tensor:
    """This rank's dim-0 slice of the sum of all ranks' ``x``, without autograd."""
    if axis.size == 1:
        return x
    check_divides(x.shape[0], axis)
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    reduce_scatter_into(out, x, axis)
    return out


def check_divides(extent: int, axis: Axis) -> None:
    """Refuse to split ``extent`` unevenly.

    Raises:
        ValueError: ``extent`` is no multiple of the axis size.
    """
    if extent % axis.size:
        raise ValueError(f"{extent} does not divide over the {axis.size} ranks of axis {axis.name!r}")


def _own_slice(x: Tensor, axis: Axis, dim: int) -> Tensor:
    check_divides(x.shape[dim], axis)
    extent = x.shape[dim] // axis.size
    return x.narrow(dim, axis.rank * extent, extent).contiguous()


def _gathered_along(x: Tensor, axis: Axis, dim: int) -> Tensor:
    if axis.size == 1:
        return x
    return gathered(x.movedim(dim, 0).contiguous(), axis).movedim(0, dim)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        all_reduce(grad, ctx.axis)
        return grad, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        out = x.contiguous().clone()
        all_reduce(out, axis)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherAlong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _gathered_along(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _own_slice(grad, ctx.axis, ctx.dim), None, None


class _SplitAlong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _own_slice(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gathered_along(grad, ctx.axis, ctx.dim), None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return gathered(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scattered(grad, ctx.axis), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return reduce_scattered(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered(grad, ctx.axis), None


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Forward: identity. Backward: all-reduce (Megatron's f)."""
    return x if axis.size == 1 else cast(Tensor, _Copy.apply(x, axis))


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Forward: all-reduce. Backward: identity (Megatron's g)."""
    return x if axis.size == 1 else cast(Tensor, _Reduce.apply(x, axis))


def gather_along(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Forward: all-gather along ``dim``. Backward: this rank's slice (for consumers that are replicated)."""
    return x if axis.size == 1 else cast(Tensor, _GatherAlong.apply(x, axis, dim))


def split_along(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Forward: this rank's slice along ``dim``. Backward: all-gather."""
    return x if axis.size == 1 else cast(Tensor, _SplitAlong.apply(x, axis, dim))


def gather_sequence(x: Tensor, axis: Axis) -> Tensor:
    """``[s/tp, b, h]`` -> ``[s, b, h]``. Forward: all-gather along dim 0. Backward: reduce-scatter."""
    return x if axis.size == 1 else cast(Tensor, _GatherSequence.apply(x, axis))


def scatter_sequence(x: Tensor, axis: Axis) -> Tensor:
    """``[s, b, h]`` partial sums -> ``[s/tp, b, h]``. Forward: reduce-scatter along dim 0. Backward: all-gather."""
    return x if axis.size == 1 else cast(Tensor, _ScatterSequence.apply(x, axis))
