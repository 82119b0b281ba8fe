"""What pipeline plans are checked against: an interpreter that knows none of the verifier's bookkeeping."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import numpy as np

from mcore_parallel.pipeline.actions import (
    COLLECTIVE_KINDS,
    COMMUNICATION_KINDS,
    COMPUTE_KINDS,
    Action,
    Kind,
    Place,
    Plan,
)
from mcore_parallel.pipeline.encoding import Ints, encode

Item = tuple[str, int, int]


class Illegal(Exception):
    """The interpreter met something that cannot be."""


class Interpreter:
    """Runs a plan with real queues: a group blocks until the peers have posted the other half of each message.

    With ``buffered``, sends return at once. Written without any of the verifier's bookkeeping: payloads travel, and an
    action takes what it needs from what its rank holds.
    """

    def __init__(self, plan: Plan, order: list[int], *, buffered: bool = False) -> None:
        self.plan, self.order, self.buffered = plan, order, buffered
        self.held: list[set[Item]] = [set() for _ in plan.steps]
        self.did: list[set[Action]] = [set() for _ in plan.steps]
        self.posted: dict[tuple[str, int, int], list[Item]] = {}
        self.at = [0] * len(plan.steps)
        self.waiting: list[list[tuple[tuple[str, int, int], int, Item]] | None] = [None] * len(plan.steps)

    def run(self) -> bool:
        try:
            while any(self.advance(rank) for rank in self.order):
                pass
        except Illegal:
            return False
        through = all(n == len(steps) for n, steps in zip(self.at, self.plan.steps, strict=True))
        made = {"activation": 0, "gradient": 0, "deferred": 0}
        for rank, held in enumerate(self.held):
            for what, stage, _ in held:
                made[what] += self.plan.flow.places[stage].rank == rank
        passes = self.plan.flow.num_stages * self.plan.num_micro_batches
        complete = made == {"activation": passes, "gradient": passes * self.plan.backward, "deferred": 0}
        matched = all(len(items) == len(self.posted.get(self.other(key), [])) for key, items in self.posted.items())
        kinds = [action.kind for did in self.did for action in did]
        whole = all(kinds.count(kind) in (0, self.plan.flow.num_stages) for kind in COLLECTIVE_KINDS)
        return through and matched and complete and whole

    @staticmethod
    def other(key: tuple[str, int, int]) -> tuple[str, int, int]:
        return ("receive" if key[0] == "send" else "send", key[1], key[2])

    def advance(self, rank: int) -> bool:
        if self.at[rank] == len(self.plan.steps[rank]):
            return False
        step = self.plan.steps[rank][self.at[rank]]
        if any(action.kind in COMPUTE_KINDS | COLLECTIVE_KINDS for action in step.actions):
            if len(step.actions) > 1:
                raise Illegal
            self.compute(rank, step.actions[0])
            self.at[rank] += 1
            return True
        if self.waiting[rank] is None:
            if not step.actions:
                raise Illegal
            self.waiting[rank] = [self.post(rank, action) for action in step.actions]
            return True
        halves = self.waiting[rank]
        assert halves is not None
        blocking = [half for half in halves if not self.buffered or half[0][0] == "receive"]
        if any(len(self.posted.get(self.other(key), [])) <= index for key, index, _ in blocking):
            return False
        for key, index, item in blocking:
            if self.posted[self.other(key)][index] != item:
                raise Illegal
            if key[0] == "receive":
                self.held[rank].add(item)
        self.waiting[rank] = None
        self.at[rank] += 1
        return True

    def once(self, rank: int, action: Action) -> int:
        legal = 0 <= action.micro_batch < self.plan.num_micro_batches
        if action in self.did[rank] or not legal or Place(rank, action.chunk) not in self.plan.flow.stages:
            raise Illegal
        self.did[rank].add(action)
        return self.plan.flow.stages[Place(rank, action.chunk)]

    def take(self, rank: int, item: Item) -> None:
        if item not in self.held[rank]:
            raise Illegal

    def compute(self, rank: int, action: Action) -> None:
        stage = self.once(rank, action)
        m, held = action.micro_batch, self.held[rank]
        if action.kind in COLLECTIVE_KINDS:
            self.collective(action, stage, held)
        elif action.kind is Kind.FORWARD:
            if stage > 0:
                self.take(rank, ("activation", stage - 1, m))
            held.add(("activation", stage, m))
        elif action.kind is Kind.WEIGHT_GRAD:
            self.take(rank, ("deferred", stage, m))
            held.discard(("deferred", stage, m))
        else:
            self.gradient(rank, action, stage)

    def collective(self, action: Action, stage: int, held: set[Item]) -> None:
        count = {w: sum(item[:2] == (w, stage) for item in held) for w in ("activation", "gradient", "deferred")}
        all_there = count["gradient"] == self.plan.num_micro_batches and not count["deferred"] and self.plan.backward
        if action.micro_batch or not (all_there if action.kind is Kind.REDUCE else not count["activation"]):
            raise Illegal

    def gradient(self, rank: int, action: Action, stage: int) -> None:
        m, held = action.micro_batch, self.held[rank]
        self.take(rank, ("activation", stage, m))
        if stage + 1 < self.plan.flow.num_stages:
            self.take(rank, ("gradient", stage + 1, m))
        if ("gradient", stage, m) in held or not self.plan.backward:
            raise Illegal
        held.add(("gradient", stage, m))
        if action.kind is Kind.INPUT_GRAD:
            held.add(("deferred", stage, m))

    def post(self, rank: int, action: Action) -> tuple[tuple[str, int, int], int, Item]:
        stage = self.once(rank, action)
        flow = self.plan.flow
        is_send = action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
        is_down = action.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
        to_next = action.kind in (Kind.SEND_FORWARD, Kind.RECV_BACKWARD)
        peer_stage = stage + 1 if to_next else stage - 1
        if not 0 <= peer_stage < flow.num_stages or flow.places[peer_stage].rank == rank:
            raise Illegal
        peer = flow.places[peer_stage].rank
        item = ("activation" if is_down else "gradient", stage if is_send else peer_stage, action.micro_batch)
        if is_send:
            self.take(rank, item)
        key = ("send", rank, peer) if is_send else ("receive", peer, rank)
        self.posted.setdefault(key, []).append(item)
        return key, len(self.posted[key]) - 1, item


def is_right(plan: Plan) -> bool:
    """What the interpreter says, whichever rank goes first."""
    ranks = list(range(len(plan.steps)))
    verdicts = {Interpreter(plan, order).run() for order in (ranks, ranks[::-1])}
    assert len(verdicts) == 1, "progress does not depend on who goes first"
    runs = verdicts.pop()
    assert not runs or Interpreter(plan, ranks, buffered=True).run(), "what meets also runs with buffers"
    return runs


Group = tuple[int, int]


def number_groups(plan: Plan) -> Ints | None:
    """Rounds for :class:`Table` of any plan, from a topological order over the groups that must meet; None without."""
    groups = [
        (rank, position)
        for rank, steps in enumerate(plan.steps)
        for position, step in enumerate(steps)
        if all(action.kind in COMMUNICATION_KINDS for action in step.actions)
    ]
    parent = {group: group for group in groups}

    def find(group: Group) -> Group:
        while parent[group] != group:
            group = parent[group]
        return group

    for first, *others in meetings(plan, groups).values():
        for other in others:
            parent[find(other)] = find(first)
    sorter: TopologicalSorter[Group] = TopologicalSorter()
    for group in groups:
        sorter.add(find(group))
    for group, following in pairwise(groups):
        if group[0] == following[0]:
            sorter.add(find(following), find(group))
    try:
        order = {group: i for i, group in enumerate(sorter.static_order())}
    except CycleError:
        return None
    table = encode(plan.steps)
    places = zip(table.ranks.tolist(), table.steps.tolist(), strict=True)
    return np.array([order[find(place)] if place in parent else -1 for place in places])


def meetings(plan: Plan, groups: list[Group]) -> dict[tuple[bool, int, int], list[Group]]:
    """The groups at both ends of every message."""
    found: dict[tuple[bool, int, int], list[Group]] = {}
    for rank, position in groups:
        for action in plan.steps[rank][position].actions:
            forward = action.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
            stage = plan.flow.stages.get(Place(rank, action.chunk), -9)
            if action.kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD):
                stage += -1 if forward else 1
            found.setdefault((forward, stage, action.micro_batch), []).append((rank, position))
    return found
