"""What moved: an optional recorder that every collective reports to.

``num_bytes`` of an event is the size of the whole (unsharded) buffer of the operation on one rank: the tensor of an
all-reduce, the gathered output of an all-gather, the input of a reduce-scatter, the message of a send or receive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest


@dataclass(frozen=True)
class Event:
    """One operation of this rank: ``order`` counts the operations of its axis."""

    op: str
    axis: str
    num_bytes: int
    shape: tuple[int, ...]
    group: tuple[int, ...]
    order: int


@dataclass
class TrafficRecorder:
    """Collects events while ``enabled``; one per layout, handed to every axis of it."""

    enabled: bool = False
    events: list[Event] = field(default_factory=list)
    _orders: Counter[str] = field(default_factory=Counter)

    def record(self, op: str, *, axis: str, num_bytes: int, shape: tuple[int, ...], group: tuple[int, ...]) -> None:
        """Note one operation, if recording is on."""
        if not self.enabled:
            return
        self.events.append(Event(op, axis, num_bytes, shape, group, self._orders[axis]))
        self._orders[axis] += 1

    def clear(self) -> None:
        """Forget all events."""
        self.events.clear()
        self._orders.clear()

    def totals(self) -> dict[tuple[str, str], int]:
        """Bytes by ``(axis, op)``."""
        sums: Counter[tuple[str, str]] = Counter()
        for event in self.events:
            sums[event.axis, event.op] += event.num_bytes
        return dict(sums)

    def by_axis(self) -> dict[str, int]:
        """Bytes by axis, over all operations."""
        sums: Counter[str] = Counter()
        for event in self.events:
            sums[event.axis] += event.num_bytes
        return dict(sums)


def order_conflicts(ranks: Sequence[Sequence[Event]]) -> list[str]:
    """Where the ranks of a group disagree on the order, kind or shape of its collectives (gloo may forgive it, NCCL
    hangs). ``ranks`` are the events of every rank; the pipeline's verifier matches sends and receives."""
    sequences: dict[tuple[str, tuple[int, ...]], dict[int, list[str]]] = {}
    for rank, events in enumerate(ranks):
        for event in events:
            if event.op not in ("send", "recv"):
                members = sequences.setdefault((event.axis, event.group), {})
                members.setdefault(rank, []).append(f"{event.op} of {event.shape}")
    found = []
    for (axis, group), members in sequences.items():
        first = members.get(group[0], [])
        for rank in group[1:]:
            pairs = zip_longest(first, members.get(rank, []), fillvalue="nothing")
            differing = next(((i, a, b) for i, (a, b) in enumerate(pairs) if a != b), None)
            if differing is not None:
                at, here, there = differing
                found.append(f"axis {axis}: operation {at} is {here} on rank {group[0]} but {there} on rank {rank}")
    return found
