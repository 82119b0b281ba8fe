"""What a plan costs before it is run: timeline, bubbles, live activations and bytes. No torch.

Each rank runs its compute actions in order, one at a time, each as soon as its input is there. A message leaves when
its producer ends, takes its turn on the link between the two ranks, and arrives after ``bytes / bandwidth + latency``;
sending and receiving cost no compute time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mcore_parallel.pipeline.actions import (
    COLLECTIVE_KINDS,
    COMPUTE_KINDS,
    GRADIENT_KINDS,
    Action,
    Flow,
    Kind,
    Place,
    Plan,
)

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Times in any one unit and bytes; a number for all stages alike, or one per stage in model order.

    ``forward``, ``input_grad``, ``weight_grad``: F, I and W of one micro-batch; a whole backward is B = I + W.
    ``latency``: of a message. ``message_bytes`` over ``bandwidth`` (bytes per unit of time): how long it holds a link.
    ``gather``, ``reduce``: the data-parallel collectives of a chunk; a gather holds up its rank, reductions run beside
    the compute, one after the other.
    ``overlapped``: a forward and the whole backward of another chunk right after it, run as one (DualPipe's F&B); None
    runs them one after the other.
    ``activation_bytes``: what a stage keeps from a forward to its backward or input gradient; ``deferred_bytes``: what
    it keeps from an input gradient to its weight gradient.

    Raises:
        ValueError: a negative or endless time or size, or a bandwidth that is not positive.
    """

    forward: PerStage = 1.0
    input_grad: PerStage = 1.0
    weight_grad: PerStage = 1.0
    latency: float = 0.0
    message_bytes: float = 0.0
    bandwidth: float = math.inf
    gather: PerStage = 0.0
    reduce: PerStage = 0.0
    overlapped: float | None = None
    activation_bytes: PerStage = 0.0
    deferred_bytes: PerStage = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "bandwidth" or value is None:
                continue
            for number in value if isinstance(value, Sequence) else (value,):
                if not 0 <= number < math.inf:
                    raise ValueError(f"{name} must be finite and not negative, got {number}")
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth must be positive, got {self.bandwidth}")

    def per_stage(self, name: str, num_stages: int) -> list[float]:
        """The field ``name``, one number per stage.

        Raises:
            ValueError: it lists another number of stages.
        """
        value: PerStage = getattr(self, name)
        if not isinstance(value, Sequence):
            return [float(value)] * num_stages
        if len(value) != num_stages:
            raise ValueError(f"{name} lists {len(value)} stages, the plan has {num_stages}: {list(value)}")
        return [float(number) for number in value]


class Span(NamedTuple):
    """One action on the clock of its rank."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each rank does what, and what follows from it.

    ``spans``: per rank, its compute and collective actions in order. ``flow``: where the stages live.
    ``peak_live``, ``peak_deferred``, ``peak_held``: as in :class:`~mcore_parallel.pipeline.verify.Report`.
    ``peak_bytes``: per rank, the most bytes of activations and deferred weight gradients at once.
    ``message_bytes``: bytes that cross ranks in all.
    """

    spans: tuple[tuple[Span, ...], ...]
    flow: Flow
    peak_live: tuple[int, ...]
    peak_deferred: tuple[int, ...]
    peak_held: tuple[int, ...]
    peak_bytes: tuple[float, ...]
    num_messages: int
    message_bytes: float

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end over all ranks: what a synchronous step takes."""
        return max((spans[-1].end for spans in self._busy if spans), default=0.0)

    @cached_property
    def end(self) -> float:
        """When the last collective ends too."""
        return max((span.end for spans in self.spans for span in spans), default=0.0)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Per rank, the time in which forward, backward or weight-gradient passes run; overlapped ones count once."""
        return tuple(
            math.fsum(span.end - max(span.start, before) for before, span in zip(_ends(spans), spans, strict=True))
            for spans in self._busy
        )

    @cached_property
    def rank_spans(self) -> tuple[float, ...]:
        """Per rank, the last end minus the first start."""
        return tuple(spans[-1].end - spans[0].start if spans else 0.0 for spans in self._busy)

    @property
    def idle(self) -> tuple[float, ...]:
        """Per rank, the part of the makespan without work."""
        return tuple(self.makespan - work for work in self.work)

    @property
    def idle_makespan(self) -> float:
        """Time of the makespan that an average rank idles."""
        return self.makespan - math.fsum(self.work) / len(self.work)

    @property
    def bubble_makespan(self) -> float:
        """Idle share of the makespan, averaged over ranks: what a synchronous step loses. From 0 to 1."""
        return self.idle_makespan / self.makespan if self.makespan else 0.0

    @property
    def idle_span(self) -> float:
        """The most that any rank idles between its first start and its last end."""
        return max(span - work for span, work in zip(self.rank_spans, self.work, strict=True))

    @property
    def bubble_span(self) -> float:
        """The largest idle share of any rank's own span: the Zero Bubble papers' bubble rate. From 0 to 1."""
        shares = ((span - work) / span for span, work in zip(self.rank_spans, self.work, strict=True) if span)
        return max(shares, default=0.0)

    @cached_property
    def _busy(self) -> list[list[Span]]:
        return [[span for span in spans if span.action.kind in COMPUTE_KINDS] for spans in self.spans]


def simulate(plan: Plan, costs: Costs | None = None) -> Timeline:
    """Play ``plan`` (a proven one) with ``costs``, by default one unit of time for each of F, I and W.

    Raises:
        ValueError: costs for another number of stages, or a plan that cannot run to its end.
    """
    clock = _Clock(plan, costs or Costs())
    clock.play()
    return clock.timeline()


Key = tuple[bool, int, int | None]
"""Whether a forward, the micro-batch, the stage: names a result."""


class _Clock:
    """The state of the simulation: who is where, when results are there, and what is held."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.flow, self.costs, self.backward = plan.flow, costs, plan.backward
        self.actions = [
            [a for a in plan.for_rank(rank).actions if a.kind in COMPUTE_KINDS or a.kind in COLLECTIVE_KINDS]
            for rank in range(plan.flow.num_ranks)
        ]
        self.stages = [
            [plan.flow.stages[Place(rank, chunk)] for chunk in range(plan.flow.num_chunks)]
            for rank in range(plan.flow.num_ranks)
        ]
        count = plan.flow.num_stages
        forward, input_grad, weight_grad, gather = (
            costs.per_stage(name, count) for name in ("forward", "input_grad", "weight_grad", "gather")
        )
        self.times = {
            Kind.FORWARD: forward,
            Kind.INPUT_GRAD: input_grad,
            Kind.WEIGHT_GRAD: weight_grad,
            Kind.BACKWARD: [i + w for i, w in zip(input_grad, weight_grad, strict=True)],
            Kind.GATHER: gather,
            Kind.REDUCE: costs.per_stage("reduce", count),
        }
        self.spans: list[list[Span]] = [[] for _ in self.actions]
        self.now = [0.0] * len(self.actions)
        self.reduced = [0.0] * len(self.actions)
        self.arrival: dict[Key, float] = {}
        self.link_free: dict[tuple[int, int], float] = {}
        self.waiting: dict[Key, int] = {}
        self.num_messages = 0

    def play(self) -> None:
        """Advance every rank as far as it goes; whoever waits is called again when its input is there."""
        ready = list(range(len(self.actions)))
        while ready:
            ready += self._advance(ready.pop())
        for rank, actions in enumerate(self.actions):
            if len(self.spans[rank]) < len(actions):
                action = actions[len(self.spans[rank])]
                raise ValueError(f"the plan cannot run: rank {rank} waits for ever for the input of {action}")

    def _advance(self, rank: int) -> list[int]:
        spans, actions = self.spans[rank], self.actions[rank]
        woken: list[int] = []
        while len(spans) < len(actions):
            together = self._together(rank, len(spans))
            start = self.now[rank]
            for kind, micro_batch, chunk in together:
                source = _source(kind, self.stages[rank][chunk], self.flow.num_stages - 1)
                key = (kind is Kind.FORWARD, micro_batch, source)
                if source is not None and key not in self.arrival:
                    self.waiting[key] = rank
                    return woken
                start = max(start, self.arrival[key] if source is not None else 0.0)
            action = together[0]
            if action.kind is Kind.REDUCE:
                start = max(start, self.reduced[rank])
            end = start + self._length(together, self.stages[rank][action.chunk])
            spans += [Span(each, start, end) for each in together]
            if action.kind is Kind.REDUCE:
                self.reduced[rank] = end
                continue
            self.now[rank] = end
            for kind, micro_batch, chunk in together:
                woken += self._send(kind, micro_batch, self.stages[rank][chunk], end)
        return woken

    def _together(self, rank: int, position: int) -> list[Action]:
        """The action at ``position``, with the next if the two run as one."""
        pair = self.actions[rank][position : position + 2]
        if self.costs.overlapped is None or [action.kind for action in pair] != [Kind.FORWARD, Kind.BACKWARD]:
            return pair[:1]
        return pair if pair[0].chunk != pair[1].chunk else pair[:1]

    def _length(self, together: list[Action], stage: int) -> float:
        if len(together) > 1:
            assert self.costs.overlapped is not None, "two actions run together only if that has a time"
            return self.costs.overlapped
        return self.times[together[0].kind][stage]

    def _send(self, kind: Kind, micro_batch: int, stage: int, end: float) -> list[int]:
        if kind is Kind.FORWARD:
            target = stage + 1
        elif kind in GRADIENT_KINDS:
            target = stage - 1
        else:
            return []
        if not 0 <= target < self.flow.num_stages:
            return []
        sender, receiver = self.flow.places[stage].rank, self.flow.places[target].rank
        if sender != receiver:
            self.num_messages += 1
            left = (
                max(end, self.link_free.get((sender, receiver), 0.0)) + self.costs.message_bytes / self.costs.bandwidth
            )
            self.link_free[sender, receiver] = left
            end = left + self.costs.latency
        key = (kind is Kind.FORWARD, micro_batch, stage)
        self.arrival[key] = end
        return [self.waiting.pop(key)] if key in self.waiting else []

    def timeline(self) -> Timeline:
        peaks = [self._peaks(rank) for rank in range(len(self.actions))]
        live, deferred, held, size = (tuple(column) for column in zip(*peaks, strict=True))
        return Timeline(
            spans=tuple(tuple(spans) for spans in self.spans),
            flow=self.flow,
            peak_live=live,
            peak_deferred=deferred,
            peak_held=held,
            peak_bytes=size,
            num_messages=self.num_messages,
            message_bytes=self.num_messages * self.costs.message_bytes,
        )

    def _peaks(self, rank: int) -> tuple[int, int, int, float]:
        """The most live activations, deferred weight gradients, both, and bytes that ``rank`` holds at once."""
        count = self.flow.num_stages
        activation = self.costs.per_stage("activation_bytes", count)
        deferred_size = self.costs.per_stage("deferred_bytes", count)
        live = deferred = 0
        size, peaks = 0.0, (0, 0, 0, 0.0)
        for kind, _, chunk in self.actions[rank]:
            stage = self.stages[rank][chunk]
            if kind is Kind.FORWARD:
                live, size = live + 1, size + activation[stage]
            elif kind in GRADIENT_KINDS:
                live, size = live - 1, size - activation[stage]
            if kind is Kind.INPUT_GRAD:
                deferred, size = deferred + 1, size + deferred_size[stage]
            elif kind is Kind.WEIGHT_GRAD:
                deferred, size = deferred - 1, size - deferred_size[stage]
            now = (live, deferred, live + deferred, size)
            peaks = tuple(map(max, peaks, now))  # type: ignore[assignment]
            if not self.backward and kind is Kind.FORWARD:
                live, size = live - 1, size - activation[stage]
        return peaks


def _ends(spans: Sequence[Span]) -> list[float]:
    """For each span, the end of the one before."""
    return [0.0, *(span.end for span in spans[:-1])] if spans else []


def _source(kind: Kind, stage: int, last: int) -> int | None:
    """The stage whose result ``kind`` takes."""
    if kind is Kind.FORWARD:
        return stage - 1 if stage > 0 else None
    if kind in GRADIENT_KINDS:
        return stage + 1 if stage < last else None
    return None
