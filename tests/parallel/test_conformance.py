"""Every registered schedule and optimizer passes the suites; broken ones do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mcore_parallel.pipeline.schedules import one_f_one_b
from mcore_parallel.plugins import plugin_manager
from mcore_parallel.specs import OptimizerSpec, ScheduleSpec
from mcore_parallel.testing.conformance import Case, OptimizerConformance, ScheduleConformance

MANAGER = plugin_manager()
SCHEDULES = MANAGER.collect("mcore_pipeline_schedules")
OPTIMIZERS = MANAGER.collect("mcore_optimizers")


def checks(suite: type) -> list[str]:
    return [name for name in dir(suite) if name.startswith("test_")]


def run_suite(suite: type, spec: Any) -> dict[str, AssertionError]:
    """Run every check of ``suite`` on ``spec``; the failures by name."""
    failures = {}
    for name in checks(suite):
        try:
            getattr(type("Suite", (suite,), {"spec": spec})(), name)()
        except AssertionError as error:
            failures[name] = error
    return failures


@pytest.mark.parametrize("check", checks(ScheduleConformance))
@pytest.mark.parametrize("spec", SCHEDULES, ids=lambda spec: spec.name)
def test_registered_schedules_conform(spec: ScheduleSpec, check: str) -> None:
    getattr(type("Suite", (ScheduleConformance,), {"spec": spec})(), check)()


@pytest.mark.parametrize("check", checks(OptimizerConformance))
@pytest.mark.parametrize("spec", OPTIMIZERS, ids=lambda spec: spec.name)
def test_registered_optimizers_conform(spec: OptimizerSpec, check: str) -> None:
    getattr(type("Suite", (OptimizerConformance,), {"spec": spec})(), check)()


class Test1F1B(ScheduleConformance):
    """With the paper's bound on live activations."""

    spec = ScheduleSpec("1f1b", plan=one_f_one_b.plan)

    def max_live(self, case: Case, rank: int) -> int:
        return min(case.num_ranks - rank, case.num_micro_batches)


def forgets_the_last_backward(num_stages: int, num_micro_batches: int) -> Any:
    return [actions[:-1] for actions in one_f_one_b.plan(num_stages, num_micro_batches)]


def test_an_incomplete_schedule_fails() -> None:
    failures = run_suite(ScheduleConformance, ScheduleSpec("short", plan=forgets_the_last_backward))
    assert set(failures) == {
        "test_it_simulates",
        "test_legal_cases_are_proven",
        "test_traffic_is_one_message_each_way_per_boundary",
    }
    assert "short, 1 ranks, 1 micro-batches: rank 0, position 1, B0: is never done" in str(
        failures["test_legal_cases_are_proven"]
    )


class Scaled(torch.optim.SGD):
    """Broken in a way of choice."""

    def __init__(self, groups: Any, fault: str) -> None:
        super().__init__(groups, lr=0.01)
        self.fault = fault
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                scale = group["lr"]
                if self.fault == "norm":
                    scale /= 1 + float(parameter.grad.norm())
                if self.fault == "hidden count":
                    scale /= self.count
                if self.fault == "fixed rate":
                    scale = 0.01
                if self.fault == "late state":
                    self.state[parameter]["buffer"] = torch.zeros_like(parameter)
                parameter.mul_(1 - scale * group["weight_decay"]).sub_(scale * parameter.grad)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("", set()),
        ("norm", {"test_cutting_the_shard_changes_no_bit"}),
        ("hidden count", {"test_state_restores_bit_for_bit"}),
        ("fixed rate", {"test_zero_learning_rate_moves_nothing", "test_groups_keep_their_own_rates"}),
        ("late state", {"test_state_is_what_the_spec_declares"}),
    ],
)
def test_broken_optimizers_fail(fault: str, expected: set[str]) -> None:
    spec = OptimizerSpec("broken", build=lambda groups, config: Scaled(groups, fault))
    assert set(run_suite(OptimizerConformance, spec)) == expected


def test_a_wrong_slot_is_named() -> None:
    sgd = next(spec for spec in OPTIMIZERS if spec.name == "sgd")
    failures = run_suite(OptimizerConformance, replace(sgd, slots=("momentum",)))
    assert "state per element is ['momentum_buffer'], declared is ['momentum']" in str(
        failures["test_state_is_what_the_spec_declares"]
    )
