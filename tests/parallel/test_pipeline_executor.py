"""The executor over real gloo ranks: gradients equal one process's, whatever the number of stages or micro-batches."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace

import pytest
import torch
from linear_stage import NUM_LAYERS, ROWS, WIDTH, LinearStage, check_gradients, pp_layout, reference
from torch import Tensor

from mcore_parallel.axis import single_layout
from mcore_parallel.pipeline import executor
from mcore_parallel.pipeline.actions import Action, Flow, Kind, Place, Step, looped_flow
from mcore_parallel.pipeline.communication import with_communication
from mcore_parallel.pipeline.compile import compile_forward, compile_schedule
from mcore_parallel.pipeline.schedules import one_f_one_b
from mcore_parallel.pipeline.stage import place_layers
from mcore_parallel.pipeline.verify import verify
from mcore_parallel.specs import ScheduleSpec
from mcore_parallel.testing import run_ranks

SPEC = ScheduleSpec("1f1b", plan=one_f_one_b.plan)


def train_1f1b(rank: int, world_size: int, counts: tuple[int, ...]) -> None:
    axis = pp_layout(rank, world_size).axis("pp")
    for num_micro_batches in counts:
        plan = compile_schedule(SPEC, num_ranks=world_size, num_micro_batches=num_micro_batches)
        stage = LinearStage(plan.flow, rank)
        result = executor.run(plan.for_rank(rank), stage=stage, axis=axis)
        check_gradients(stage, num_micro_batches, result.losses)
        assert result.peak_live == verify(plan).peak_live[rank]


@pytest.mark.parametrize("world_size", [2, 4])
def test_1f1b_equals_one_process(world_size: int) -> None:
    run_ranks(train_1f1b, world_size, (1, 2, 3, 5, 8))


def test_one_stage_without_process_group() -> None:
    axis = single_layout().axis("pp")
    plan = compile_schedule(SPEC, num_ranks=1, num_micro_batches=3)
    stage = LinearStage(plan.flow, 0)
    result = executor.run(plan.for_rank(0), stage=stage, axis=axis)
    check_gradients(stage, 3, result.losses)


def interleaved_by_hand(num_ranks: int, num_micro_batches: int, num_chunks: int) -> list[list[Action]]:
    """All forwards chunk by chunk, then all backwards, last chunk first: legal where the flow visits chunks in turn."""
    forwards = [Action(Kind.FORWARD, m, c) for c in range(num_chunks) for m in range(num_micro_batches)]
    backwards = [Action(Kind.BACKWARD, m, c) for c in reversed(range(num_chunks)) for m in range(num_micro_batches)]
    return [forwards + backwards for _ in range(num_ranks)]


def v_flow(num_ranks: int) -> Flow:
    there = [Place(rank, 0) for rank in range(num_ranks)]
    return Flow((*there, *(Place(rank, 1) for rank in reversed(range(num_ranks)))))


def train_chunks(rank: int, world_size: int) -> None:
    axis = pp_layout(rank, world_size).axis("pp")
    for flow in (looped_flow(world_size, 2), looped_flow(world_size, 4 // world_size * 2), v_flow(world_size)):
        for num_micro_batches in (1, 3):
            compute = interleaved_by_hand(world_size, num_micro_batches, flow.num_chunks)
            plan = with_communication(compute, num_micro_batches=num_micro_batches, flow=flow)
            report = verify(plan)
            stage = LinearStage(flow, rank)
            result = executor.run(plan.for_rank(rank), stage=stage, axis=axis)
            check_gradients(stage, num_micro_batches, result.losses)
            assert result.peak_live == report.peak_live[rank] == num_micro_batches * flow.num_chunks


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_chunks_looped_and_folded(world_size: int) -> None:
    """What later schedules need of the executor: several chunks a rank, and neighbours on one rank."""
    run_ranks(train_chunks, world_size)


def evaluate(rank: int, world_size: int) -> None:
    axis = pp_layout(rank, world_size).axis("pp")
    for num_micro_batches in (1, 2, 5, 9):
        plan = compile_forward(SPEC, num_ranks=world_size, num_micro_batches=num_micro_batches)
        stage = LinearStage(plan.flow, rank)
        result = executor.run_forward(plan.for_rank(rank), stage=stage, axis=axis)
        assert all(layer.weight.grad is None for layer in stage.layers)
        assert stage.calls == [f"F{i}" for i in range(num_micro_batches)]
        expected = reference(num_micro_batches)[1] if axis.is_last else []
        assert [float(loss) for loss in result.losses] == pytest.approx(expected, rel=1e-13)


def test_evaluation_runs_forward_only() -> None:
    run_ranks(evaluate, 4)


def log_collectives(rank: int, world_size: int) -> list[str]:
    axis = pp_layout(rank, world_size).axis("pp")
    plan = compile_schedule(SPEC, num_ranks=world_size, num_micro_batches=3).for_rank(rank)
    gather, reduce = (Step((Action(kind, 0),)) for kind in (Kind.GATHER, Kind.REDUCE))
    stage = LinearStage(plan.flow, rank)
    first = stage.layers[place_layers(NUM_LAYERS, plan.flow)[rank][0]]
    first.weight.register_post_accumulate_grad_hook(lambda _: stage.calls.append("B"))
    executor.run(
        replace(plan, steps=(gather, *plan.steps, reduce)),
        stage=stage,
        axis=axis,
        reduce=lambda chunk: stage.calls.append(f"R{chunk}"),
        gather=lambda chunk: stage.calls.append(f"G{chunk}"),
    )
    return stage.calls


def test_collective_actions_call_back_where_the_plan_has_them() -> None:
    for calls in run_ranks(log_collectives, 2):
        assert calls.count("B") == 3
        assert (calls[0], calls[1], calls[-2], calls[-1]) == ("G0", "F0", "B", "R0")
        assert len(calls) == 8


def count_traffic(rank: int, world_size: int) -> dict[tuple[str, str], int]:
    layout = pp_layout(rank, world_size)
    layout.recorder.enabled = True
    plan = compile_schedule(SPEC, num_ranks=world_size, num_micro_batches=5)
    executor.run(plan.for_rank(rank), stage=LinearStage(plan.flow, rank), axis=layout.axis("pp"))
    return layout.recorder.totals()


def test_traffic_equals_closed_form() -> None:
    """One activation down and one gradient up per micro-batch and boundary."""
    boundary = 5 * ROWS * WIDTH * 8
    totals = run_ranks(count_traffic, 4)
    for rank, total in enumerate(totals):
        boundaries = 1 if rank in (0, 3) else 2
        assert total == {("pp", "send"): boundaries * boundary, ("pp", "recv"): boundaries * boundary}


@dataclass
class SavingNothing(LinearStage):
    """Its last operation is an addition, so autograd keeps no output; remembers what it returned, weakly."""

    returned: list[weakref.ref[Tensor]] = field(default_factory=list)
    alive: list[int] = field(default_factory=list)

    def forward(self, micro_batch: int, chunk: int, received: Tensor | None) -> Tensor:
        self.alive.append(sum(ref() is not None for ref in self.returned))
        out = super().forward(micro_batch, chunk, received)
        if out.dim():
            out = out + 1.0
            self.returned.append(weakref.ref(out))
        return out


def test_outputs_are_not_held_for_backward() -> None:
    """The graph is kept by its edge: an output that autograd did not save is gone at the next forward."""
    flow = looped_flow(1, 2)
    plan = with_communication(interleaved_by_hand(1, 4, 2), num_micro_batches=4, flow=flow)
    verify(plan)
    stage = SavingNothing(flow, 0)
    executor.run(plan.for_rank(0), stage=stage, axis=single_layout().axis("pp"))
    assert len(stage.returned) == 4
    assert set(stage.alive) == {0}


@dataclass
class WrongShape(LinearStage):
    """Returns a row too few."""

    def forward(self, micro_batch: int, chunk: int, received: Tensor | None) -> Tensor:
        return super().forward(micro_batch, chunk, received)[:-1]


def test_a_stage_that_breaks_its_word_is_refused() -> None:
    flow = looped_flow(1, 2)
    plan = with_communication(interleaved_by_hand(1, 1, 2), num_micro_batches=1, flow=flow)
    with pytest.raises(ValueError, match=r"F0: the stage returned \(2, 6\) of torch.float64 but announced \(3, 6\)"):
        executor.run(plan.for_rank(0), stage=WrongShape(flow, 0), axis=single_layout().axis("pp"))


@dataclass
class VectorLoss(LinearStage):
    """Forgets to sum."""

    def forward(self, micro_batch: int, chunk: int, received: Tensor | None) -> Tensor:
        return super().forward(micro_batch, chunk, received).expand(2)


def test_a_loss_that_is_not_summed_is_refused() -> None:
    plan = compile_schedule(SPEC, num_ranks=1, num_micro_batches=1)
    with pytest.raises(ValueError, match=r"0-d summed loss, got shape \(2,\)"):
        executor.run(plan.for_rank(0), stage=VectorLoss(plan.flow, 0), axis=single_layout().axis("pp"))


@dataclass
class Deaf(LinearStage):
    """Its second chunk ignores what it receives."""

    def forward(self, micro_batch: int, chunk: int, received: Tensor | None) -> Tensor:
        return super().forward(micro_batch, chunk, None if received is None else torch.ones_like(received))


def test_an_output_that_ignores_its_input_is_refused() -> None:
    flow = looped_flow(1, 2)
    plan = with_communication(interleaved_by_hand(1, 1, 2), num_micro_batches=1, flow=flow)
    with pytest.raises(ValueError, match="B0.1: the stage's output does not depend on the activation"):
        executor.run(plan.for_rank(0), stage=Deaf(flow, 0), axis=single_layout().axis("pp"))


def test_plans_are_run_for_what_they_are() -> None:
    axis = single_layout().axis("pp")
    train = compile_schedule(SPEC, num_ranks=1, num_micro_batches=1)
    forward = compile_forward(SPEC, num_ranks=1, num_micro_batches=1)
    other = compile_schedule(SPEC, num_ranks=2, num_micro_batches=1)
    stage = LinearStage(train.flow, 0)
    with pytest.raises(ValueError, match="forward only"):
        executor.run(forward.for_rank(0), stage=stage, axis=axis)
    with pytest.raises(ValueError, match="trains"):
        executor.run_forward(train.for_rank(0), stage=stage, axis=axis)
    with pytest.raises(ValueError, match="plan is for rank 1 of 2, but axis 'pp' is rank 0 of 1"):
        executor.run(other.for_rank(1), stage=stage, axis=axis)
