"""The simulator against closed forms, published bubbles, and a naive clock."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_parallel.pipeline.actions import COMPUTE_KINDS, Action, Flow, Kind, Place, Plan
from mcore_parallel.pipeline.collective_actions import rank_with_collectives, with_collectives
from mcore_parallel.pipeline.compile import compile_forward, compile_schedule
from mcore_parallel.pipeline.simulate import Costs, Timeline, simulate
from mcore_parallel.pipeline.verify import verify
from mcore_parallel.plugins import Registry, plugin_manager

SCHEDULES = Registry("schedule", plugin_manager().collect("mcore_pipeline_schedules"))
PUBLISHED = Path(__file__).parents[1] / "data" / "published"
DOCS = Path(__file__).parents[2] / "docs" / "pipeline.md"
SIZES = [(2, 4), (3, 7), (4, 8), (4, 13), (8, 16)]


def compiled(name: str, num_ranks: int, num_micro_batches: int, num_chunks: int | None = None) -> Plan:
    return compile_schedule(
        SCHEDULES[name], num_ranks=num_ranks, num_micro_batches=num_micro_batches, num_chunks=num_chunks
    )


def timed(name: str, p: int, m: int, v: int | None = None, **costs: Any) -> Timeline:
    return simulate(compiled(name, p, m, v), Costs(**costs))


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("p", "m"), [*SIZES, (4, 1), (8, 3)])
def test_unsplit_bubble(name: str, p: int, m: int) -> None:
    timeline = timed(name, p, m, forward=1.0, input_grad=0.75, weight_grad=1.25)
    assert timeline.bubble_makespan == pytest.approx((p - 1) / (m + p - 1), rel=1e-12)
    assert timeline.makespan == pytest.approx((m + p - 1) * 3, rel=1e-12)


@pytest.mark.parametrize("name", ["interleaved", "looped-bfs"])
@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 4), (3, 4, 9), (8, 2, 16), (4, 1, 6)])
def test_interleaved_bubble(name: str, p: int, v: int, m: int) -> None:
    timeline = timed(name, p, m, v, forward=1.0, input_grad=1.0, weight_grad=1.0)
    assert timeline.bubble_makespan == pytest.approx((p - 1) / (v * m + p - 1), rel=1e-12)


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (1.25, 1.0, 0.75), (1.0, 1.25, 0.75), (18.5, 18.125, 9.25)])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zero_bubble_spans(p: int, m: int, f: float, i: float, w: float) -> None:
    times = {"forward": f, "input_grad": i, "weight_grad": w}
    assert timed("zb-h1", p, m, **times).idle_span == pytest.approx((p - 1) * (f + i - w))
    assert timed("zb-h2", p, m, **times).idle_span == pytest.approx((p - 1) * (f + i - 2 * w))
    if f <= i:
        assert timed("zbv", p, m, **times).idle_span == pytest.approx(2 * (p - 1) * (i - w))


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (1.25, 1.0, 0.75), (1.5, 1.0, 0.5)])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_dualpipev_as_two_actions(p: int, m: int, f: float, i: float, w: float) -> None:
    timeline = timed("dualpipev", p, m, forward=f, input_grad=i, weight_grad=w)
    assert timeline.idle_makespan == pytest.approx((p - 1) * (f + i - w))


@pytest.mark.parametrize(("f", "i", "w", "pair"), [(1, 1, 1, 3), (1, 1, 1, 2.5), (1.0, 1.25, 0.75, 2.5)])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_dualpipev_as_one_overlapped_action(p: int, m: int, f: float, i: float, w: float, pair: float) -> None:
    timeline = timed("dualpipev", p, m, forward=f, input_grad=i, weight_grad=w, overlapped=pair)
    assert max(timeline.idle) == pytest.approx((p - 1) * (pair + (i + w) - 3 * w))


def test_order_of_schedules_with_equal_passes() -> None:
    """The same work per rank under each: a chunk of two takes half the time."""
    span = {
        name: timed(name, 4, 8, chunks, **dict.fromkeys(("forward", "input_grad", "weight_grad"), 1 / chunks)).makespan
        for name, chunks in (("zbv", 2), ("zb-h1", 1), ("interleaved", 2), ("1f1b", 1), ("gpipe", 1))
    }
    assert span["zbv"] < span["zb-h1"] < span["interleaved"] < span["1f1b"] == span["gpipe"]
    assert max(timed("1f1b", 4, 8).peak_live) < max(timed("gpipe", 4, 8).peak_live)


def published(name: str = "zero_bubble.csv") -> list[dict[str, str]]:
    with (PUBLISHED / name).open() as file:
        return list(csv.DictReader(file))


def row_id(row: dict[str, str]) -> str:
    return f"{row['schedule']}-{row['model']}-{row['micro_batches']}"


def published_case(row: dict[str, str]) -> float:
    """Simulated bubble in percent."""
    names = ("forward_ms", "input_grad_ms", "weight_grad_ms", "latency_ms")
    forward, input_grad, weight_grad, latency = (float(row[name]) for name in names)
    costs = Costs(forward, input_grad, weight_grad, latency=latency)
    return 100 * simulate(compiled(row["schedule"], int(row["ranks"]), int(row["micro_batches"])), costs).bubble_span


@pytest.mark.parametrize("row", published(), ids=row_id)
def test_published_bubble_rates(row: dict[str, str]) -> None:
    """Zero Bubble (2401.10241): the rates of Table 5 from the pass times of Table 9, to the digits printed."""
    assert published_case(row) == pytest.approx(float(row["bubble_percent"]), abs=0.02)


@pytest.mark.parametrize("row", published("zero_bubble_scaled.csv"), ids=row_id)
def test_published_bubble_rates_of_other_sizes(row: dict[str, str]) -> None:
    """Table 8's rates, from pass times scaled to its sizes."""
    assert published_case(row) == pytest.approx(float(row["bubble_percent"]), abs=1.5)


def test_the_published_table_in_the_docs_is_current() -> None:
    lines = [line.split("|")[1:-1] for line in DOCS.read_text().splitlines() if line.count("|") == 8]
    cells = [[cell.strip() for cell in line] for line in lines]
    shown = [line for line in cells if line[0] in ("1F1B", "ZB-H1", "ZB-H2")]
    wanted = published() + published("zero_bubble_scaled.csv")
    assert [line[:4] for line in shown] == [
        [row[name] for name in ("schedule", "model", "ranks", "micro_batches")] for row in wanted
    ]
    for line, row in [*zip(shown, wanted, strict=True)][::7]:
        assert line[4:6] == [f"{float(row['bubble_percent']):.2f}", f"{published_case(row):.2f}"]


def naive(plan: Plan, costs: Costs) -> list[list[tuple[Action, float, float]]]:
    """Ranks looked at in turn until nothing moves; without bandwidth."""
    flow: Flow = plan.flow
    stages = flow.num_stages
    f, i, w = (costs.per_stage(name, stages) for name in ("forward", "input_grad", "weight_grad"))
    ends: dict[tuple[bool, int, int], float] = {}
    out: list[list[tuple[Action, float, float]]] = [[] for _ in plan.steps]
    orders = [[a for a in plan.for_rank(r).actions if a.kind in COMPUTE_KINDS] for r in range(flow.num_ranks)]
    while any(len(done) < len(order) for done, order in zip(out, orders, strict=True)):
        for rank, order in enumerate(orders):
            if len(out[rank]) == len(order):
                continue
            action = order[len(out[rank])]
            forward, stage = action.kind is Kind.FORWARD, flow.stages[Place(rank, action.chunk)]
            source = stage + (-1 if forward else 1)
            ready = out[rank][-1][2] if out[rank] else 0.0
            if 0 <= source < stages and action.kind is not Kind.WEIGHT_GRAD:
                if (forward, action.micro_batch, source) not in ends:
                    continue
                away = costs.latency if flow.places[source].rank != rank else 0.0
                ready = max(ready, ends[forward, action.micro_batch, source] + away)
            lengths = {Kind.FORWARD: f, Kind.INPUT_GRAD: i, Kind.WEIGHT_GRAD: w}
            length = lengths[action.kind][stage] if action.kind in lengths else i[stage] + w[stage]
            out[rank].append((action, ready, ready + length))
            if action.kind is not Kind.WEIGHT_GRAD:
                ends[forward, action.micro_batch, stage] = ready + length
    return out


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_it_agrees_with_a_naive_clock(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zbv"]))
    chunks = 2 if SCHEDULES[name].max_chunks != 1 else 1
    p, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    per_stage = st.lists(st.integers(0, 9).map(float), min_size=p * chunks, max_size=p * chunks)
    costs = Costs(
        data.draw(per_stage), data.draw(per_stage), data.draw(per_stage), latency=data.draw(st.integers(0, 3))
    )
    plan = compiled(name, p, m, chunks)
    timeline = simulate(plan, costs)
    assert [[tuple(span) for span in spans] for spans in timeline.spans] == naive(plan, costs)
    report = verify(plan)
    assert (timeline.peak_live, timeline.peak_deferred, timeline.peak_held) == (
        report.peak_live,
        report.peak_deferred,
        report.peak_held,
    )


def test_a_link_carries_one_message_at_a_time() -> None:
    """Two micro-batches made in one unit each, over a link that takes three per message, with latency one."""
    plan = compiled("gpipe", 2, 2)
    timeline = simulate(plan, Costs(message_bytes=6.0, bandwidth=2.0, latency=1.0))
    starts = [span.start for span in timeline.spans[1]]
    assert starts[:2] == [1 + 3 + 1, 1 + 3 + 3 + 1]
    assert (timeline.num_messages, timeline.message_bytes) == (4, 24.0)


def test_bytes_held() -> None:
    """ZB-H1: rank 0 holds three activations, rank 1 two weight gradients beside one, rank 2 three weight gradients."""
    plan = compiled("zb-h1", 3, 6)
    timeline = simulate(plan, Costs(activation_bytes=[10.0, 20.0, 30.0], deferred_bytes=[4.0, 40.0, 50.0]))
    assert timeline.peak_held == (3, 3, 3)
    assert timeline.peak_bytes == (30.0, 20.0 + 2 * 40.0, 3 * 50.0)


def test_collectives_hold_up_or_run_beside() -> None:
    plan = with_collectives(compiled("1f1b", 2, 2))
    bare = simulate(compiled("1f1b", 2, 2))
    timeline = simulate(plan, Costs(gather=2.0, reduce=5.0))
    kinds = [[span.action.kind for span in spans] for spans in timeline.spans]
    assert [found[0] for found in kinds] == [Kind.GATHER, Kind.GATHER]
    assert [found[-1] for found in kinds] == [Kind.REDUCE, Kind.REDUCE]
    # Rank 1 gathers while rank 0's first forward is on its way: one gather is seen, one hides in the bubble.
    assert timeline.spans[1][1].start == 2 + 1
    assert timeline.end == timeline.spans[0][-1].end == timeline.spans[0][-2].end + 5
    assert timeline.work == bare.work


def test_evaluation_holds_one_activation() -> None:
    plan = compile_forward(SCHEDULES["zbv"], num_ranks=3, num_micro_batches=4)
    timeline = simulate(plan, Costs(activation_bytes=7.0))
    assert timeline.peak_live == (1, 1, 1)
    assert timeline.peak_bytes == (7.0, 7.0, 7.0)


@pytest.mark.parametrize(
    ("costs", "text"),
    [
        ({"forward": -1.0}, "forward must be finite and not negative, got -1.0"),
        ({"input_grad": [1.0, float("inf")]}, "input_grad must be finite"),
        ({"bandwidth": 0.0}, "bandwidth must be positive, got 0.0"),
        ({"overlapped": -2.0}, "overlapped must be finite"),
    ],
)
def test_impossible_costs_are_refused(costs: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Costs(**costs)


def test_costs_of_other_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="forward lists 3 stages, the plan has 2"):
        simulate(compiled("1f1b", 2, 1), Costs(forward=[1.0, 2.0, 3.0]))


def test_a_plan_that_cannot_run_is_refused() -> None:
    plan = compiled("1f1b", 2, 1)
    without = Plan((plan.steps[0], ()), plan.flow, 1)
    with pytest.raises(ValueError, match="rank 0 waits for ever for the input of B0"):
        simulate(without)


def test_one_ranks_collectives_are_those_of_the_whole_plan():
    plan = compiled("zbv", 4, 5)
    whole = with_collectives(plan)
    for rank in range(4):
        assert rank_with_collectives(plan, rank) == whole.for_rank(rank)
