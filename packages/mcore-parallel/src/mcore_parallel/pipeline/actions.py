"""The language that pipeline schedules are written in: actions, steps, where stages live, and plans. No torch.

A *stage* is a contiguous run of layers; a rank holds one stage per *chunk*. A schedule is a pure function that
returns, per rank, the compute actions in order. :mod:`mcore_parallel.pipeline.communication` adds the sends and
receives, :mod:`mcore_parallel.pipeline.verify` proves the result, :mod:`mcore_parallel.pipeline.executor` runs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple


class Kind(StrEnum):
    """What an action does; the values are the letters that plans are printed with."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    REDUCE = "R"
    GATHER = "G"
    SEND_FORWARD = "SF"
    RECV_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECV_BACKWARD = "RB"


COMPUTE_KINDS = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD})
GRADIENT_KINDS = frozenset({Kind.BACKWARD, Kind.INPUT_GRAD})
"""Passes that yield the gradient of the chunk's input."""
COLLECTIVE_KINDS = frozenset({Kind.REDUCE, Kind.GATHER})
SEND_KINDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
RECEIVE_KINDS = frozenset({Kind.RECV_FORWARD, Kind.RECV_BACKWARD})
COMMUNICATION_KINDS = SEND_KINDS | RECEIVE_KINDS


class Action(NamedTuple):
    """One thing that one rank does for one micro-batch on one of its chunks.

    ``FORWARD`` and ``BACKWARD`` run the chunk. A backward may be split: ``INPUT_GRAD`` makes the gradient of the
    chunk's input and leaves the weight gradients for a later ``WEIGHT_GRAD``; the two together are one ``BACKWARD``.
    ``SEND_FORWARD`` sends the chunk's output downstream, ``RECV_FORWARD`` receives the chunk's input,
    ``RECV_BACKWARD`` receives the gradient of its output, ``SEND_BACKWARD`` sends the gradient of its input upstream.

    ``REDUCE`` starts the data-parallel reduction of the chunk's weight gradients, ``GATHER`` makes the chunk's weights
    whole (under ZeRO); both concern all micro-batches, and their ``micro_batch`` is 0.
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f".{self.chunk}" if self.chunk else ""
        micro_batch = "" if self.kind in COLLECTIVE_KINDS else self.micro_batch
        return f"{self.kind.value}{micro_batch}{chunk}"


class Place(NamedTuple):
    """Where a stage lives: the rank along the pipeline axis and the chunk of that rank."""

    rank: int
    chunk: int


@dataclass(frozen=True)
class Step:
    """One compute or collective action alone, or sends and receives that are posted together.

    Posting together matters: with rendezvous semantics (NCCL's), two neighbours that each send first would wait for
    each other for ever.
    """

    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return "+".join(str(action) for action in self.actions)


@dataclass(frozen=True)
class Flow:
    """The places of the stages in model order: a micro-batch's forward visits ``places[0], places[1], ...``.

    Raises:
        ValueError: a rank or chunk is missing or occurs twice.
    """

    places: tuple[Place, ...]

    def __post_init__(self) -> None:
        expected = {Place(rank, chunk) for rank in range(self.num_ranks) for chunk in range(self.num_chunks)}
        if not self.places or len(self.places) != len(expected) or set(self.places) != expected:
            raise ValueError(
                f"a flow must visit every chunk of every rank once, got {[tuple(place) for place in self.places]}"
            )

    @cached_property
    def num_ranks(self) -> int:
        """Size of the pipeline axis."""
        return 1 + max((place.rank for place in self.places), default=-1)

    @cached_property
    def num_chunks(self) -> int:
        """Chunks that each rank holds."""
        return 1 + max((place.chunk for place in self.places), default=-1)

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        return len(self.places)

    @cached_property
    def stages(self) -> dict[Place, int]:
        """The stage at each place."""
        return {place: stage for stage, place in enumerate(self.places)}

    def upstream(self, rank: int, chunk: int) -> Place | None:
        """The place whose output is the input of this one; None at the first stage."""
        stage = self.stages[Place(rank, chunk)]
        return self.places[stage - 1] if stage > 0 else None

    def downstream(self, rank: int, chunk: int) -> Place | None:
        """The place that takes the output of this one; None at the last stage."""
        stage = self.stages[Place(rank, chunk)]
        return self.places[stage + 1] if stage + 1 < len(self.places) else None


def looped_flow(num_ranks: int, num_chunks: int = 1) -> Flow:
    """Stages dealt round the ranks in turn: stage ``chunk * num_ranks + rank`` lives at ``(rank, chunk)``."""
    if num_ranks < 1 or num_chunks < 1:
        raise ValueError(f"a pipeline needs at least one rank and one chunk, got {num_ranks} and {num_chunks}")
    return Flow(tuple(Place(rank, chunk) for chunk in range(num_chunks) for rank in range(num_ranks)))


def v_flow(num_ranks: int, num_chunks: int = 2) -> Flow:
    """Down the ranks and back: stages ``rank`` and ``2 * num_ranks - 1 - rank`` live on ``rank``.

    The first and the last stage share rank 0, and the two middle stages the last rank.
    """
    if num_ranks < 1 or num_chunks != 2:
        raise ValueError(f"a V needs at least one rank and two chunks per rank, got {num_ranks} and {num_chunks}")
    down = tuple(Place(rank, 0) for rank in range(num_ranks))
    return Flow((*down, *(Place(rank, 1) for rank in reversed(range(num_ranks)))))


@dataclass(frozen=True)
class RankPlan:
    """What one rank does in one training step (or one evaluation batch, when ``backward`` is False)."""

    rank: int
    steps: tuple[Step, ...]
    flow: Flow
    num_micro_batches: int
    backward: bool = True

    @property
    def actions(self) -> Iterator[Action]:
        """All actions in order, step by step."""
        return (action for step in self.steps for action in step.actions)


@dataclass(frozen=True)
class Plan:
    """What every rank does, communication included. ``steps`` has an entry per rank."""

    steps: Sequence[tuple[Step, ...]]
    flow: Flow
    num_micro_batches: int
    backward: bool = True

    def for_rank(self, rank: int) -> RankPlan:
        """The part of one rank."""
        return RankPlan(rank, self.steps[rank], self.flow, self.num_micro_batches, self.backward)


ComputePlan = Sequence[Sequence[Action]]


class ScheduleError(ValueError):
    """A schedule is wrong: which rank, at which position of its plan, which action, and why.

    ``position`` counts the rank's steps (compute actions, before communication is added) from 0; it is the length of
    the plan for an action that never comes.
    """

    def __init__(self, reason: str, *, rank: int, position: int, action: Action | None) -> None:
        self.reason = reason
        self.rank = rank
        self.position = position
        self.action = action
        what = f", {action}" if action is not None else ""
        super().__init__(f"rank {rank}, position {position}{what}: {reason}")


def forward_plan(num_ranks: int, num_micro_batches: int, *, num_chunks: int = 1) -> list[list[Action]]:
    """Forward passes alone, chunk after chunk: what evaluation runs under every schedule."""
    passes = [
        Action(Kind.FORWARD, micro_batch, chunk)
        for chunk in range(num_chunks)
        for micro_batch in range(num_micro_batches)
    ]
    return [list(passes) for _ in range(num_ranks)]
