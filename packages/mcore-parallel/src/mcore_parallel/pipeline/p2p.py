"""Grouped sends and receives along the pipeline axis, with every buffer kept alive until it may be touched."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from mcore_parallel.axis import Axis
from mcore_parallel.collectives import exchange


class Flight:
    """One group of sends and receives that was posted together, until all of it is complete."""

    def __init__(self, axis: Axis, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        self._works = exchange(axis, sends=sends, receives=receives)
        # A sent tensor must neither change nor be freed before its send completes: the receiver would see it.
        self._kept: list[Tensor] = [tensor for _, tensor in (*sends, *receives)]

    def wait(self) -> None:
        """Block until all messages of the group are through; then let go of the tensors."""
        for work in self._works:
            work.wait()
        self._works = []
        self._kept = []


class Courier:
    """Posts groups in order and bounds how many are under way.

    Waiting for an earlier group before posting a later one blocks less than waiting for each group at once, which the
    verifier has proven to be free of deadlock.
    """

    def __init__(self, axis: Axis, *, max_in_flight: int = 4) -> None:
        self._axis = axis
        self._max_in_flight = max_in_flight
        self._flights: deque[Flight] = deque()

    def post(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Flight:
        """Start sending and receiving; peers are indices on the axis. Waits for the oldest group if many are out."""
        while len(self._flights) >= self._max_in_flight:
            self._flights.popleft().wait()
        flight = Flight(self._axis, sends, receives)
        self._flights.append(flight)
        return flight

    def drain(self) -> None:
        """Wait for everything that was posted."""
        while self._flights:
            self._flights.popleft().wait()
