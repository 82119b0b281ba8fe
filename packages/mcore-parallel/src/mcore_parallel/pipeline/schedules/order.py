"""A rank's order of passes while it is written down, with the micro-batches numbered as they come. No torch."""

from __future__ import annotations

from collections import deque

from mcore_parallel.pipeline.actions import Action, Kind


class Order:
    """Appends passes of a chunk; each takes the chunk's next micro-batch for that kind of pass.

    Whole backwards and input gradients share a count, since a micro-batch gets one or the other. Weight gradients go in
    the order in which their input gradients came.
    """

    def __init__(self, num_chunks: int) -> None:
        self.actions: list[Action] = []
        self._forwards = [0] * num_chunks
        self._gradients = [0] * num_chunks
        self._deferred: deque[tuple[int, int]] = deque()

    def forward(self, chunk: int) -> None:
        """The chunk's next forward."""
        self.actions.append(Action(Kind.FORWARD, self._forwards[chunk], chunk))
        self._forwards[chunk] += 1

    def backward(self, chunk: int) -> None:
        """The chunk's next backward, whole."""
        self.actions.append(Action(Kind.BACKWARD, self._next_gradient(chunk), chunk))

    def input_grad(self, chunk: int) -> None:
        """The chunk's next backward, its weight gradients put off."""
        micro_batch = self._next_gradient(chunk)
        self.actions.append(Action(Kind.INPUT_GRAD, micro_batch, chunk))
        self._deferred.append((micro_batch, chunk))

    def weight_grad(self, chunk: int | None = None) -> None:
        """The weight gradients that have waited longest, of ``chunk`` or of any chunk; nothing if none wait."""
        for entry in self._deferred:
            if chunk is None or entry[1] == chunk:
                self._deferred.remove(entry)
                self.actions.append(Action(Kind.WEIGHT_GRAD, *entry))
                return

    def num_forwards(self, chunk: int) -> int:
        """How many forwards of the chunk are written down."""
        return self._forwards[chunk]

    @property
    def num_deferred(self) -> int:
        """How many weight gradients wait."""
        return len(self._deferred)

    def _next_gradient(self, chunk: int) -> int:
        self._gradients[chunk] += 1
        return self._gradients[chunk] - 1


def first_micro_batches(actions: list[Action], num_micro_batches: int) -> list[Action]:
    """``actions`` without the micro-batches from ``num_micro_batches`` on.

    Micro-batches do not depend on each other, so what is left of an order that can run can run.
    """
    return [action for action in actions if action.micro_batch < num_micro_batches]
