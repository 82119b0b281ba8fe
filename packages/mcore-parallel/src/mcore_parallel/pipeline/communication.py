"""From compute actions alone to a whole plan: sends and receives are derived, never written by hand. No torch."""

from __future__ import annotations

import numpy as np

from mcore_parallel.pipeline.actions import (
    COMPUTE_KINDS,
    GRADIENT_KINDS,
    Action,
    ComputePlan,
    Flow,
    Kind,
    Place,
    Plan,
    ScheduleError,
    looped_flow,
)
from mcore_parallel.pipeline.encoding import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    RECV_BACKWARD,
    RECV_FORWARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    WEIGHT_GRAD,
    EncodedSteps,
    Ints,
    Table,
    columns,
)

# How long a pass takes while messages are put in order. What it really takes decides nothing but who waits a little.
_LENGTHS = {FORWARD: 1, BACKWARD: 2, INPUT_GRAD: 1, WEIGHT_GRAD: 1}


def with_communication(
    compute: ComputePlan, *, num_micro_batches: int, flow: Flow | None = None, backward: bool = True
) -> Plan:
    """Insert and group the sends and receives that ``compute`` (one list of actions per rank) needs.

    The passes are put on a clock on which a whole backward takes two ticks and every other pass one. A message belongs
    to the tick at which its producer ends; each rank does its passes in order of their ends, and after those of a tick,
    as one group, all messages of the tick. So a receive is posted no later than the pass that runs while it arrives.
    Everything that anything waits for comes earlier on the clock, or in the same group on both sides: no order of
    progress can deadlock, even if a group blocks until all of it has been received. Equal input gives an equal plan.

    ``flow``: where the stages live, by default one per rank and chunk, dealt round.

    Raises:
        ScheduleError: some action's input is never produced.
    """
    if flow is None:
        chunks = 1 + max((action.chunk for actions in compute for action in actions), default=0)
        flow = looped_flow(len(compute), chunks)
    if len(compute) != flow.num_ranks:
        reason = f"the schedule plans {len(compute)} ranks, but there are {flow.num_ranks}"
        raise ScheduleError(reason, rank=0, position=0, action=None)
    _check_actions(compute, flow)
    clock = _Clock(compute, flow)
    clock.play()
    table = _table(clock)
    return Plan(EncodedSteps(table), flow, num_micro_batches, backward)


def _check_actions(compute: ComputePlan, flow: Flow) -> None:
    for rank, actions in enumerate(compute):
        for position, (kind, _, chunk) in enumerate(actions):
            if kind not in COMPUTE_KINDS:
                reason = "a schedule lists compute (F, B, I, W) only; communication is derived"
            elif not 0 <= chunk < flow.num_chunks:
                reason = f"rank {rank} has no chunk {chunk} (it has {flow.num_chunks})"
            else:
                continue
            raise ScheduleError(reason, rank=rank, position=position, action=actions[position])


class _Clock:
    """When each pass ends: each runs after the one before it on its rank, as soon as its input is there."""

    def __init__(self, compute: ComputePlan, flow: Flow) -> None:
        self.compute, self.flow = compute, flow
        self.kinds, self.micro_batches, self.chunks = columns(compute)
        self.starts = np.cumsum([0, *map(len, compute)])
        self.ranks = np.repeat(np.arange(len(compute)), np.diff(self.starts))
        places = np.array([flow.stages[Place(*divmod(i, flow.num_chunks))] for i in range(flow.num_stages)])
        self.stages: Ints = places.reshape(len(compute), flow.num_chunks)[self.ranks, self.chunks]
        self.ends = [-1] * len(self.kinds)
        self.next: list[int] = self.starts[:-1].tolist()

    def play(self) -> None:
        """Set ``ends``; raises ScheduleError if some pass waits for ever."""
        needs, gives, lengths = self._results()
        limits = self.starts[1:].tolist()
        # A result that is not there yet is known by a negative tick; whoever waits for it is called when it comes.
        arrivals: dict[int, int] = {-1: 0}
        waiting: dict[int, int] = {}
        now = [0] * len(limits)
        ready = list(range(len(limits)))[::-1]
        while ready:
            rank = ready.pop()
            index, tick = self.next[rank], now[rank]
            while index < limits[rank]:
                arrival = arrivals.get(needs[index])
                if arrival is None:
                    waiting[needs[index]] = rank
                    break
                tick = (arrival if arrival > tick else tick) + lengths[index]
                self.ends[index] = tick
                given = gives[index]
                if given >= 0 and given not in arrivals:
                    arrivals[given] = tick
                    if given in waiting:
                        ready.append(waiting.pop(given))
                index += 1
            self.next[rank], now[rank] = index, tick
        if self.next != limits:
            raise self._stuck()

    def _results(self) -> tuple[list[int], list[int], list[int]]:
        """For each pass the number of the result it needs and of the one it gives, -1 for none, and its length."""
        count = int(self.micro_batches.max(initial=0)) + 1
        is_forward = self.kinds == FORWARD
        is_gradient = (self.kinds == BACKWARD) | (self.kinds == INPUT_GRAD)
        source = self.stages + np.where(is_forward, -1, 1)
        has_source = (is_forward | is_gradient) & (source >= 0) & (source < self.flow.num_stages)
        base = (2 * count * self.stages) + 2 * self.micro_batches + is_forward
        needs = np.where(has_source, (2 * count * source) + 2 * self.micro_batches + is_forward, -1)
        gives = np.where(is_forward | is_gradient, base, -1)
        lengths = np.array([_LENGTHS[code] for code in range(len(_LENGTHS))])[self.kinds]
        return needs.tolist(), gives.tolist(), lengths.tolist()

    def _stuck(self) -> ScheduleError:
        starts, limits = self.starts[:-1].tolist(), self.starts[1:].tolist()
        done = [index - start for index, start in zip(self.next, starts, strict=True)]
        waiting = [rank for rank, index in enumerate(self.next) if index < limits[rank]]
        wanted = {rank: self._wanted(rank, self.compute[rank][done[rank]]) for rank in waiting}
        can_come = {
            rank: any(_makes(action, needed) for action in self.compute[source][done[source] :])
            for rank, (source, needed) in wanted.items()
        }
        # A rank whose input is nowhere in the plan is the cause; the others only wait for it in turn.
        rank = next((rank for rank in waiting if not can_come[rank]), waiting[0])
        source, needed = wanted[rank]
        when = "before it" if can_come[rank] else "in its plan"
        return ScheduleError(
            f"waits for {needed} of rank {source}, which never comes {when}",
            rank=rank,
            position=done[rank],
            action=self.compute[rank][done[rank]],
        )

    def _wanted(self, rank: int, action: Action) -> tuple[int, Action]:
        find = self.flow.upstream if action.kind is Kind.FORWARD else self.flow.downstream
        place = find(rank, action.chunk)
        assert place is not None, "an action without input is always ready"
        return place.rank, action._replace(chunk=place.chunk)


def _makes(action: Action, needed: Action) -> bool:
    kinds = GRADIENT_KINDS if needed.kind in GRADIENT_KINDS else {needed.kind}
    return action.kind in kinds and action[1:] == needed[1:]


def _table(clock: _Clock) -> Table:
    """Passes and messages of all ranks in order of the clock."""
    ranks, ticks = clock.ranks, np.array(clock.ends, np.int64)
    is_forward = clock.kinds == FORWARD
    target = clock.stages + np.where(is_forward, 1, -1)
    leaves = (clock.kinds != WEIGHT_GRAD) & (target >= 0) & (target < clock.flow.num_stages)
    place_rank, place_chunk = np.array(clock.flow.places).T
    target_rank = np.where(leaves, place_rank[np.where(leaves, target, 0)], ranks)
    sent = np.flatnonzero(target_rank != ranks)
    forward = is_forward[sent]
    pairs = (
        (ranks, ranks[sent], target_rank[sent]),
        (clock.kinds, np.where(forward, SEND_FORWARD, SEND_BACKWARD), np.where(forward, RECV_FORWARD, RECV_BACKWARD)),
        (clock.micro_batches, clock.micro_batches[sent], clock.micro_batches[sent]),
        (clock.chunks, clock.chunks[sent], place_chunk[target[sent]]),
        (ticks, ticks[sent], ticks[sent]),
        (ranks, ranks[sent], ranks[sent]),
    )
    rank, kind, micro_batch, chunk, tick, maker = (np.concatenate(parts) for parts in pairs)
    is_message = np.arange(len(rank)) >= len(ranks)
    order = np.lexsort((maker, is_message, tick, rank))
    rank, kind, micro_batch, chunk, tick = (column[order] for column in (rank, kind, micro_batch, chunk, tick))
    is_message = is_message[order]
    # A new step begins at every pass, and at a message that does not follow one of its own tick and rank.
    follows = np.zeros(len(rank), bool)
    follows[1:] = is_message[1:] & is_message[:-1] & (tick[1:] == tick[:-1]) & (rank[1:] == rank[:-1])
    starts = np.searchsorted(rank, np.arange(len(clock.starts)))
    opened = np.concatenate(([0], np.cumsum(~follows)))
    steps = opened[1:] - 1 - opened[starts[:-1]][rank]
    return Table(
        kinds=kind,
        micro_batches=micro_batch,
        chunks=chunk,
        steps=steps,
        starts=starts,
        num_steps=tuple(np.diff(opened[starts]).tolist()),
        rounds=np.where(is_message, tick, -1),
    )
