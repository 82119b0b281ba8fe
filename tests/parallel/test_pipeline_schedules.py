"""1F1B against its closed forms, and communication derived for any legal order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_parallel.pipeline.actions import (
    Action,
    ComputePlan,
    Flow,
    Kind,
    Place,
    ScheduleError,
    forward_plan,
    looped_flow,
)
from mcore_parallel.pipeline.communication import with_communication
from mcore_parallel.pipeline.compile import compile_forward, compile_schedule
from mcore_parallel.pipeline.schedules import one_f_one_b
from mcore_parallel.pipeline.verify import verify
from mcore_parallel.specs import ScheduleSpec

SPEC = ScheduleSpec("1f1b", plan=one_f_one_b.plan)


def text(actions: list[Action]) -> str:
    return " ".join(str(action) for action in actions)


def test_1f1b_by_hand() -> None:
    assert [text(actions) for actions in one_f_one_b.plan(4, 5)] == [
        "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4",
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]


def test_1f1b_with_fewer_micro_batches_than_stages() -> None:
    assert [text(actions) for actions in one_f_one_b.plan(4, 2)] == ["F0 F1 B0 B1"] * 3 + ["F0 B0 F1 B1"]


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(0, 1), (1, 0), (-1, 3)])
def test_1f1b_refuses_nothing_to_do(num_stages: int, num_micro_batches: int) -> None:
    with pytest.raises(ValueError, match=f"got {num_stages} ranks and {num_micro_batches} micro-batches"):
        SPEC.actions(num_stages, num_micro_batches)


def makespan(compute: ComputePlan, flow: Flow, times: dict[Kind, int]) -> int:
    """The end of a step whose communication is free: each action starts when its rank and its input are ready."""
    ends: dict[tuple[Kind, int, Place], int] = {}
    clock, done = [0] * len(compute), [0] * len(compute)
    while any(n < len(actions) for n, actions in zip(done, compute, strict=True)):
        for rank, actions in enumerate(compute):
            if done[rank] == len(actions):
                continue
            kind, micro_batch, chunk = actions[done[rank]]
            source = flow.upstream(rank, chunk) if kind is Kind.FORWARD else flow.downstream(rank, chunk)
            arrival = 0 if source is None else ends.get((kind, micro_batch, source))
            if arrival is None:
                continue
            clock[rank] = max(clock[rank], arrival) + times[kind]
            ends[kind, micro_batch, Place(rank, chunk)] = clock[rank]
            done[rank] += 1
    return max(clock)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 7, 8, 16, 17])
def test_1f1b_closed_forms(num_stages: int, num_micro_batches: int) -> None:
    """Makespan (m + p - 1)(f + b), min(p - r, m) live activations, 2 m (p - 1) messages."""
    compute = one_f_one_b.plan(num_stages, num_micro_batches)
    span = makespan(compute, looped_flow(num_stages), {Kind.FORWARD: 1, Kind.BACKWARD: 2})
    assert span == (num_micro_batches + num_stages - 1) * 3
    report = verify(compile_schedule(SPEC, num_ranks=num_stages, num_micro_batches=num_micro_batches))
    assert report.peak_live == tuple(min(num_stages - rank, num_micro_batches) for rank in range(num_stages))
    assert report.num_messages == 2 * num_micro_batches * (num_stages - 1)


def test_a_large_pipeline() -> None:
    report = verify(compile_schedule(SPEC, num_ranks=64, num_micro_batches=512))
    assert report.peak_live == tuple(range(64, 0, -1))
    assert report.num_messages == 2 * 512 * 63


def test_neighbours_exchange_in_one_group() -> None:
    """In the steady state, an activation down and a gradient up go together, so that neither can wait for the other."""
    plan = compile_schedule(SPEC, num_ranks=2, num_micro_batches=3)
    assert [" ".join(map(str, steps)) for steps in plan.steps] == [
        "F0 SF0 F1 SF1 RB0 B0 F2 SF2+RB1 B1 RB2 B2",
        "RF0 F0 RF1 B0 SB0 F1 B1 RF2+SB1 F2 B2 SB2",
    ]


@pytest.mark.parametrize("num_micro_batches", [1, 2, 5])
def test_forward_plan(num_micro_batches: int) -> None:
    plan = compile_forward(SPEC, num_ranks=3, num_micro_batches=num_micro_batches)
    assert verify(plan).num_messages == 2 * num_micro_batches
    assert verify(plan).peak_live == (1, 1, 1)
    assert {action.kind for steps in plan.steps for step in steps for action in step.actions} == {
        Kind.FORWARD,
        Kind.SEND_FORWARD,
        Kind.RECV_FORWARD,
    }


def test_forward_plan_refuses_nothing_to_do() -> None:
    with pytest.raises(ValueError, match="got 2 ranks and 0 micro-batches"):
        compile_forward(SPEC, num_ranks=2, num_micro_batches=0)


def folded_flow(num_ranks: int) -> Flow:
    there = [Place(rank, 0) for rank in range(num_ranks)]
    return Flow((*there, *(Place(rank, 1) for rank in reversed(range(num_ranks)))))


@st.composite
def legal_orders(draw: st.DrawFn) -> tuple[list[list[Action]], Flow, int]:
    """Any order in which the passes can be done at all: at each turn, any rank does any pass whose input is there."""
    num_ranks, num_micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    flow = draw(st.sampled_from([looped_flow(num_ranks), looped_flow(num_ranks, 2), folded_flow(num_ranks)]))
    random = draw(st.randoms(use_true_random=False))
    last = flow.num_stages - 1
    open_passes = [(Kind.FORWARD, i, 0) for i in range(num_micro_batches)]
    compute: list[list[Action]] = [[] for _ in range(num_ranks)]
    while open_passes:
        kind, micro_batch, stage = open_passes.pop(random.randrange(len(open_passes)))
        place = flow.places[stage]
        compute[place.rank].append(Action(kind, micro_batch, place.chunk))
        if kind is Kind.FORWARD:
            following = (Kind.BACKWARD, micro_batch, stage) if stage == last else (kind, micro_batch, stage + 1)
            open_passes.append(following)
        elif stage > 0:
            open_passes.append((kind, micro_batch, stage - 1))
    return compute, flow, num_micro_batches


@settings(deadline=None, max_examples=60)
@given(case=legal_orders())
def test_any_legal_order_gets_a_proven_plan(case: tuple[list[list[Action]], Flow, int]) -> None:
    compute, flow, num_micro_batches = case
    plan = with_communication(compute, num_micro_batches=num_micro_batches, flow=flow)
    report = verify(plan)
    crossings = sum(a.rank != b.rank for a, b in zip(flow.places, flow.places[1:], strict=False))
    assert report.num_messages == 2 * num_micro_batches * crossings
    for rank, actions in enumerate(compute):
        balance = [sum(1 if a.kind is Kind.FORWARD else -1 for a in actions[:n]) for n in range(len(actions) + 1)]
        assert report.peak_live[rank] == max(balance)
        kept = [a for a in plan.for_rank(rank).actions if a.kind in (Kind.FORWARD, Kind.BACKWARD)]
        assert kept == actions
    assert with_communication(compute, num_micro_batches=num_micro_batches, flow=flow) == plan


def test_an_order_that_cannot_run_says_who_waits_for_what() -> None:
    """Rank 0 wants the gradient of micro-batch 0 before it has sent the activation that rank 1 needs for it."""
    compute = one_f_one_b.plan(2, 2)
    compute[0] = [Action(Kind.BACKWARD, 0), Action(Kind.FORWARD, 0), Action(Kind.FORWARD, 1), Action(Kind.BACKWARD, 1)]
    with pytest.raises(ScheduleError, match="rank 0, position 0, B0: waits for B0 of rank 1, which never comes before"):
        with_communication(compute, num_micro_batches=2)


def test_the_cause_is_named_rather_than_who_waits_for_it() -> None:
    compute = one_f_one_b.plan(4, 2)
    compute[3].remove(Action(Kind.BACKWARD, 1))
    with pytest.raises(ScheduleError) as error:
        with_communication(compute, num_micro_batches=2)
    assert (error.value.rank, error.value.action) == (2, Action(Kind.BACKWARD, 1))
    assert "waits for B1 of rank 3, which never comes in its plan" in error.value.reason


def test_schedules_list_compute_alone() -> None:
    with pytest.raises(ScheduleError, match=r"rank 1, position 1, SF0: a schedule lists compute \(F, B, I, W\) only"):
        with_communication(
            [[Action(Kind.FORWARD, 0)], [Action(Kind.FORWARD, 0), Action(Kind.SEND_FORWARD, 0)]], num_micro_batches=1
        )


def test_a_chunk_outside_the_flow_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0 has no chunk 1 \(it has 1\)"):
        with_communication([[Action(Kind.FORWARD, 0, 1)]], num_micro_batches=1, flow=looped_flow(1))


def test_a_schedule_that_breaks_its_spec_is_refused() -> None:
    one_rank = ScheduleSpec("short", plan=lambda num_stages, num_micro_batches: one_f_one_b.plan(1, num_micro_batches))
    with pytest.raises(ScheduleError, match="the schedule plans 1 ranks, but there are 2"):
        compile_schedule(one_rank, num_ranks=2, num_micro_batches=1)
    two_chunks = ScheduleSpec(
        "promises two", plan=lambda p, m, num_chunks: one_f_one_b.plan(p, m), min_chunks=2, max_chunks=2
    )
    with pytest.raises(ScheduleError, match="waits for B0.1 of rank 0"):
        compile_schedule(two_chunks, num_ranks=2, num_micro_batches=1)


def test_forward_plan_goes_chunk_by_chunk() -> None:
    assert [text(actions) for actions in forward_plan(1, 2, num_chunks=2)] == ["F0 F1 F0.1 F1.1"]


def test_flows_visit_every_place_once() -> None:
    flow = looped_flow(2, 2)
    assert flow.places == (Place(0, 0), Place(1, 0), Place(0, 1), Place(1, 1))
    assert (flow.num_ranks, flow.num_chunks, flow.num_stages) == (2, 2, 4)
    assert flow.downstream(1, 0) == Place(0, 1)
    assert flow.upstream(0, 1) == Place(1, 0)
    assert flow.upstream(0, 0) is None
    assert flow.downstream(1, 1) is None
    for places in ((), (Place(0, 0), Place(0, 0)), (Place(0, 0), Place(1, 1)), (Place(1, 0),)):
        with pytest.raises(ValueError, match="every chunk of every rank once"):
            Flow(places)
    with pytest.raises(ValueError, match="got 0 and 1"):
        looped_flow(0)
