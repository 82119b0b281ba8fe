"""One flat buffer of weights and one of main gradients for all parameters of a kind, reduced bucket by bucket.

Weights and gradients have the same offsets; each parameter becomes a view of the first and its ``main_grad`` a view of
the second, so accumulation, reduction, the optimizer and ZeRO's all-gather work in place. Main gradients are fp32
(float64 for float64 weights). ZeRO-1: Rajbhandari et al. (arXiv:1910.02054).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mcore_parallel.axis import Axis
from mcore_parallel.collectives import Done, Work, all_gather_into, all_reduce, reduce_scatter_into
from mcore_parallel.flat_layout import BucketPlan, Span, padding_ranges, plan_buckets
from mcore_parallel.placement import Placement, placement_of


@dataclass(frozen=True)
class BufferKind:
    """What the parameters of one buffer have in common.

    ``partial_axes``: the axes over which some of their gradients are still partial after backward. Parameters of
    different partial axes never share a buffer: ranks along such an axis may hold different other parameters (first
    and last pipeline stage), and equal offsets are what makes the copies' sums equal bit for bit. ``chunk``: buckets
    are not shared between model chunks, so that one can be reduced while another's backward runs.
    """

    data_axes: tuple[str, ...]
    dtype: torch.dtype
    partial_axes: tuple[str, ...]
    decay: bool
    chunk: int = 0

    @property
    def late(self) -> bool:
        """Whether gradients need sums over other axes, after backward, before the data-parallel reduction."""
        return bool(self.partial_axes)


def main_grad_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of weights of ``dtype`` are accumulated and reduced."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Bucket:
    """A contiguous part of a buffer that is reduced by one collective."""

    def __init__(self, buffer: GradBuffer, plan: BucketPlan) -> None:
        self.plan = plan
        self.axis = buffer.axis
        self.sharded = buffer.sharded
        self.late, self.chunk = buffer.kind.late, buffer.kind.chunk
        self.grads = buffer.grads[plan.begin : plan.end]
        self.weights = buffer.weights[plan.begin : plan.end]
        begin, end = plan.shard(self.axis.rank, self.axis.size) if self.sharded else (plan.begin, plan.end)
        self.own = slice(begin - plan.begin, end - plan.begin)
        self.names = [parameter_label(buffer.placements[span.index]) for span in plan.spans]
        self._padding = [
            buffer.grads[span.begin + b : span.begin + e]
            for span in plan.spans
            for b, e in padding_ranges(buffer.placements[span.index], tuple(buffer.parameters[span.index].shape))
        ]
        self.local_sum: Tensor | None = None
        self.work: Work = Done()
        self.gathering: Work = Done()
        self.launched = False

    @property
    def priority(self) -> int:
        """Build index of the parameter that backward finishes last; buckets of high priority are done first."""
        return min(span.index for span in self.plan.spans)

    def reset(self) -> None:
        """Start a step: zero the gradients."""
        self.grads.zero_()
        self.local_sum = None
        self.work = Done()
        self.launched = False

    def seal(self) -> None:
        """The local gradient is whole: clear its padding rows and, before any reduction, note whether it is finite."""
        for rows in self._padding:
            rows.zero_()
        if self.axis.size > 1 or self.late:
            self.local_sum = self.grads.sum()

    def launch(self) -> None:
        """Start the reduction over the data axes."""
        self.launched = True
        if self.sharded:
            self.work = reduce_scatter_into(self.grads[self.own], self.grads, self.axis, async_op=True)
        else:
            self.work = all_reduce(self.grads, self.axis, async_op=True)

    def gather_grads(self) -> Work:
        """Start giving every rank the whole reduced gradient, where ZeRO left it a shard."""
        if not self.sharded:
            return Done()
        return all_gather_into(self.grads, self.grads[self.own], self.axis, async_op=True)

    def start_gather_weights(self) -> None:
        """Start giving every rank the whole updated weights, where ZeRO updated a shard."""
        if self.sharded:
            self.gathering = all_gather_into(self.weights, self.weights[self.own], self.axis, async_op=True)

    def finish_gather_weights(self) -> None:
        """Wait until the weights are whole; at once if they are."""
        self.gathering.wait()
        self.gathering = Done()

    def non_finite_names(self) -> list[str]:
        """Names of the parameters whose gradient was not finite on this rank before any reduction.

        The reduction was in place, so within a bucket that was not finite here the names are those that are not finite
        now (all of the bucket's, should none be).
        """
        if self.local_sum is not None and bool(torch.isfinite(self.local_sum)):
            return []
        begin = self.plan.begin
        bad = [
            name
            for name, span in zip(self.names, self.plan.spans, strict=True)
            if not bool(torch.isfinite(self.grads[span.begin - begin : span.end - begin]).all())
        ]
        return bad if bad or self.local_sum is None else list(self.names)


class GradBuffer:
    """The flat weights and main gradients of all parameters of one kind."""

    def __init__(
        self,
        kind: BufferKind,
        parameters: Sequence[tuple[int, nn.Parameter]],
        *,
        axis: Axis,
        bucket_size: int,
        sharded: bool,
    ) -> None:
        """``parameters`` as ``(build index, parameter)``; the last built come first, as backward ends them first."""
        self.kind, self.axis = kind, axis
        self.sharded = sharded and axis.size > 1
        ordered = sorted(parameters, key=lambda item: -item[0])
        self.parameters = dict(ordered)
        self.placements = {index: placement_of(parameter) for index, parameter in ordered}
        sizes = [(index, parameter.numel()) for index, parameter in ordered]
        plans = plan_buckets(sizes, bucket_size=bucket_size, num_shards=axis.size if self.sharded else 1)
        device = ordered[0][1].device
        self.weights = torch.zeros(plans[-1].end, dtype=kind.dtype, device=device)
        self.grads = torch.zeros(plans[-1].end, dtype=main_grad_dtype(kind.dtype), device=device)
        self.spans: tuple[Span, ...] = tuple(span for plan in plans for span in plan.spans)
        for span in self.spans:
            self._adopt(self.parameters[span.index], span)
        self.buckets = tuple(Bucket(self, plan) for plan in plans)

    def _adopt(self, parameter: nn.Parameter, span: Span) -> None:
        view = self.weights[span.begin : span.end].view(parameter.shape)
        with torch.no_grad():
            view.copy_(parameter)
        parameter.data = view
        parameter.main_grad = self.grads[span.begin : span.end].view(parameter.shape)  # type: ignore[attr-defined]

    @property
    def owned(self) -> list[tuple[int, int]]:
        """The ranges that this rank's optimizer updates: all, or under ZeRO its slice of each bucket."""
        if not self.sharded:
            return [(0, self.grads.numel())]
        return [bucket.plan.shard(self.axis.rank, self.axis.size) for bucket in self.buckets]


def parameter_label(placement: Placement) -> str:
    """The logical names of a parameter's pieces, for messages."""
    return " + ".join(piece.name for piece in placement.pieces)
