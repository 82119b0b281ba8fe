"""Grouped sends and receives along the pipeline axis, with every buffer kept alive until it may be touched.

All messages of a rank go through the one communicator of the pipeline axis, in the order of the plan: on NCCL a group
is one launch, so its messages progress together, and groups run in the order in which they were posted, which is the
order that the verifier proved. :func:`connect` creates that communicator, and those of all other axes, before the first
step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel.axis import Axis, Layout
from mcore_parallel.collectives import Work, all_reduce, exchange

_MAX_SENDS = 8  # gloo cannot say whether a send is through; beyond this many the oldest is waited for


@dataclass(frozen=True)
class Message:
    """A tensor under way. Reading a received one needs ``work.wait()`` first; a sent one must stay untouched."""

    tensor: Tensor
    work: Work

    def wait(self) -> Tensor:
        """Block until the message is through."""
        self.work.wait()
        return self.tensor

    @property
    def is_through(self) -> bool:
        """Whether it is known to be through, without blocking (always False on gloo before a wait)."""
        completed = getattr(self.work, "is_completed", None)
        return completed is not None and bool(completed())


class Courier:
    """Posts groups in order, and lets go of sent tensors as soon as they are through.

    Waiting for an earlier send before posting a later group blocks less than waiting for each group at once, which the
    verifier has proven to be free of deadlock.
    """

    def __init__(self, axis: Axis, *, max_sends: int = _MAX_SENDS) -> None:
        self._axis = axis
        self._max_sends = max_sends
        self._sent: deque[Message] = deque()

    def post(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> list[Message]:
        """Start sending and receiving as one group; peers are indices on the axis. Returns the receives, in order."""
        self._release(self._max_sends)
        works = exchange(self._axis, sends=sends, receives=receives)
        if len(works) == 1:
            works *= len(sends) + len(receives)  # NCCL: one work for the whole group
        tensors = [tensor for _, tensor in (*sends, *receives)]
        messages = [Message(tensor, work) for tensor, work in zip(tensors, works, strict=True)]
        self._sent += messages[: len(sends)]
        return messages[len(sends) :]

    def _release(self, keep: int) -> None:
        while self._sent and (len(self._sent) > keep or self._sent[0].is_through):
            self._sent.popleft().wait()

    def drain(self) -> None:
        """Wait for every send."""
        self._release(0)


def connect(layout: Layout, *, device: torch.device) -> None:
    """Create the communicators of all axes now, in one order on all ranks.

    Left to the first use, two groups could be created in opposite orders on two ranks, or in the middle of a plan,
    where the members of a group do not come at the same time: both hang on NCCL. Collective.
    """
    for axis in layout.axes:
        # The recorder counts what a step moves, which this is not.
        quiet = Axis(axis.name, axis.ranks, axis.rank, axis.group)
        all_reduce(torch.zeros(1, device=device), quiet)
    pp = layout.axis("pp")
    if pp.size > 1:
        _greet_neighbours(Axis(pp.name, pp.ranks, pp.rank, pp.group), device)


def _greet_neighbours(axis: Axis, device: torch.device) -> None:
    """A first exchange round the ring, in which every rank of the axis takes part."""
    sends = [((axis.rank + 1) % axis.size, torch.zeros(1, device=device))]
    receives = [((axis.rank - 1) % axis.size, torch.empty(1, device=device))]
    for work in exchange(axis, sends=sends, receives=receives):
        work.wait()
