"""Split backwards over real gloo ranks, for every registered schedule and for plans made by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from linear_stage import NUM_LAYERS, ROWS, WIDTH, QueuedStage, batch, check_gradients, pp_layout
from torch import Tensor

from mcore_parallel.axis import single_layout
from mcore_parallel.pipeline import executor
from mcore_parallel.pipeline.actions import Action, Flow, Kind, Plan, looped_flow
from mcore_parallel.pipeline.communication import with_communication
from mcore_parallel.pipeline.compile import compile_schedule
from mcore_parallel.pipeline.schedules import one_f_one_b
from mcore_parallel.pipeline.simulate import Costs, simulate
from mcore_parallel.pipeline.verify import verify
from mcore_parallel.plugins import Registry, plugin_manager
from mcore_parallel.specs import ScheduleSpec
from mcore_parallel.testing import run_ranks
from mcore_parallel.testing.ranks import RankFailure
from mcore_parallel.weight_grad import WeightGradQueue

LAYER_BYTES = 2 * ROWS * WIDTH * 8  # the input of a layer and the gradient of its output, float64


def schedules() -> Registry[ScheduleSpec]:
    return Registry("pipeline schedule", plugin_manager(disabled=()).collect("mcore_pipeline_schedules"))


def train(plan: Plan, rank: int, axis) -> None:
    """Run, and compare gradients, peaks and the queue's bytes with one process and with the simulator."""
    layers = NUM_LAYERS // plan.flow.num_stages
    expected = simulate(plan, Costs(deferred_bytes=float(layers * LAYER_BYTES)))
    stage = QueuedStage(plan.flow, rank)
    result = executor.run(plan.for_rank(rank), stage=stage, axis=axis, weight_grads=stage.queue)
    check_gradients(stage, plan.num_micro_batches, result.losses)
    assert result.peak_live == expected.peak_live[rank]
    assert result.peak_deferred == expected.peak_deferred[rank] == stage.queue.peak_keys
    assert result.peak_held == expected.peak_held[rank]
    assert stage.queue.peak_bytes == expected.peak_bytes[rank]
    assert stage.queue.num_bytes == stage.queue.num_keys == 0


def train_registered(rank: int, world_size: int, name: str, num_chunks: int) -> int:
    axis = pp_layout(rank, world_size).axis("pp")
    spec, count = schedules()[name], 0
    for num_micro_batches in (1, 2, 2 * world_size, 2 * world_size + 1):
        if spec.why_illegal(world_size, num_micro_batches, num_chunks) is None:
            train(
                compile_schedule(
                    spec, num_ranks=world_size, num_micro_batches=num_micro_batches, num_chunks=num_chunks
                ),
                rank,
                axis,
            )
            count += 1
    return count


def cases() -> list[tuple[str, int]]:
    specs = [spec for spec in schedules() if spec.name != "table"]
    return [(spec.name, chunks) for spec in specs for chunks in (1, 2) if spec.why_illegal(2, 4, chunks) is None]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("name", "num_chunks"), cases())
def test_every_schedule_gives_the_gradients_of_one_process(name: str, num_chunks: int, world_size: int) -> None:
    assert min(run_ranks(train_registered, world_size, name, num_chunks)) >= 2


def split_late(num_ranks: int, num_micro_batches: int, flow: Flow) -> Plan:
    """1F1B whose weight gradients all wait until the end, last micro-batch first."""
    compute = []
    for actions in one_f_one_b.plan(num_ranks, num_micro_batches):
        split = [a._replace(kind=Kind.INPUT_GRAD) if a.kind is Kind.BACKWARD else a for a in actions]
        late = [Action(Kind.WEIGHT_GRAD, i) for i in reversed(range(num_micro_batches))]
        compute.append([*split, *late])
    plan = with_communication(compute, num_micro_batches=num_micro_batches, flow=flow)
    verify(plan)
    return plan


def train_late(rank: int, world_size: int) -> None:
    train(split_late(world_size, 5, looped_flow(world_size)), rank, pp_layout(rank, world_size).axis("pp"))


def test_weight_gradients_may_all_come_last() -> None:
    run_ranks(train_late, 2)


def test_a_plan_that_splits_needs_a_queue() -> None:
    plan = split_late(1, 2, looped_flow(1)).for_rank(0)
    with pytest.raises(ValueError, match="splits backwards; give the queue"):
        executor.run(plan, stage=QueuedStage(plan.flow, 0), axis=single_layout().axis("pp"))


def test_the_queue_refuses_what_it_does_not_hold() -> None:
    queue = WeightGradQueue()
    with pytest.raises(ValueError, match="no weight gradients of micro-batch 1, chunk 0"):
        queue.drain(1, 0)
    with queue.deferring(1, 0), pytest.raises(ValueError, match="deferred already"), queue.deferring(2, 0):
        pass
    with pytest.raises(ValueError, match="micro-batch 1, chunk 0 are deferred already"), queue.deferring(1, 0):
        pass
    queue.drain(1, 0)
    assert queue.num_keys == 0
    assert not queue.is_deferring


@dataclass
class RaggedStage(QueuedStage):
    """Micro-batch ``i`` has ``i + 1`` rows, in bf16 where ``dtype`` says so."""

    def receive_shape(self, micro_batch: int) -> tuple[int, ...]:
        return (micro_batch + 1, WIDTH)

    def forward(self, micro_batch: int, chunk: int, received: Tensor | None) -> Tensor:
        x = batch(micro_batch).mean(0).expand(micro_batch + 1, WIDTH) if received is None else received.double()
        out = super().forward(micro_batch, chunk, x)
        return out.to(self.dtype) if out.dim() else out


def train_ragged(rank: int, world_size: int, dtype: torch.dtype) -> tuple[dict, list[float], list[Tensor]]:
    layout = pp_layout(rank, world_size)
    layout.recorder.enabled = True
    plan = compile_schedule(schedules()["zb-h1"], num_ranks=world_size, num_micro_batches=4)
    stage = RaggedStage(plan.flow, rank, dtype=dtype)
    result = executor.run(plan.for_rank(rank), stage=stage, axis=layout.axis("pp"), weight_grads=stage.queue)
    grads = [layer.weight.grad for layer in stage.layers if layer.weight.grad is not None]
    return layout.recorder.totals(), [float(loss) for loss in result.losses], grads


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_micro_batches_of_different_lengths_and_payloads(dtype: torch.dtype, bound: float) -> None:
    (_, losses, grads), *_ = run_ranks(train_ragged, 1, torch.float64)
    ranks = run_ranks(train_ragged, 4, dtype)
    rows = sum(range(1, 5))
    for rank, (totals, _, _) in enumerate(ranks):
        boundaries = 1 if rank in (0, 3) else 2
        size = boundaries * rows * WIDTH * dtype.itemsize
        assert totals == {("pp", "send"): size, ("pp", "recv"): size}
    assert ranks[-1][1] == pytest.approx(losses, rel=bound)
    got = [grad for _, _, mine in ranks for grad in mine]
    for mine, want in zip(got, grads, strict=True):
        assert (mine - want).abs().max() <= bound * want.abs().max()


@dataclass
class FailingStage(QueuedStage):
    """Raises in its third forward on rank 1."""

    def forward(self, micro_batch: int, chunk: int, received: Tensor | None) -> Tensor:
        if self.rank == 1 and micro_batch == 2:
            raise ArithmeticError("rank 1 has had enough")
        return super().forward(micro_batch, chunk, received)


def fail(rank: int, world_size: int) -> None:
    plan = compile_schedule(schedules()["zbv"], num_ranks=world_size, num_micro_batches=8)
    stage = FailingStage(plan.flow, rank)
    axis = pp_layout(rank, world_size).axis("pp")
    executor.run(plan.for_rank(rank), stage=stage, axis=axis, weight_grads=stage.queue)


def test_a_stage_that_raises_ends_the_run() -> None:
    """Its own error is the one that is shown, not a time limit that it passed."""
    with pytest.raises(RankFailure, match="rank 1 has had enough"):
        run_ranks(fail, 4, limit=30, fresh=True)
