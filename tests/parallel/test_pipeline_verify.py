"""The verifier against a naive interpreter: plans broken at random are caught, and the text says where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pipeline_oracle import is_right, number_groups

from mcore_parallel.pipeline.actions import (
    COLLECTIVE_KINDS,
    COMPUTE_KINDS,
    Action,
    Kind,
    Plan,
    ScheduleError,
    Step,
    looped_flow,
)
from mcore_parallel.pipeline.collective_actions import with_collectives
from mcore_parallel.pipeline.communication import with_communication
from mcore_parallel.pipeline.compile import compile_forward, compile_schedule
from mcore_parallel.pipeline.encoding import encode
from mcore_parallel.pipeline.proof import prove
from mcore_parallel.pipeline.schedules import one_f_one_b
from mcore_parallel.pipeline.verify import examine, verify
from mcore_parallel.plugins import Registry, plugin_manager
from mcore_parallel.specs import ScheduleSpec


def check_located(plan: Plan, error: ScheduleError) -> None:
    """The error points at the action it names, or at the end of a plan that lacks it."""
    steps = plan.steps[error.rank]
    if error.position == len(steps):
        assert error.action not in list(plan.for_rank(error.rank).actions)
    elif error.action is not None:
        assert error.action in steps[error.position].actions
    assert f"rank {error.rank}, position {error.position}" in str(error)
    assert error.reason in str(error)


def build(num_ranks: int, num_micro_batches: int, name: str, collectives: bool) -> Plan:
    spec = SCHEDULES[name]
    chunks = 2 if spec.max_chunks != 1 else 1
    if spec.why_illegal(num_ranks, num_micro_batches, chunks) is not None:
        num_micro_batches = 2 * num_ranks
    plan = compile_schedule(spec, num_ranks=num_ranks, num_micro_batches=num_micro_batches, num_chunks=chunks)
    return with_collectives(plan) if collectives else plan


SCHEDULES = Registry("schedule", plugin_manager().collect("mcore_pipeline_schedules"))
NAMES = ["gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zbv", "dualpipev", "gpipe-example"]
PLANS = st.builds(build, st.integers(1, 4), st.integers(1, 4), st.sampled_from(NAMES), st.booleans())


def with_steps(plan: Plan, rank: int, steps: list[Step]) -> Plan:
    return replace(plan, steps=(*plan.steps[:rank], tuple(steps), *plan.steps[rank + 1 :]))


def pick(data: st.DataObject, plan: Plan) -> tuple[int, int, int]:
    """A rank, one of its steps, and one of that step's actions."""
    rank = data.draw(st.integers(0, len(plan.steps) - 1))
    position = data.draw(st.integers(0, len(plan.steps[rank]) - 1))
    return rank, position, data.draw(st.integers(0, len(plan.steps[rank][position].actions) - 1))


@settings(deadline=None, max_examples=40)
@given(plan=PLANS)
def test_right_plans_pass_all_three(plan: Plan) -> None:
    """The fast proof, the examination action by action and the interpreter; the first two find the same peaks."""
    table = encode(plan.steps)
    if table.rounds is None:
        table = replace(table, rounds=number_groups(plan))
    report = prove(table, plan.flow, plan.num_micro_batches, backward=plan.backward)
    assert report is not None
    assert report == examine(plan) == verify(plan)
    assert is_right(plan)


@settings(deadline=None, max_examples=100)
@given(plan=PLANS, data=st.data())
def test_a_dropped_action_is_caught_on_its_rank(plan: Plan, data: st.DataObject) -> None:
    rank, position, index = pick(data, plan)
    # A plan may do without collectives, so with one place to do them they can go.
    assume(plan.steps[rank][position].actions[index].kind not in COLLECTIVE_KINDS or plan.flow.num_stages > 1)
    steps = list(plan.steps[rank])
    left = [action for i, action in enumerate(steps[position].actions) if i != index]
    steps[position : position + 1] = [Step(tuple(left))] if left else []
    broken = with_steps(plan, rank, steps)
    with pytest.raises(ScheduleError) as error:
        verify(broken)
    assert error.value.rank == rank
    check_located(broken, error.value)
    assert not is_right(broken)


@settings(deadline=None, max_examples=100)
@given(plan=PLANS, data=st.data())
def test_a_doubled_action_is_caught_where_it_is(plan: Plan, data: st.DataObject) -> None:
    rank, position, index = pick(data, plan)
    action = plan.steps[rank][position].actions[index]
    steps = list(plan.steps[rank])
    steps.insert(data.draw(st.integers(0, len(steps))), Step((action,)))
    broken = with_steps(plan, rank, steps)
    with pytest.raises(ScheduleError) as error:
        verify(broken)
    assert error.value.rank == rank
    assert error.value.action == action or "comes " in error.value.reason
    check_located(broken, error.value)
    assert not is_right(broken)


@settings(deadline=None, max_examples=100)
@given(plan=PLANS, data=st.data())
def test_a_retargeted_action_is_caught_on_its_rank(plan: Plan, data: st.DataObject) -> None:
    rank, position, index = pick(data, plan)
    action = plan.steps[rank][position].actions[index]
    other = data.draw(
        st.builds(
            Action, st.sampled_from(Kind), st.integers(-1, plan.num_micro_batches), st.integers(0, plan.flow.num_chunks)
        ).filter(lambda candidate: candidate != action)
    )
    steps = list(plan.steps[rank])
    actions = list(steps[position].actions)
    actions[index] = other
    steps[position] = Step(tuple(actions))
    broken = with_steps(plan, rank, steps)
    with pytest.raises(ScheduleError) as error:
        verify(broken)
    assert error.value.rank == rank
    check_located(broken, error.value)
    assert not is_right(broken)


@settings(deadline=None, max_examples=200)
@given(plan=PLANS, data=st.data())
def test_swapped_steps_pass_only_if_they_run(plan: Plan, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(plan.steps) - 1))
    steps = list(plan.steps[rank])
    i, j = (data.draw(st.integers(0, len(steps) - 1)) for _ in range(2))
    steps[i], steps[j] = steps[j], steps[i]
    check_verdict(with_steps(plan, rank, steps))


@settings(deadline=None, max_examples=200)
@given(plan=PLANS, data=st.data())
def test_split_or_merged_groups_pass_only_if_they_run(plan: Plan, data: st.DataObject) -> None:
    """Where messages are grouped decides whether a rendezvous can deadlock."""
    rank, position, _ = pick(data, plan)
    steps = list(plan.steps[rank])
    actions = list(data.draw(st.permutations(steps[position].actions)))
    if data.draw(st.booleans()) and position + 1 < len(steps):
        steps[position : position + 2] = [Step((*actions, *steps[position + 1].actions))]
    else:
        steps[position : position + 1] = [Step((action,)) for action in actions]
    check_verdict(with_steps(plan, rank, steps))


@settings(deadline=None, max_examples=100)
@given(plan=PLANS, data=st.data())
def test_swapped_compute_passes_only_if_it_runs(plan: Plan, data: st.DataObject) -> None:
    """A schedule author's mistake, before communication is added."""
    compute = [[a for a in plan.for_rank(r).actions if a.kind in COMPUTE_KINDS] for r in range(len(plan.steps))]
    rank = data.draw(st.integers(0, len(compute) - 1))
    i, j = (data.draw(st.integers(0, len(compute[rank]) - 1)) for _ in range(2))
    compute[rank][i], compute[rank][j] = compute[rank][j], compute[rank][i]
    whole, error = attempt(
        lambda: with_communication(compute, num_micro_batches=plan.num_micro_batches, flow=plan.flow)
    )
    if error is not None:
        assert compute[error.rank][error.position] == error.action
    else:
        check_verdict(whole)


def attempt(make: Callable[[], Any]) -> tuple[Any, ScheduleError | None]:
    try:
        return make(), None
    except ScheduleError as error:
        return None, error


def check_verdict(plan: Plan) -> None:
    _, error = attempt(lambda: verify(plan))
    assert (error is None) == is_right(plan), f"verifier: {error}; the interpreter says the opposite"
    _, again = attempt(lambda: examine(plan))
    assert str(again) == str(error)
    table = replace(encode(plan.steps), rounds=number_groups(plan))
    fast = prove(table, plan.flow, plan.num_micro_batches, backward=plan.backward)
    assert fast is None or error is None, f"the fast proof accepts what {error} refuses"
    if error is not None:
        check_located(plan, error)


def step(*actions: Action) -> Step:
    return Step(actions)


def test_both_send_first_is_a_deadlock() -> None:
    """Two neighbours that send before they receive: fine with buffers, a hang under rendezvous."""
    plan = with_communication(one_f_one_b.plan(2, 3), num_micro_batches=3)
    verify(plan)
    ungrouped = []
    for steps in plan.steps:
        single = [Step((action,)) for s in steps for action in sorted(s.actions, key=lambda a: a.kind.value[0] == "R")]
        ungrouped.append(tuple(single))
    broken = replace(plan, steps=tuple(ungrouped))
    with pytest.raises(ScheduleError) as error:
        verify(broken)
    assert (
        "deadlock: rank 0 waits at position 7 in SF2 for rank 1; rank 1 waits at position 7 in SB1 for rank 0"
        in str(error.value)
    )
    assert not is_right(broken)


def test_crossed_messages_are_named_on_both_sides() -> None:
    """Rank 1 expects micro-batch 1 first: it would compute with the wrong activation."""
    plan = with_communication(one_f_one_b.plan(2, 2), num_micro_batches=2)
    swap = {0: 1, 1: 0}
    crossed = tuple(Step(tuple(a._replace(micro_batch=swap[a.micro_batch]) for a in s.actions)) for s in plan.steps[1])
    with pytest.raises(ScheduleError, match=r"rank 1, position 0, RF1: meets SF0 of rank 0 \(its position 1\)"):
        verify(replace(plan, steps=(plan.steps[0], crossed)))


def test_texts() -> None:
    plan = with_communication(one_f_one_b.plan(2, 1), num_micro_batches=1)
    forward, send = plan.steps[0][0], plan.steps[0][1]
    cases = {
        "a step is one compute action or collective, or a group": [step(*forward.actions, *send.actions)],
        "group of communication, got []": [step()],
        "SF0: is done twice in one step": [forward, step(*send.actions, *send.actions)],
        "F0: is done twice, first at position 0": [forward, forward],
        "SF0: comes before F0, which it needs": [send],
        "F7: there are 1 micro-batches": [step(Action(Kind.FORWARD, 7))],
        "F0.3: rank 0 has no chunk 3": [step(Action(Kind.FORWARD, 0, 3))],
        "RF0: stage 0 of 2 has no other rank to exchange this with": [step(Action(Kind.RECV_FORWARD, 0))],
        "position 2, RB0: is never done": [forward, send],
    }
    for text, steps in cases.items():
        with pytest.raises(ScheduleError) as error:
            verify(with_steps(plan, 0, steps))
        assert text in str(error.value)


def test_a_plan_of_another_size_than_its_flow_is_refused() -> None:
    plan = with_communication(one_f_one_b.plan(2, 1), num_micro_batches=1)
    with pytest.raises(ScheduleError, match="the plan has 2 ranks, its flow 3"):
        verify(replace(plan, flow=looped_flow(3)))


def test_a_backward_in_a_forward_plan_is_refused() -> None:
    plan = compile_forward(ScheduleSpec("1f1b", plan=one_f_one_b.plan), num_ranks=2, num_micro_batches=1)
    assert is_right(plan)
    steps = [*plan.steps[0], step(Action(Kind.BACKWARD, 0))]
    with pytest.raises(ScheduleError, match="B0: this plan is forward only"):
        verify(with_steps(plan, 0, steps))
