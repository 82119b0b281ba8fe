"""Plans as integer arrays, so that a large pipeline is planned and proven in milliseconds. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from mcore_parallel.pipeline.actions import Action, Kind, Step

Ints = NDArray[np.int64]

KINDS = tuple(Kind)
CODES = {kind: code for code, kind in enumerate(KINDS)}
FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD, REDUCE, GATHER, SEND_FORWARD, RECV_FORWARD, SEND_BACKWARD, RECV_BACKWARD = (
    range(len(KINDS))
)


@dataclass(frozen=True, eq=False)
class Table:
    """All actions of all ranks, rank after rank and in order; every array has one entry per action.

    ``kinds``: index into ``KINDS``. ``steps``: index of the action's step on its rank. ``starts``: where each rank's
    actions begin, and the end. ``rounds``: for each communication action a number that grows along its rank and is the
    same at both ends of its message: a certificate that rendezvous cannot deadlock (-1 for other actions); None if
    there is none. ``num_steps``: steps per rank; a step without actions has no entry in the arrays.
    """

    kinds: Ints
    micro_batches: Ints
    chunks: Ints
    steps: Ints
    starts: Ints
    num_steps: tuple[int, ...]
    rounds: Ints | None = None

    @property
    def ranks(self) -> Ints:
        """The rank of each action."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))

    def decode(self, rank: int) -> tuple[Step, ...]:
        """The steps of one rank."""
        own = slice(int(self.starts[rank]), int(self.starts[rank + 1]))
        steps: list[list[Action]] = [[] for _ in range(self.num_steps[rank])]
        columns = (self.kinds[own].tolist(), self.micro_batches[own].tolist(), self.chunks[own].tolist())
        for kind, micro_batch, chunk, step in zip(*columns, self.steps[own].tolist(), strict=True):
            steps[step].append(Action(KINDS[kind], micro_batch, chunk))
        return tuple(Step(tuple(actions)) for actions in steps)


class EncodedSteps(Sequence[tuple[Step, ...]]):
    """The steps of every rank, each decoded from a table when it is asked for."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._decoded: dict[int, tuple[Step, ...]] = {}

    def __len__(self) -> int:
        return len(self.table.num_steps)

    @overload
    def __getitem__(self, index: int) -> tuple[Step, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[tuple[Step, ...], ...]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[rank] for rank in range(*index.indices(len(self))))
        rank = range(len(self))[index]
        if rank not in self._decoded:
            self._decoded[rank] = self.table.decode(rank)
        return self._decoded[rank]

    def __iter__(self) -> Iterator[tuple[Step, ...]]:
        return (self[rank] for rank in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def encode(steps: Sequence[Sequence[Step]]) -> Table:
    """The table of hand-made steps, without a certificate; free of charge for steps that came from a table."""
    if isinstance(steps, EncodedSteps):
        return steps.table
    actions = [[action for step in rank for action in step.actions] for rank in steps]
    positions = [[i for i, step in enumerate(rank) for _ in step.actions] for rank in steps]
    kinds, micro_batches, chunks = columns(actions)
    return Table(
        kinds=kinds,
        micro_batches=micro_batches,
        chunks=chunks,
        steps=np.fromiter(chain.from_iterable(positions), np.int64),
        starts=np.cumsum([0, *map(len, actions)]),
        num_steps=tuple(map(len, steps)),
    )


def columns(actions: Sequence[Sequence[Action]]) -> tuple[Ints, Ints, Ints]:
    """Kinds (as codes), micro-batches and chunks of all ranks' actions, rank after rank."""
    flat = list(chain.from_iterable(actions))
    if not flat:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
    kinds, micro_batches, chunks = zip(*flat, strict=True)
    return (
        np.fromiter(map(CODES.__getitem__, kinds), np.int64, len(flat)),
        np.array(micro_batches, np.int64),
        np.array(chunks, np.int64),
    )
