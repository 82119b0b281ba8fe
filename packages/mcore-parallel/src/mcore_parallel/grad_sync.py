"""Data parallelism: accumulates gradients into flat buffers and reduces them, overlapped with backward.

Sums only: nothing is divided here. The order of reductions is fixed at construction and equal on all ranks of a group:
chunk by chunk, buckets by the order in which backward finishes them; then, after backward, sums of partial gradients
over their axes, and only then the data-parallel reduction of those (a reduce-scatter before would mix reduced and
unreduced shards).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from mcore_parallel.axis import Axis, Layout
from mcore_parallel.collectives import all_reduce
from mcore_parallel.flat_layout import piece_range
from mcore_parallel.grad_buffer import Bucket, BufferKind, GradBuffer, parameter_label
from mcore_parallel.placement import placement_of

_COALESCE_ELEMENTS = 1 << 20  # partial sums smaller than this share one all-reduce


class _Uses:
    """Counts, within a step, how often backward added to one parameter's gradient.

    ``per_micro_batch`` is learned from the first step (a tied weight is used twice) and None while unknown or when the
    count has been seen to vary.
    """

    def __init__(self, name: str, bucket: Bucket) -> None:
        self.name, self.bucket = name, bucket
        self.count = 0
        self.seen = False
        self.per_micro_batch: int | None = None

    def learn(self, num_micro_batches: int) -> None:
        whole, rest = divmod(self.count, num_micro_batches)
        observed = None if rest else whole
        if not self.seen:
            self.per_micro_batch = observed
        elif self.per_micro_batch != observed:
            self.per_micro_batch = None
        self.seen = True


class GradBuffers:
    """All gradient buffers of one rank, their hooks and their reduction.

    A step is ``begin_step(n)``, ``n`` micro-batches of backward in any order and interleaving, ``finish()``. Layers
    either add to ``parameter.main_grad`` and call ``parameter.grad_ready()``, or leave ``.grad`` to autograd. With
    several model chunks, :meth:`reduce_chunk` may be called after a chunk's last backward.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        layout: Layout,
        *,
        bucket_size: int = 40_000_000,
        overlap: bool = True,
        sharded: bool = False,
        chunk_order: Sequence[int] = (),
    ) -> None:
        """Adopt the trainable ``parameters`` (in build order, each placed): their storage moves into flat buffers.

        ``bucket_size`` in elements; ``overlap`` reduces during backward; ``sharded`` is ZeRO-1; ``chunk_order``: model
        chunks in the order in which :meth:`reduce_chunk` is called for them, by default the last first.

        Raises:
            ValueError: nothing to train, or a parameter without a placement.
        """
        unique = list({id(p): p for p in parameters if p.requires_grad}.values())
        if not unique:
            raise ValueError("no parameter to train on this rank: every pipeline stage needs at least one")
        self.layout, self.overlap = layout, overlap
        self.parameters = unique
        self.buffers = _build_buffers(unique, layout, bucket_size=bucket_size, sharded=sharded)
        early = [b for buffer in self.buffers if not buffer.kind.late for b in buffer.buckets]
        self._order = sorted(early, key=lambda bucket: (_turn(bucket.chunk, chunk_order), -bucket.priority))
        self._late = [b for buffer in self.buffers if buffer.kind.late for b in buffer.buckets]
        self._partials = _plan_partial_sums(self.buffers, layout)
        self._uses = [use for buffer in self.buffers for use in _hook(buffer, self._mark)]
        self.begin_step()

    @property
    def buckets(self) -> list[Bucket]:
        """Every bucket, in the order of their data-parallel reductions."""
        return self._order + self._late

    def begin_step(self, num_micro_batches: int = 1) -> None:
        """Zero all gradients and expect ``num_micro_batches`` backward passes.

        Raises:
            ValueError: fewer than one micro-batch.
        """
        if num_micro_batches < 1:
            raise ValueError(f"a step needs at least one micro-batch, got {num_micro_batches}")
        self.num_micro_batches = num_micro_batches
        self._next = 0
        self._finished = False
        self._pending: dict[Bucket, int] = dict.fromkeys(self._order, 0)
        for bucket in self.buckets:
            bucket.reset()
        for use in self._uses:
            use.count = 0
            if not self.overlap or use.per_micro_batch is None:
                self._block(use.bucket)
            elif use.per_micro_batch > 0 and use.bucket in self._pending:
                self._pending[use.bucket] += 1

    def _block(self, bucket: Bucket) -> None:
        self._pending.pop(bucket, None)  # never complete: left to finish()

    def _mark(self, use: _Uses) -> None:
        use.count += 1
        if use.bucket.launched:
            raise RuntimeError(
                f"gradient of {use.name} changed after its reduction began: use {use.count} in a step of "
                f"{self.num_micro_batches} micro-batches, {use.per_micro_batch} per micro-batch in the steps before. "
                "Call begin_step with the true number of micro-batches, or set overlap_grad_reduce to false for layers "
                "that are not used the same number of times in each micro-batch"
            )
        if use.per_micro_batch is None or use.bucket not in self._pending:
            return
        expected = use.per_micro_batch * self.num_micro_batches
        if use.count > expected:
            self._block(use.bucket)
        elif use.count == expected:
            self._pending[use.bucket] -= 1
            self._launch_complete()

    def _launch_complete(self) -> None:
        while self._next < len(self._order) and self._pending.get(self._order[self._next]) == 0:
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self._order[self._next]
        bucket.seal()
        bucket.launch()
        self._next += 1

    def reduce_chunk(self, chunk: int) -> None:
        """Start the reductions of ``chunk`` that have not begun: its last backward in this step is done.

        Most have by then, during that backward; not in the first step, nor where layers are used a varying number of
        times. Without ``overlap`` this does nothing. Sums over other axes than the data axes wait for :meth:`finish`.

        Raises:
            RuntimeError: a chunk that comes earlier in ``chunk_order`` has not had its turn.
        """
        left = self._order[self._next :]
        if not self.overlap or all(bucket.chunk != chunk for bucket in left):
            return
        if left[0].chunk != chunk:
            raise RuntimeError(f"chunk {chunk} is to be reduced before chunk {left[0].chunk}, against the order given")
        while self._next < len(self._order) and self._order[self._next].chunk == chunk:
            self._launch_next()

    @property
    def num_launched(self) -> int:
        """Buckets whose reduction has begun in this step."""
        return self._next

    def finish(self) -> None:
        """Complete every gradient: the sum over all micro-batches, partial copies and data-parallel ranks.

        Afterwards ``main_grad`` holds that sum (under ZeRO only in this rank's shard of each bucket).
        """
        if self._finished:
            raise RuntimeError("finish() was called twice in one step; call begin_step first")
        self._finished = True
        while self._next < len(self._order):
            self._launch_next()
        for bucket in self._late:
            bucket.seal()
        for axis, views in self._partials:
            _sum_views(views, axis)
        for bucket in self._late:
            bucket.launch()
        for bucket in self.buckets:
            bucket.work.wait()
        for use in self._uses:
            use.learn(self.num_micro_batches)

    def local_non_finite(self) -> list[str]:
        """After ``finish()``: the parameters whose gradient was inf or nan on this rank before any reduction."""
        return [name for bucket in self.buckets for name in bucket.non_finite_names()]

    def gather_grads(self) -> None:
        """Under ZeRO: give every rank the whole reduced gradients (for inspection; training does not need it)."""
        for work in [bucket.gather_grads() for bucket in self.buckets]:
            work.wait()

    def start_gather_weights(self) -> None:
        """Under ZeRO: start giving every rank the whole weights, from the shards that their owners updated.

        Chunks in ascending order, as forward needs them.
        """
        for bucket in sorted(self.buckets, key=lambda bucket: bucket.chunk):
            bucket.start_gather_weights()

    def finish_gather_weights(self, chunk: int | None = None) -> None:
        """Wait until the weights of ``chunk`` (default: all) are whole."""
        for bucket in self.buckets:
            if chunk is None or bucket.chunk == chunk:
                bucket.finish_gather_weights()


def _turn(chunk: int, chunk_order: Sequence[int]) -> int:
    return chunk_order.index(chunk) if chunk in chunk_order else len(chunk_order)


def _build_buffers(
    parameters: list[nn.Parameter], layout: Layout, *, bucket_size: int, sharded: bool
) -> tuple[GradBuffer, ...]:
    kinds: dict[BufferKind, list[tuple[int, nn.Parameter]]] = {}
    for index, parameter in enumerate(parameters):
        placement = placement_of(parameter)
        partial = tuple(sorted(name for name in placement.partial_axes if layout.axis(name).size > 1))
        kind = BufferKind(placement.data_axes, parameter.dtype, partial, placement.decay, placement.chunk)
        kinds.setdefault(kind, []).append((index, parameter))
    return tuple(
        GradBuffer(kind, members, axis=layout.axis(*kind.data_axes), bucket_size=bucket_size, sharded=sharded)
        for kind, members in kinds.items()
    )


def _hook(buffer: GradBuffer, mark: Callable[[_Uses], None]) -> list[_Uses]:
    uses = []
    for bucket in buffer.buckets:
        for span in bucket.plan.spans:
            parameter = buffer.parameters[span.index]
            use = _Uses(parameter_label(buffer.placements[span.index]), bucket)
            _attach(parameter, use, mark)
            uses.append(use)
    return uses


def _attach(parameter: nn.Parameter, use: _Uses, mark: Callable[[_Uses], None]) -> None:
    # A hook lives in the tensor, where Python's collector does not look: strong references from it to the buffers
    # (which hold the tensor) would keep parameters, buffers and process groups for good.
    weak_use, weak_mark = weakref.ref(use), weakref.WeakMethod(mark)

    def ready() -> None:
        known, note = weak_use(), weak_mark()
        if known is not None and note is not None:
            note(known)

    def collect(tensor: Tensor) -> None:
        # Also runs when the layer added to main_grad itself and gave autograd None.
        if tensor.grad is None:
            return
        with torch.no_grad():
            tensor.main_grad.add_(tensor.grad)  # type: ignore[attr-defined]
        tensor.grad = None
        ready()

    parameter.grad_ready = ready  # type: ignore[attr-defined]
    parameter.register_post_accumulate_grad_hook(collect)


def _plan_partial_sums(buffers: Iterable[GradBuffer], layout: Layout) -> list[tuple[Axis, list[Tensor]]]:
    """The gradient rows to be summed over each axis, axes and rows in an order that all ranks share."""
    views: dict[str, list[tuple[str, Tensor]]] = {}
    for buffer in buffers:
        for span in buffer.spans:
            shape = tuple(buffer.parameters[span.index].shape)
            for piece in buffer.placements[span.index].pieces:
                begin, end = piece_range(piece, shape)
                view = buffer.grads[span.begin + begin : span.begin + end]
                for name in piece.partial_over:
                    views.setdefault(name, []).append((piece.name, view))
    plan = []
    for name in sorted(views):
        axis = layout.axis(name)
        if axis.size > 1:
            plan.append((axis, [view for _, view in sorted(views[name], key=lambda item: item[0])]))
    return plan


def _sum_views(views: list[Tensor], axis: Axis) -> None:
    """All-reduce contiguous ``views`` over ``axis``: large ones in place, runs of small ones as one."""
    batch: list[Tensor] = []
    for view in views:
        if view.numel() >= _COALESCE_ELEMENTS:
            all_reduce(view, axis)
        elif view.numel():
            if batch and (batch[0].dtype != view.dtype or sum(v.numel() for v in batch) >= _COALESCE_ELEMENTS):
                _sum_coalesced(batch, axis)
                batch = []
            batch.append(view)
    if batch:
        _sum_coalesced(batch, axis)


def _sum_coalesced(views: list[Tensor], axis: Axis) -> None:
    flat = torch.cat(views) if len(views) > 1 else views[0]
    all_reduce(flat, axis)
    if len(views) > 1:
        for view, part in zip(views, flat.split([v.numel() for v in views]), strict=True):
            view.copy_(part)
