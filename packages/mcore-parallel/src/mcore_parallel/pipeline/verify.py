"""The proof that a plan is complete, ordered, matched and free of deadlock, before any process starts. No torch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from mcore_parallel.pipeline.actions import (
    COLLECTIVE_KINDS,
    COMMUNICATION_KINDS,
    SEND_KINDS,
    Action,
    Flow,
    Kind,
    Place,
    Plan,
    ScheduleError,
    Step,
)
from mcore_parallel.pipeline.encoding import encode
from mcore_parallel.pipeline.proof import Report, prove

_FORWARD_KINDS = frozenset({Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_FORWARD, Kind.GATHER})
_GRADIENT_KINDS = frozenset({Kind.SEND_BACKWARD, Kind.RECV_BACKWARD})
_DOWNSTREAM_KINDS = frozenset({Kind.SEND_FORWARD, Kind.RECV_BACKWARD})


def verify(plan: Plan) -> Report:
    """Prove ``plan`` and report what it holds at once and sends.

    Proven: every micro-batch passes every stage exactly once forward, and once backward, whole or as an input gradient
    with its weight gradient later; nothing runs before its inputs are there; collectives come once per chunk, gathers
    before its first forward and reductions after its last gradients; along every ordered pair of ranks the sends and
    receives carry the same messages in the same order; and no deadlock when a step blocks until every peer has posted
    the other half of each of its messages (NCCL's rendezvous). Sends that return at once (buffered) only ever block
    less, so they are covered as well.

    Raises:
        ScheduleError: with the rank, the position in its steps, the action and the reason.
    """
    report = prove(encode(plan.steps), plan.flow, plan.num_micro_batches, backward=plan.backward)
    return report if report is not None else examine(plan)


def examine(plan: Plan) -> Report:
    """What :func:`verify` does, action by action: slower, but it can say what is wrong, and needs no certificate.

    Raises:
        ScheduleError: as :func:`verify`.
    """
    if len(plan.steps) != plan.flow.num_ranks:
        raise ScheduleError(
            f"the plan has {len(plan.steps)} ranks, its flow {plan.flow.num_ranks}", rank=0, position=0, action=None
        )
    streams: dict[tuple[int, int, bool], Stream] = {}
    ranks = [_RankCheck(plan, rank, _routes(plan.flow, rank, streams)) for rank in range(plan.flow.num_ranks)]
    for rank in ranks:
        rank.run()
    _check_collectives(ranks)
    for stream in streams.values():
        if stream.is_send:
            _match(stream, stream.counterpart)
    _Progress(ranks).play()
    messages = sum(len(stream.tags) for stream in streams.values() if stream.is_send)
    return Report(
        peak_live=tuple(rank.peak_live for rank in ranks),
        peak_deferred=tuple(rank.peak_deferred for rank in ranks),
        peak_held=tuple(rank.peak_held for rank in ranks),
        num_messages=messages,
    )


@dataclass(eq=False)
class Stream:
    """All sends (or all receives) of one rank to (from) one peer, in order. ``tags`` name the payloads."""

    rank: int
    peer: int
    is_send: bool
    all_streams: dict[tuple[int, int, bool], Stream] = field(repr=False)
    tags: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    posted: int = 0

    @cached_property
    def counterpart(self) -> Stream:
        """The peer's receives for these sends, or the reverse."""
        return _stream(self.all_streams, self.peer, self.rank, not self.is_send)


@dataclass(frozen=True)
class Route:
    """Which stream an action joins, and ``tag + micro_batch``, the number of its payload, equal on both sides."""

    stream: Stream
    tag: int


Routes = dict[Kind, list[Route | None]]


def _stream(streams: dict[tuple[int, int, bool], Stream], rank: int, peer: int, is_send: bool) -> Stream:
    if (rank, peer, is_send) not in streams:
        streams[rank, peer, is_send] = Stream(rank, peer, is_send, streams)
    return streams[rank, peer, is_send]


def _routes(flow: Flow, rank: int, streams: dict[tuple[int, int, bool], Stream]) -> Routes:
    """By kind and chunk, the route of each communication action that ``rank`` may do."""
    routes: Routes = {kind: [None] * flow.num_chunks for kind in COMMUNICATION_KINDS}
    for kind, by_chunk in routes.items():
        for chunk in range(flow.num_chunks):
            peer = flow.downstream(rank, chunk) if kind in _DOWNSTREAM_KINDS else flow.upstream(rank, chunk)
            if peer is None or peer.rank == rank:
                continue
            maker = Place(rank, chunk) if kind in SEND_KINDS else peer
            payload = 2 * flow.stages[maker] + (kind in _GRADIENT_KINDS)
            by_chunk[chunk] = Route(_stream(streams, rank, peer.rank, kind in SEND_KINDS), payload << 32)
    return routes


Needs = dict[tuple[Kind, int], tuple[tuple[Kind, int], ...]]


def _needs(flow: Flow, rank: int, chunk: int, *, backward: bool) -> Needs:
    """The legal actions of one chunk as ``(kind, chunk)``, each with those that must come before it on its rank."""
    upstream, downstream = flow.upstream(rank, chunk), flow.downstream(rank, chunk)
    arrives = upstream is not None and upstream.rank != rank
    leaves = downstream is not None and downstream.rank != rank
    forward: list[tuple[Kind, int]] = []
    needs: Needs = {}
    if arrives:
        needs[Kind.RECV_FORWARD, chunk] = ()
        forward.append((Kind.RECV_FORWARD, chunk))
    elif upstream is not None:
        forward.append((Kind.FORWARD, upstream.chunk))
    needs[Kind.FORWARD, chunk] = tuple(forward)
    if leaves:
        needs[Kind.SEND_FORWARD, chunk] = ((Kind.FORWARD, chunk),)
    if not backward:
        return needs
    before = [(Kind.FORWARD, chunk)]
    if leaves:
        needs[Kind.RECV_BACKWARD, chunk] = ()
        before.append((Kind.RECV_BACKWARD, chunk))
    elif downstream is not None:
        before.append((Kind.BACKWARD, downstream.chunk))
    needs[Kind.BACKWARD, chunk] = needs[Kind.INPUT_GRAD, chunk] = tuple(before)
    needs[Kind.WEIGHT_GRAD, chunk] = ((Kind.INPUT_GRAD, chunk),)
    if arrives:
        needs[Kind.SEND_BACKWARD, chunk] = ((Kind.BACKWARD, chunk),)
    return needs


class _Group(NamedTuple):
    """A step of communication: each action with the stream that it joins."""

    position: int
    actions: tuple[Action, ...]
    streams: list[Stream]


@dataclass
class _RankCheck:
    """The checks that one rank's steps alone allow: complete, once each, in order. Fills the streams."""

    plan: Plan
    rank: int
    routes: Routes
    groups: list[_Group] = field(default_factory=list)
    collectives: set[Action] = field(default_factory=set)
    peak_live: int = 0
    peak_deferred: int = 0
    peak_held: int = 0

    def run(self) -> None:
        needs: Needs = {}
        for chunk in range(self.plan.flow.num_chunks):
            needs |= _needs(self.plan.flow, self.rank, chunk, backward=self.plan.backward)
        done: dict[Action, int] = {}
        for position, step in enumerate(self.plan.steps[self.rank]):
            actions = step.actions
            if len(actions) != 1:
                self._check_group(position, step)
            for action in actions:
                self._check_action(position, action, needs, done)
            for action in actions:
                if action.kind is Kind.INPUT_GRAD:
                    # An input gradient stands in for the backward in all that follows, and excludes it.
                    done[action._replace(kind=Kind.BACKWARD)] = position
                done[action] = position
            if actions[0].kind in COMMUNICATION_KINDS:
                self.groups.append(_Group(position, actions, [self._join_stream(position, a) for a in actions]))
        self.collectives = {action for action in done if action.kind in COLLECTIVE_KINDS}
        self._count(done)
        self._check_complete(needs, done)

    def _count(self, done: dict[Action, int]) -> None:
        live = deferred = 0
        for kind, _, _ in done:
            if kind is Kind.FORWARD:
                self.peak_live = max(self.peak_live, live + 1)
                live += self.plan.backward
            elif kind is Kind.BACKWARD:
                live -= 1
            elif kind is Kind.INPUT_GRAD:
                deferred += 1
            elif kind is Kind.WEIGHT_GRAD:
                deferred -= 1
            self.peak_deferred = max(self.peak_deferred, deferred)
            self.peak_held = max(self.peak_held, live + deferred, self.peak_live and 1)

    def _join_stream(self, position: int, action: Action) -> Stream:
        route = self.routes[action.kind][action.chunk]
        assert route is not None, "only legal actions are routed"
        route.stream.tags.append(route.tag + action.micro_batch)
        route.stream.positions.append(position)
        route.stream.actions.append(action)
        return route.stream

    def _fail(self, reason: str, position: int, action: Action | None) -> ScheduleError:
        return ScheduleError(reason, rank=self.rank, position=position, action=action)

    def _check_group(self, position: int, step: Step) -> None:
        alone = [action for action in step.actions if action.kind not in COMMUNICATION_KINDS]
        if alone or not step.actions:
            reason = f"a step is one compute action or collective, or a group of communication, got [{step}]"
            raise self._fail(reason, position, alone[0] if alone else None)
        if len(set(step.actions)) < len(step.actions):
            twice = next(action for action in step.actions if step.actions.count(action) > 1)
            raise self._fail("is done twice in one step", position, twice)

    def _check_action(self, position: int, action: Action, needs: Needs, done: dict[Action, int]) -> None:
        kind, micro_batch, chunk = action
        if kind in COLLECTIVE_KINDS:
            self._check_collective(position, action, done)
            return
        needed = needs.get((kind, chunk))
        if needed is None:
            raise self._fail(self._why_foreign(action), position, action)
        if not 0 <= micro_batch < self.plan.num_micro_batches:
            raise self._fail(f"there are {self.plan.num_micro_batches} micro-batches, from 0", position, action)
        if action in done:
            raise self._fail(f"is done twice, first at position {done[action]}", position, action)
        if kind is Kind.INPUT_GRAD and (whole := action._replace(kind=Kind.BACKWARD)) in done:
            raise self._fail(f"is done twice, first as {whole} at position {done[whole]}", position, action)
        for earlier, earlier_chunk in needed:
            if (earlier, micro_batch, earlier_chunk) not in done:  # an Action equals the plain tuple
                missing = Action(earlier, micro_batch, earlier_chunk)
                raise self._fail(f"comes before {missing}, which it needs", position, action)

    def _check_collective(self, position: int, action: Action, done: dict[Action, int]) -> None:
        kind, micro_batch, chunk = action
        if not 0 <= chunk < self.plan.flow.num_chunks or (kind is Kind.REDUCE and not self.plan.backward):
            raise self._fail(self._why_foreign(action), position, action)
        if micro_batch != 0:
            raise self._fail(f"concerns all micro-batches: write 0, not {micro_batch}", position, action)
        if action in done:
            raise self._fail(f"is done twice, first at position {done[action]}", position, action)
        for other in range(self.plan.num_micro_batches):
            forward, backward = Action(Kind.FORWARD, other, chunk), Action(Kind.BACKWARD, other, chunk)
            split, late = Action(Kind.INPUT_GRAD, other, chunk), Action(Kind.WEIGHT_GRAD, other, chunk)
            if kind is Kind.GATHER and forward in done:
                raise self._fail(f"comes after {forward}, which needs the weights", position, action)
            missing = late if split in done and late not in done else backward if backward not in done else None
            if kind is Kind.REDUCE and missing is not None:
                raise self._fail(f"comes before {missing}, whose gradients it reduces", position, action)

    def _why_foreign(self, action: Action) -> str:
        if not 0 <= action.chunk < self.plan.flow.num_chunks:
            return f"rank {self.rank} has no chunk {action.chunk} (it has {self.plan.flow.num_chunks})"
        if not self.plan.backward and action.kind not in _FORWARD_KINDS:
            return "this plan is forward only"
        stage = self.plan.flow.stages[Place(self.rank, action.chunk)]
        return f"stage {stage} of {self.plan.flow.num_stages} has no other rank to exchange this with"

    def _check_complete(self, needs: Needs, done: dict[Action, int]) -> None:
        end = len(self.plan.steps[self.rank])
        for kind, chunk in needs:
            for micro_batch in range(self.plan.num_micro_batches):
                action = Action(kind, micro_batch, chunk)
                if kind is Kind.INPUT_GRAD or action in done:
                    continue
                if kind is not Kind.WEIGHT_GRAD:
                    raise self._fail("is never done", end, action)
                if action._replace(kind=Kind.INPUT_GRAD) in done:
                    raise self._fail("is never done, so this micro-batch's weight gradients are lost", end, action)


def _check_collectives(ranks: list[_RankCheck]) -> None:
    """Check that every chunk of every rank is reduced (gathered), or none: a gradient left out would be silent."""
    for kind in sorted(COLLECTIVE_KINDS):
        wanted = [(rank, Action(kind, 0, chunk)) for rank in ranks for chunk in range(rank.plan.flow.num_chunks)]
        missing = [(rank, action) for rank, action in wanted if action not in rank.collectives]
        if 0 < len(missing) < len(wanted):
            rank, action = missing[0]
            end = len(rank.plan.steps[rank.rank])
            reason = "is never done, although that of another chunk is"
            raise ScheduleError(reason, rank=rank.rank, position=end, action=action)


def _match(sends: Stream, receives: Stream) -> None:
    """Check that the sends and receives along an ordered pair of ranks agree in order."""
    if sends.tags == receives.tags:
        return
    same = min(len(sends.tags), len(receives.tags))
    index = next((i for i in range(same) if sends.tags[i] != receives.tags[i]), same)
    if index == same:
        extra = max(sends, receives, key=lambda stream: len(stream.tags))
        reason, at = f"has no counterpart on rank {extra.peer}", extra
    else:
        at = receives
        reason = (
            f"meets {sends.actions[index]} of rank {sends.rank} (its position {sends.positions[index]}): "
            "messages between two ranks must be received in the order in which they are sent"
        )
    raise ScheduleError(reason, rank=at.rank, position=at.positions[index], action=at.actions[index])


class _Progress:
    """Plays the communication with blocking groups until all ranks are through; compute never blocks."""

    def __init__(self, ranks: list[_RankCheck]) -> None:
        self.ranks = ranks
        self.next = [0] * len(ranks)
        self.is_blocked = [False] * len(ranks)

    def play(self) -> None:
        """Raises ScheduleError if the ranks come to a halt before their ends."""
        ready = deque(range(len(self.ranks)))
        while ready:
            self._advance(ready.popleft(), ready)
        if any(self.is_blocked):
            raise self._deadlock()

    def _advance(self, rank: int, ready: deque[int]) -> None:
        groups = self.ranks[rank].groups
        while self.next[rank] < len(groups):
            streams = groups[self.next[rank]].streams
            if not self.is_blocked[rank]:
                for stream in streams:
                    stream.posted += 1
                    if self.is_blocked[stream.peer]:
                        ready.append(stream.peer)
            for stream in streams:
                if stream.counterpart.posted < stream.posted:
                    self.is_blocked[rank] = True
                    return
            self.is_blocked[rank] = False
            self.next[rank] += 1

    def _deadlock(self) -> ScheduleError:
        waits = []
        for rank in (rank for rank, blocked in enumerate(self.is_blocked) if blocked):
            group = self.ranks[rank].groups[self.next[rank]]
            at = next(i for i, stream in enumerate(group.streams) if stream.counterpart.posted < stream.posted)
            waits.append((rank, group.position, group.actions[at], group.streams[at].peer))
        shown = [f"rank {r} waits at position {p} in {action} for rank {peer}" for r, p, action, peer in waits[:4]]
        rank, position, action, _ = waits[0]
        reason = f"deadlock: {'; '.join(shown)}" + ("; ..." if len(waits) > 4 else "")
        return ScheduleError(reason, rank=rank, position=position, action=action)
