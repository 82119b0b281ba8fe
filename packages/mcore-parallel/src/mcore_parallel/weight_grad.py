"""Weight gradients: straight into the main gradient, at once or deferred through an explicit queue.

The backward of a linear layer is two matrix products: the gradient of its input, which the previous stage waits for,
and that of its weight, for which nobody waits. Zero-bubble schedules (Qi et al., arXiv:2401.10241) run the first in
the action ``I`` and put the second off to the action ``W``, where the pipeline would idle. A layer that takes part asks
:func:`queue_of` its weight in backward: while the queue defers, it puts the work there instead of doing it.

What a layer does not put off runs in ``I``: norms, biases and embedding lookups, which are no matrix products, and the
output layer, whose gradients :mod:`mcore_parallel.cross_entropy` makes in forward, the only time its logits exist.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

_HALF = (torch.bfloat16, torch.float16)

Key = tuple[int, int]


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in the dtype of ``a``; on CPUs through fp32, where 16-bit GEMMs can be 10-45x slower."""
    if a.device.type == "cpu" and a.dtype in _HALF:
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


def accumulate_weight_grad(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """Add ``grad.T @ x`` to ``weight.main_grad`` and return None; without a main grad, return it for autograd.

    ``grad`` ``[t, out]``, ``x`` ``[t, in]``. The caller calls :func:`mark_grad_ready` when its micro-batch is done.
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


class WeightGradWork(Protocol):
    """The deferred weight gradient of one use of one weight (or, for grouped products, of several)."""

    @property
    def num_bytes(self) -> int:
        """Of the tensors that it keeps alive until it has run."""

    def start(self) -> None:
        """Begin what can run beside the work before it: communication. Called once, in the order of the queue."""

    def finish(self) -> None:
        """Add the gradient, then call :func:`mark_grad_ready`."""


class WeightGradQueue:
    """Deferred weight-gradient work by (micro-batch, chunk), in the order in which backward put it.

    ``num_bytes`` and ``num_keys`` are what is held now; ``peak_bytes`` and ``peak_keys`` the most since
    :meth:`reset_peak`.
    """

    def __init__(self) -> None:
        self._work: dict[Key, deque[WeightGradWork]] = {}
        self._key: Key | None = None
        self.num_bytes = self.peak_bytes = self.peak_keys = 0

    @property
    def num_keys(self) -> int:
        """(micro-batch, chunk) pairs whose weight gradients are not done."""
        return len(self._work)

    def reset_peak(self) -> None:
        """Count the peaks anew from what is held now."""
        self.peak_bytes, self.peak_keys = self.num_bytes, self.num_keys

    def attach(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let the layers that use ``parameters`` find this queue (see :func:`queue_of`)."""
        for parameter in parameters:
            parameter.weight_grad_queue = self  # type: ignore[attr-defined]

    @property
    def is_deferring(self) -> bool:
        """Whether backward is to put its weight gradients here instead of running them."""
        return self._key is not None

    @contextmanager
    def deferring(self, micro_batch: int, chunk: int) -> Iterator[None]:
        """Within, backward passes put their weight gradients under ``(micro_batch, chunk)``.

        Raises:
            ValueError: that pair is held already, or another is being filled.
        """
        key = (micro_batch, chunk)
        if self._key is not None or key in self._work:
            raise ValueError(f"weight gradients of micro-batch {micro_batch}, chunk {chunk} are deferred already")
        self._key = key
        self._work[key] = deque()
        self.peak_keys = max(self.peak_keys, self.num_keys)
        try:
            yield
        finally:
            self._key = None

    def put(self, work: WeightGradWork) -> None:
        """Hold ``work`` until its micro-batch and chunk are drained."""
        assert self._key is not None, "nothing defers now; the layer must run its weight gradient itself"
        self._work[self._key].append(work)
        self.num_bytes += work.num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def drain(self, micro_batch: int, chunk: int) -> None:
        """Run and forget what is held under ``(micro_batch, chunk)``; each piece's communication overlaps the piece
        before it.

        Raises:
            ValueError: nothing was deferred under that pair.
        """
        if (micro_batch, chunk) not in self._work:
            raise ValueError(f"no weight gradients of micro-batch {micro_batch}, chunk {chunk} are deferred")
        held = self._work[micro_batch, chunk]
        if held:
            held[0].start()
        with torch.no_grad():
            while held:
                work = held.popleft()
                if held:
                    held[0].start()
                work.finish()
                self.num_bytes -= work.num_bytes
        del self._work[micro_batch, chunk]


def queue_of(weight: Tensor) -> WeightGradQueue | None:
    """The queue that the weight gradient of ``weight`` is to be put into now, None to run it at once."""
    queue: WeightGradQueue | None = getattr(weight, "weight_grad_queue", None)
    return queue if queue is not None and queue.is_deferring else None
