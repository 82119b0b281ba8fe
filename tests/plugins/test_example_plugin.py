"""The template plugin: mcore's conformance suites on its specs, its registration, and a pipeline that runs it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from mcore_parallel.axis import build_layout
from mcore_parallel.mesh import build_mesh
from mcore_parallel.pipeline import executor
from mcore_parallel.pipeline.actions import Action, Kind
from mcore_parallel.pipeline.compile import compile_schedule
from mcore_parallel.plugins import Registry, plugin_manager
from mcore_parallel.testing import run_ranks
from mcore_parallel.testing.conformance import OptimizerConformance, ScheduleConformance
from mcore_plugin_example import gpipe
from mcore_plugin_example.plugin import mcore_optimizers, mcore_pipeline_schedules
from mcore_plugin_example.sign_sgd import SignSGD


class TestGPipe(ScheduleConformance):
    spec = mcore_pipeline_schedules()[0]


class TestSignSGD(OptimizerConformance):
    spec = mcore_optimizers()[0]


def test_it_is_found_under_its_names() -> None:
    manager = plugin_manager()
    record = next(record for record in manager.records if record.name == "example")
    assert (record.distribution, record.error) == ("mcore-plugin-example", None)
    assert manager.owners("mcore_pipeline_schedules")["gpipe-example"] == "example"
    assert manager.owners("mcore_optimizers")["sign_sgd"] == "example"


def test_it_can_be_left_out() -> None:
    manager = plugin_manager(disabled=["example"])
    schedules = Registry("pipeline schedule", manager.collect("mcore_pipeline_schedules"))
    assert "1f1b" in schedules
    with pytest.raises(ValueError, match="unknown pipeline schedule 'gpipe-example'"):
        schedules["gpipe-example"]


def test_gpipe_by_hand() -> None:
    forwards, backwards = [[Action(kind, i) for i in range(2)] for kind in (Kind.FORWARD, Kind.BACKWARD)]
    assert gpipe.plan(3, 2) == [forwards + backwards] * 3


def test_sign_sgd_by_hand() -> None:
    weights = torch.tensor([1.0, -2.0, 3.0, 4.0], requires_grad=True)
    weights.grad = torch.tensor([0.3, -7.0, 0.0, 1e-9])
    SignSGD([weights], {"lr": 0.1, "weight_decay": 0.5}).step()
    expected = torch.tensor([0.95 - 0.1, -1.9 + 0.1, 2.85, 3.8 - 0.1])
    torch.testing.assert_close(weights.detach(), expected)


@dataclass
class Scale:
    """One weight per rank: ``x -> weight * x``; the last rank's output is the loss."""

    rank: int
    is_last: bool
    dtype: torch.dtype = torch.float64
    device: torch.device = torch.device("cpu")
    weight: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.weight = torch.tensor(float(self.rank + 2), dtype=self.dtype, requires_grad=True)

    def receive_shape(self, micro_batch: int) -> tuple[int, ...]:
        return (1,)

    def forward(self, micro_batch: int, chunk: int, received: Tensor | None) -> Tensor:
        x = torch.tensor([float(micro_batch + 1)], dtype=self.dtype) if received is None else received
        out = self.weight * x
        return out.sum() if self.is_last else out


def train_step(rank: int, world_size: int) -> tuple[float, list[float], int]:
    axis = build_layout(build_mesh(world_size, pp=world_size), rank).axis("pp")
    plan = compile_schedule(mcore_pipeline_schedules()[0], num_ranks=world_size, num_micro_batches=3)
    stage = Scale(rank, axis.is_last)
    result = executor.run(plan.for_rank(rank), stage=stage, axis=axis)
    assert stage.weight.grad is not None
    return float(stage.weight.grad), [float(loss) for loss in result.losses], result.peak_live


def test_gpipe_trains_on_ranks() -> None:
    """loss = 2 * 3 * x over x = 1, 2, 3; every rank holds all three activations."""
    assert run_ranks(train_step, 2) == [(18.0, [], 3), (12.0, [6.0, 12.0, 18.0], 3)]
