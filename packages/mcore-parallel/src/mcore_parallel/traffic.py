"""What moved: an optional recorder that every collective reports to.

``num_bytes`` of an event is the size of the whole (unsharded) buffer of the operation on one rank: the tensor of an
all-reduce, the gathered output of an all-gather, the input of a reduce-scatter, the message of a send or receive.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


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
