"""Every shipped schedule: by hand, its memory, and which sizes it takes against brute force."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from mcore_parallel.pipeline.actions import Action, Kind, Place, ScheduleError, looped_flow, v_flow
from mcore_parallel.pipeline.communication import with_communication
from mcore_parallel.pipeline.compile import compile_schedule
from mcore_parallel.pipeline.encoding import EncodedSteps, encode
from mcore_parallel.pipeline.schedules import interleaved
from mcore_parallel.pipeline.verify import Report, verify
from mcore_parallel.plugins import PluginError, Registry, plugin_manager
from mcore_parallel.specs import ScheduleSpec

SCHEDULES = Registry("schedule", plugin_manager(disabled=[]).collect("mcore_pipeline_schedules"))


def lines(name: str, *sizes: int, **options: Any) -> list[str]:
    return [" ".join(map(str, actions)) for actions in SCHEDULES[name].with_options(**options).actions(*sizes)]


def report(name: str, p: int, m: int, v: int | None = None) -> Report:
    return verify(compile_schedule(SCHEDULES[name], num_ranks=p, num_micro_batches=m, num_chunks=v))


def test_by_hand() -> None:
    assert lines("gpipe", 2, 3) == ["F0 F1 F2 B0 B1 B2"] * 2
    assert lines("looped-bfs", 2, 2, 2) == ["F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1"] * 2
    assert lines("zb-h1", 3, 4) == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]
    assert lines("zb-h2", 2, 4) == ["F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3", "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"]
    assert lines("zbv", 2, 3) == [
        "F0 F1 F2 F0.1 I0.1 W0.1 F1.1 I1.1 W1.1 I0 W0 F2.1 I2.1 W2.1 I1 W1 I2 W2",
        "F0 F0.1 F1 F1.1 I0.1 W0.1 F2 I0 W0 F2.1 I1.1 W1.1 I1 I2.1 I2 W1 W2.1 W2",
    ]
    assert lines("dualpipev", 1, 2) == ["F0 F0.1 F1 B0.1 F1.1 B0 B1.1 I1 W1"]


def test_interleaved_by_hand() -> None:
    assert lines("interleaved", 2, 2, 2) == [
        "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1",
    ]
    assert lines("interleaved", 4, 5, 1) == lines("1f1b", 4, 5)


def test_group_size_sets_the_order_of_chunks() -> None:
    three = [text.split() for text in lines("interleaved", 2, 6, 2, group_size=3)]
    assert [order[:5] for order in three] == [["F0", "F1", "F2", "F0.1", "F1.1"], ["F0", "F1", "F2", "F0.1", "B0.1"]]
    assert lines("interleaved", 2, 6, 2, group_size=2) == lines("interleaved", 2, 6, 2)
    assert lines("interleaved", 2, 6, 2, group_size=6) != lines("interleaved", 2, 6, 2)


@pytest.mark.parametrize(
    ("p", "v", "m", "group"), [*itertools.product((1, 2, 3, 4), (2, 3), (1, 2, 3, 5, 8), (2, 3, 4, 7))]
)
def test_interleaved_takes_what_runs(p: int, v: int, m: int, group: int) -> None:
    """Groups of at least p always run, also when m is below p or no multiple of the group."""
    spec = SCHEDULES["interleaved"].with_options(group_size=group)
    if group >= p:
        compile_schedule(spec, num_ranks=p, num_micro_batches=m, num_chunks=v)
    else:
        reason = spec.why_illegal(p, m, v)
        assert reason is not None
        assert f"groups of {group} for {p} ranks; nearest group size that works: {p}" in reason


def test_smaller_groups_hang_indeed() -> None:
    """The rule is not too strict: planned all the same, many of them wait for ever."""
    stuck = 0
    for p, v, m, group in itertools.product((3, 4), (2, 3), (4, 6, 8), (1, 2)):
        try:
            with_communication(
                interleaved.plan(p, m, num_chunks=v, group_size=group), num_micro_batches=m, flow=looped_flow(p, v)
            )
        except ScheduleError:
            stuck += 1
    assert stuck > 12


@pytest.mark.parametrize(("p", "m"), [*itertools.product((1, 2, 3, 4, 5), range(1, 13))])
def test_dualpipev_takes_what_fills_the_v(p: int, m: int) -> None:
    reason = SCHEDULES["dualpipev"].why_illegal(p, m, 2)
    assert (reason is None) == (m >= 2 * p)
    if reason is None:
        report("dualpipev", p, m)
    else:
        assert f"got {m} micro-batches for {p} ranks; nearest that work: {2 * p} micro-batches" in reason
        assert ("at most" in reason) == (m >= 2)


@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
@pytest.mark.parametrize("chunks", [1, 3, 4])
def test_a_v_takes_two_chunks_alone(name: str, chunks: int) -> None:
    text = f"{name} needs exactly 2 model chunks per rank, got {chunks}"
    with pytest.raises(ValueError, match=text):
        compile_schedule(SCHEDULES[name], num_ranks=2, num_micro_batches=8, num_chunks=chunks)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zb-h2"])
def test_one_chunk_schedules_take_no_two(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} needs exactly 1 model chunk per rank, got 2"):
        compile_schedule(SCHEDULES[name], num_ranks=2, num_micro_batches=8, num_chunks=2)


@pytest.mark.parametrize(("p", "m"), [*itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 7, 16, 17))])
def test_memory(p: int, m: int) -> None:
    """No more than the formulas of the docstrings, and just that with enough micro-batches."""
    bounds = {
        "gpipe": [m] * p,
        "1f1b": [p - r for r in range(p)],
        "zb-h1": [p] * p,
        "zb-h2": [2 * p - 1] * p,
        "zbv": [2 * p] * p,
        "interleaved": [p + 2 * (p - r) - 1 for r in range(p)],
        "looped-bfs": [2 * m] * p,
        "dualpipev": [2 * p + 1] * p,
    }
    for name, bound in bounds.items():
        chunks = 2 if SCHEDULES[name].max_chunks != 1 else 1
        if SCHEDULES[name].why_illegal(p, m, chunks) is not None:
            continue
        held = report(name, p, m, chunks).peak_held
        assert all(found <= most for found, most in zip(held, bound, strict=True)), (name, held)
        if m > 2 * p:
            assert list(held) == bound, (name, held)


def test_a_large_pipeline_is_proven_by_arrays() -> None:
    """64 ranks, 512 micro-batches: no action is looked at one by one, so no step of any rank is decoded."""
    plan = compile_schedule(SCHEDULES["zb-h1"], num_ranks=64, num_micro_batches=512)
    assert verify(plan).peak_held == (64,) * 64
    assert isinstance(plan.steps, EncodedSteps)
    assert not plan.steps._decoded


def test_encoded_steps_are_a_sequence_of_steps() -> None:
    plan = compile_schedule(SCHEDULES["zbv"], num_ranks=3, num_micro_batches=4)
    steps = tuple(plan.steps)
    assert len(plan.steps) == 3
    assert plan.steps == steps
    assert (plan.steps[-1], plan.steps[1:]) == (steps[2], steps[1:])
    assert repr(plan.steps) == repr(steps)
    assert hash(plan.steps) == hash(steps)
    assert [encode(steps).decode(rank) for rank in range(3)] == list(steps)
    with pytest.raises(IndexError):
        plan.steps[3]


def test_v_flow() -> None:
    flow = v_flow(3)
    assert flow.places == (Place(0, 0), Place(1, 0), Place(2, 0), Place(2, 1), Place(1, 1), Place(0, 1))
    assert flow.downstream(2, 0) == Place(2, 1)
    with pytest.raises(ValueError, match="two chunks per rank, got 3 and 4"):
        v_flow(3, 4)


def test_texts_of_actions() -> None:
    texts = [str(Action(kind, 3, chunk)) for kind in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD) for chunk in (0, 2)]
    assert texts == ["I3", "I3.2", "W3", "W3.2"]
    assert [str(Action(kind, 0, chunk)) for kind in (Kind.REDUCE, Kind.GATHER) for chunk in (0, 1)] == [
        "R",
        "R.1",
        "G",
        "G.1",
    ]


def test_aliases() -> None:
    for alias, name in {
        "ZBVZeroBubble": "zbv",
        "1F1B": "1f1b",
        "Interleaved1F1B": "interleaved",
        "ZB-H2": "zb-h2",
    }.items():
        assert alias in SCHEDULES
        assert SCHEDULES[alias].name == name
    assert "1F1B" not in SCHEDULES.names()
    assert "1F1B" in SCHEDULES.aliases()
    with pytest.raises(PluginError, match="register the schedule '1F1B'"):
        Registry("schedule", [ScheduleSpec("a", plan=list, aliases=("1F1B",)), ScheduleSpec("1F1B", plan=list)])


def test_options() -> None:
    spec = SCHEDULES["interleaved"]
    assert spec.with_options(group_size=None) is spec
    assert spec.with_options(group_size=4).with_options(group_size=2) == spec.with_options(group_size=2)
    with pytest.raises(ValueError, match=r"1f1b takes no group_size \(it takes no options\)"):
        SCHEDULES["1f1b"].with_options(group_size=4)
    with pytest.raises(ValueError, match=r"interleaved takes no table \(it takes group_size\)"):
        compile_schedule(spec, num_ranks=2, num_micro_batches=2, num_chunks=2, table="x.csv")
