"""From compute actions alone to a whole plan: sends and receives are derived, never written by hand. No torch."""

from __future__ import annotations

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
    Step,
    looped_flow,
)


def with_communication(
    compute: ComputePlan, *, num_micro_batches: int, flow: Flow | None = None, backward: bool = True
) -> Plan:
    """Insert and group the sends and receives that ``compute`` (one list of actions per rank) needs.

    The plan is played in rounds: in each, every rank whose next action has its inputs runs that action; then all
    results that leave their rank are exchanged, one group per rank. A send and its receive thus always lie in groups
    of the same round, and every rank meets its rounds in order, so no order of progress can deadlock, even if a
    group blocks until all of it has been received. Equal input gives an equal plan.

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
    _check_compute_only(compute)
    rounds = _Rounds(compute, flow)
    while not rounds.finished:
        rounds.play()
    steps = tuple(tuple(steps) for steps in rounds.steps)
    return Plan(steps, flow, num_micro_batches, backward)


def _check_compute_only(compute: ComputePlan) -> None:
    for rank, actions in enumerate(compute):
        for position, action in enumerate(actions):
            if action.kind not in COMPUTE_KINDS:
                raise ScheduleError(
                    "a schedule lists forwards and backwards only; communication is derived",
                    rank=rank,
                    position=position,
                    action=action,
                )


class _Rounds:
    """State of the game: what each rank has done, and which inputs have arrived where."""

    def __init__(self, compute: ComputePlan, flow: Flow) -> None:
        self.compute = compute
        self.flow = flow
        self.next = [0] * len(compute)
        self.steps: list[list[Step]] = [[] for _ in compute]
        self._arrived: list[set[Action]] = [set() for _ in compute]
        # Looked up once per place: the inner loop runs hundreds of thousands of times for a large pipeline.
        self._upstream = {place: flow.upstream(*place) for place in flow.places}
        self._downstream = {place: flow.downstream(*place) for place in flow.places}

    @property
    def finished(self) -> bool:
        return all(done == len(actions) for done, actions in zip(self.next, self.compute, strict=True))

    def play(self) -> None:
        """One round: run what is ready, then exchange."""
        ran = [(rank, action) for rank in range(len(self.compute)) if (action := self._ready(rank)) is not None]
        if not ran:
            raise self._stuck()
        groups: dict[int, list[Action]] = {}
        for rank, action in ran:
            self.next[rank] += 1
            self.steps[rank].append(Step((action,)))
            self._deliver(rank, action, groups)
        for rank, group in groups.items():
            self.steps[rank].append(Step(tuple(group)))

    def _ready(self, rank: int) -> Action | None:
        if self.next[rank] == len(self.compute[rank]):
            return None
        action = self.compute[rank][self.next[rank]]
        return action if self._source(rank, action) is None or action in self._arrived[rank] else None

    def _source(self, rank: int, action: Action) -> Place | None:
        if action.kind is Kind.WEIGHT_GRAD:
            return None  # what it needs is on its own rank; verify() checks the order
        neighbours = self._upstream if action.kind is Kind.FORWARD else self._downstream
        try:
            return neighbours[Place(rank, action.chunk)]
        except KeyError:
            raise ScheduleError(
                f"rank {rank} has no chunk {action.chunk} (it has {self.flow.num_chunks})",
                rank=rank,
                position=self.next[rank],
                action=action,
            ) from None

    def _deliver(self, rank: int, action: Action, groups: dict[int, list[Action]]) -> None:
        if action.kind is Kind.WEIGHT_GRAD:
            return
        forward = action.kind is Kind.FORWARD
        target = (self._downstream if forward else self._upstream)[Place(rank, action.chunk)]
        if target is None:
            return
        for kind in (Kind.FORWARD,) if forward else GRADIENT_KINDS:
            self._arrived[target.rank].add(Action(kind, action.micro_batch, target.chunk))
        if target.rank == rank:
            return
        send, receive = (Kind.SEND_FORWARD, Kind.RECV_FORWARD) if forward else (Kind.SEND_BACKWARD, Kind.RECV_BACKWARD)
        groups.setdefault(rank, []).append(Action(send, action.micro_batch, action.chunk))
        groups.setdefault(target.rank, []).append(Action(receive, action.micro_batch, target.chunk))

    def _stuck(self) -> ScheduleError:
        waiting = [rank for rank, done in enumerate(self.next) if done < len(self.compute[rank])]
        # A rank whose input is nowhere in the plan is the cause; the others only wait for it in turn.
        rank = next((rank for rank in waiting if not self._can_come(rank)), waiting[0])
        action, source_rank, needed = self._wanted(rank)
        when = "before it" if self._can_come(rank) else "in its plan"
        return ScheduleError(
            f"waits for {needed} of rank {source_rank}, which never comes {when}",
            rank=rank,
            position=self.next[rank],
            action=action,
        )

    def _can_come(self, rank: int) -> bool:
        _, source_rank, needed = self._wanted(rank)
        makers = [needed._replace(kind=kind) for kind in GRADIENT_KINDS] if needed.kind in GRADIENT_KINDS else [needed]
        return any(action in makers for action in self.compute[source_rank][self.next[source_rank] :])

    def _wanted(self, rank: int) -> tuple[Action, int, Action]:
        action = self.compute[rank][self.next[rank]]
        source = self._source(rank, action)
        assert source is not None, "an action without input is always ready"
        return action, source.rank, action._replace(chunk=source.chunk)
