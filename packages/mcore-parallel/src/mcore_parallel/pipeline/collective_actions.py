"""Where a rank's plan starts the collectives of data parallelism, so that they overlap the bubble. No torch."""

from __future__ import annotations

from dataclasses import replace

from mcore_parallel.pipeline.actions import COMMUNICATION_KINDS, Action, Kind, Plan, RankPlan, Step


def with_collectives(plan: Plan) -> Plan:
    """``plan`` (of a training step) with a ``GATHER`` of each chunk's weights right before its first forward, and a
    ``REDUCE`` of its gradients as soon as its last backward (or weight-gradient pass) is done and its result is sent.

    They concern ranks of other pipelines that run the same plan, so they can neither break it nor make it wait for
    ranks of its own.
    """
    assert plan.backward, "only training reduces gradients"
    return replace(plan, steps=tuple(_with_collectives(steps) for steps in plan.steps))


def rank_with_collectives(plan: Plan, rank: int) -> RankPlan:
    """What :func:`with_collectives` makes of one rank's part alone: other ranks' steps are not even decoded."""
    assert plan.backward, "only training reduces gradients"
    own = plan.for_rank(rank)
    return replace(own, steps=_with_collectives(own.steps))


def _with_collectives(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, step in enumerate(steps):
        action = step.actions[0]
        if action.kind in COMMUNICATION_KINDS:
            continue
        if action.kind is Kind.FORWARD:
            first.setdefault(action.chunk, position)
        else:
            last[action.chunk] = position
    gathers = {position: Step((Action(Kind.GATHER, 0, chunk),)) for chunk, position in first.items()}
    reduces = {
        _after_message(steps, position): Step((Action(Kind.REDUCE, 0, chunk),)) for chunk, position in last.items()
    }
    out: list[Step] = []
    for position, step in enumerate(steps):
        out += [gathers[position]] if position in gathers else []
        out.append(step)
        out += [reduces[position]] if position in reduces else []
    return tuple(out)


def _after_message(steps: tuple[Step, ...], position: int) -> int:
    """The position of the sends and receives that follow ``position`` at once, else ``position``: what other ranks
    wait for goes first."""
    following = steps[position + 1].actions[0].kind if position + 1 < len(steps) else None
    return position + 1 if following in COMMUNICATION_KINDS else position
