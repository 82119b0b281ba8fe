"""A fast proof of a plan, by array arithmetic alone: it accepts or does not say. No torch.

:mod:`mcore_parallel.pipeline.verify` finds out what is wrong with a plan that is not accepted here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mcore_parallel.pipeline.actions import Flow, Place
from mcore_parallel.pipeline.encoding import (
    BACKWARD,
    FORWARD,
    GATHER,
    INPUT_GRAD,
    KINDS,
    RECV_BACKWARD,
    RECV_FORWARD,
    REDUCE,
    SEND_BACKWARD,
    SEND_FORWARD,
    WEIGHT_GRAD,
    Ints,
    Table,
)

Bools = NDArray[np.bool_]

_NEVER = -1


@dataclass(frozen=True)
class Report:
    """What the proof found.

    Per rank, ``peak_live``: the most chunk activations held at once (forwards done, the backward or input-gradient
    pass still to come; at most one in a forward-only plan); ``peak_deferred``: the most weight-gradient passes that
    wait (input gradients done, weight gradients to come); ``peak_held``: the most of both together.
    ``num_messages``: tensors that cross ranks in all.
    """

    peak_live: tuple[int, ...]
    num_messages: int
    peak_deferred: tuple[int, ...] = ()
    peak_held: tuple[int, ...] = ()


def prove(table: Table, flow: Flow, num_micro_batches: int, *, backward: bool) -> Report | None:
    """The report on a plan that is complete, ordered, matched and free of deadlock; None if any check fails.

    Freedom of deadlock is taken from the table's ``rounds``: when they grow along each rank and agree at both ends of
    every message, the group with the lowest round that is not through has all its peers there. Without them, None.
    """
    if len(table.num_steps) != flow.num_ranks or num_micro_batches < 1:
        return None
    proof = _Proof(table, flow, num_micro_batches, backward)
    checks = (proof.is_in_range, proof.is_once, proof.is_complete, proof.is_ordered, proof.is_grouped, proof.is_matched)
    return proof.report() if all(check() for check in checks) else None


class _Proof:
    """The checks, in an order in which each may rely on those before it."""

    def __init__(self, table: Table, flow: Flow, num_micro_batches: int, backward: bool) -> None:
        self.table, self.flow, self.count, self.backward = table, flow, num_micro_batches, backward
        self.ranks = table.ranks
        ends = np.array([place.rank for place in flow.places])
        crosses = ends[1:] != ends[:-1]
        self.arrives = np.concatenate(([False], crosses))
        self.leaves = np.concatenate((crosses, [False]))

    def is_in_range(self) -> bool:
        """Chunks and micro-batches exist; collectives carry micro-batch 0."""
        table, flow = self.table, self.flow
        is_collective = (table.kinds == REDUCE) | (table.kinds == GATHER)
        if not (_within(table.chunks, flow.num_chunks) and _within(table.micro_batches, self.count)):
            return False
        if np.any(is_collective & (table.micro_batches != 0)):
            return False
        grid = [[flow.stages[Place(rank, chunk)] for chunk in range(flow.num_chunks)] for rank in range(flow.num_ranks)]
        self.stages: Ints = np.array(grid)[self.ranks, table.chunks]
        return True

    def is_once(self) -> bool:
        """No action is done twice. Leaves in ``at`` the step of each, by kind, stage and micro-batch."""
        table = self.table
        index = (table.kinds * self.flow.num_stages + self.stages) * self.count + table.micro_batches
        order = np.full(len(KINDS) * self.flow.num_stages * self.count, _NEVER)
        order[index] = np.arange(len(index))
        if not np.array_equal(order[index], np.arange(len(index))):
            return False
        steps = np.full(len(order), _NEVER)
        steps[index] = table.steps
        self.at = steps.reshape(len(KINDS), self.flow.num_stages, self.count)
        self.done: Bools = self.at != _NEVER
        return True

    def is_complete(self) -> bool:
        """Every action that is due is there, and no other is."""
        done, leaves, arrives = self.done, self.leaves[:, None], self.arrives[:, None]
        whole, split = done[BACKWARD], done[INPUT_GRAD]
        return bool(
            done[FORWARD].all()
            and np.all(done[SEND_FORWARD] == leaves)
            and np.all(done[RECV_FORWARD] == arrives)
            and np.all(done[RECV_BACKWARD] == (leaves & self.backward))
            and np.all(done[SEND_BACKWARD] == (arrives & self.backward))
            and np.all((whole ^ split) == self.backward)
            and not np.any(whole & split)
            and np.array_equal(done[WEIGHT_GRAD], split)
            and all(done[kind, :, 0].all() or not done[kind, :, 0].any() for kind in (REDUCE, GATHER))
            and (self.backward or not done[REDUCE].any())
        )

    def is_ordered(self) -> bool:
        """Every action comes after all that it needs on its own rank; what it needs elsewhere comes as a message."""
        at, leaves, arrives = self.at, self.leaves, self.arrives
        gradient = np.maximum(at[BACKWARD], at[INPUT_GRAD])
        forward = at[FORWARD]
        local = ~arrives[1:]
        if not (
            np.all(at[RECV_FORWARD][arrives] < forward[arrives])
            and np.all(forward[:-1][local] < forward[1:][local])
            and np.all(forward[leaves] < at[SEND_FORWARD][leaves])
        ):
            return False
        gathers, reduces = at[GATHER, :, 0], at[REDUCE, :, 0]
        if self.done[GATHER].any() and np.any(gathers >= forward.min(axis=1)):
            return False
        if not self.backward:
            return True
        last = np.maximum(gradient, at[WEIGHT_GRAD]).max(axis=1)
        split = self.done[INPUT_GRAD]
        return bool(
            np.all(forward < gradient)
            and np.all(at[RECV_BACKWARD][leaves] < gradient[leaves])
            and np.all(gradient[1:][local] < gradient[:-1][local])
            and np.all(gradient[arrives] < at[SEND_BACKWARD][arrives])
            and np.all(gradient[split] < at[WEIGHT_GRAD][split])
            and (not self.done[REDUCE].any() or np.all(last < reduces))
        )

    def is_grouped(self) -> bool:
        """A step is one pass or collective alone, or messages of one round; rounds grow along each rank."""
        table = self.table
        if table.rounds is None:
            return False
        is_message = table.kinds >= SEND_FORWARD
        same_rank = self.ranks[1:] == self.ranks[:-1]
        same_step = same_rank & (table.steps[1:] == table.steps[:-1])
        both = is_message[1:] & is_message[:-1]
        sizes = np.diff(table.starts)
        firsts, lasts = table.starts[:-1][sizes > 0], table.starts[1:][sizes > 0] - 1
        full = np.array(table.num_steps)
        if not (
            np.all(both[same_step])
            and np.all(table.steps[1:][same_rank & ~same_step] == table.steps[:-1][same_rank & ~same_step] + 1)
            and np.all(table.steps[firsts] == 0)
            and np.array_equal(table.steps[lasts] + 1, full[sizes > 0])
            and np.all(full[sizes == 0] == 0)
        ):
            return False
        rounds, ranks, steps = table.rounds[is_message], self.ranks[is_message], table.steps[is_message]
        step_up = (ranks[1:] == ranks[:-1]) & (steps[1:] != steps[:-1])
        one_step = (ranks[1:] == ranks[:-1]) & (steps[1:] == steps[:-1])
        grows = np.all(rounds[1:][step_up] > rounds[:-1][step_up])
        return bool(grows and np.all(rounds[1:][one_step] == rounds[:-1][one_step]))

    def is_matched(self) -> bool:
        """Along every ordered pair of ranks, sends and receives carry the same messages in the same order and round."""
        table, flow = self.table, self.flow
        assert table.rounds is not None, "is_grouped() comes first"
        homes = np.array([place.rank for place in flow.places])
        sides = []
        for forward, gradient, is_send in (
            (SEND_FORWARD, SEND_BACKWARD, True),
            (RECV_FORWARD, RECV_BACKWARD, False),
        ):
            own = np.flatnonzero((table.kinds == forward) | (table.kinds == gradient))
            is_gradient = table.kinds[own] == gradient
            # A send goes one stage on with the flow of its pass, a receive comes from one stage before.
            maker = self.stages[own] if is_send else self.stages[own] + np.where(is_gradient, 1, -1)
            peer = homes[np.where(is_gradient, maker - 1, maker + 1)] if is_send else homes[maker]
            pair = (self.ranks[own], peer) if is_send else (peer, self.ranks[own])
            link = pair[0] * flow.num_ranks + pair[1]
            payload = (2 * maker + is_gradient) * self.count + table.micro_batches[own]
            order = np.argsort(link, kind="stable")
            sides.append((link[order], payload[order], table.rounds[own][order]))
        self.num_messages = len(sides[0][0])
        return all(np.array_equal(sent, received) for sent, received in zip(*sides, strict=True))

    def report(self) -> Report:
        """Peaks per rank, from running counts."""
        kinds, starts = self.table.kinds, self.table.starts
        forward, split = (kinds == FORWARD).astype(np.int64), (kinds == INPUT_GRAD).astype(np.int64)
        gradient = (kinds == BACKWARD).astype(np.int64) + split
        # Every rank's counts end at zero, so that running sums over all ranks start anew at each.
        live = np.cumsum(forward - gradient) if self.backward else forward
        deferred = np.cumsum(split - (kinds == WEIGHT_GRAD))
        peaks = [_peaks(counts, starts) for counts in (live, deferred, live + deferred)]
        return Report(peak_live=peaks[0], peak_deferred=peaks[1], peak_held=peaks[2], num_messages=self.num_messages)


def _within(numbers: Ints, limit: int) -> bool:
    return not len(numbers) or bool(numbers.min() >= 0 and numbers.max() < limit)


def _peaks(counts: Ints, starts: Ints) -> tuple[int, ...]:
    return tuple(np.maximum.reduceat(counts, starts[:-1]).tolist())
