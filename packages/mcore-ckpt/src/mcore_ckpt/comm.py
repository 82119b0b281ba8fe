"""How the ranks of a save or a load talk to each other. Small messages on the host; no accelerator memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Communicator(Protocol):
    """The ranks that save or load one checkpoint together. Every method but the properties is collective."""

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """The ``value`` of every rank, by rank."""

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Send flat uint8 host tensors to ranks and fill others from ranks; at most one message per pair of ranks."""


class SingleCommunicator:
    """One process on its own."""

    rank = 0
    size = 1

    def all_gather_object(self, value: Any) -> list[Any]:
        """The value itself."""
        return [value]

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Nothing: there is nobody else."""
        assert not [*sends, *receives], "a single rank has no peers"


class DistributedCommunicator:
    """The ranks of a ``torch.distributed`` process group (None: all of them), which must carry host tensors (gloo).

    A rank that died shows as an error of the group after its timeout.

    Raises:
        ValueError: the group has no backend for host tensors.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        config = dist.get_backend_config(group)
        if "cpu:" not in config:
            raise ValueError(
                f"checkpoints need a process group for host tensors, this one is {config!r}; "
                "make one with torch.distributed.new_group(backend='gloo')"
            )
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_gather_object(self, value: Any) -> list[Any]:
        """The ``value`` of every rank, by rank (pickled)."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Send and receive all at once; returns when all have arrived."""
        works = [dist.irecv(tensor, group=self.group, group_src=peer) for peer, tensor in receives]
        works += [dist.isend(tensor, group=self.group, group_dst=peer) for peer, tensor in sends]
        for work in works:
            if work is not None:
                work.wait()
