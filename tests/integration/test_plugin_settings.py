"""What a plugin's spec asks for reaches it, or is refused."""

from __future__ import annotations

import tiny
import torch
from pydantic import Field

from mcore_cli.build import build_parts
from mcore_cli.resolve import resolve
from mcore_parallel.axis import single_layout
from mcore_parallel.config import Section
from mcore_parallel.optim.builtin import build_sgd
from mcore_parallel.pipeline.actions import Action, Kind
from mcore_parallel.plugins import hookimpl
from mcore_parallel.specs import OptimizerSpec, ScheduleSpec


def plan(num_ranks, num_micro_batches, *, num_chunks):
    """One rank alone: all forwards chunk by chunk, then all backwards."""
    assert num_ranks == 1
    forwards = [Action(Kind.FORWARD, m, c) for c in range(num_chunks) for m in range(num_micro_batches)]
    return [[*forwards, *(Action(Kind.BACKWARD, m, c) for _, m, c in reversed(forwards))]]


class PressConfig(Section):
    """Settings of the optimizer below."""

    press_factor: float = Field(1.0, gt=0, description="Learning-rate factor.")


class Plugin:
    def __init__(self):
        self.seen = []

    def build(self, groups, config, *, settings):
        self.seen.append(settings.press_factor)
        return build_sgd(groups, config)

    @hookimpl
    def mcore_optimizers(self):
        return [OptimizerSpec("press", build=self.build, slots=("momentum_buffer",), config=PressConfig)]

    @hookimpl
    def mcore_pipeline_schedules(self):
        return [ScheduleSpec("two-chunks", plan=plan, min_chunks=2, max_chunks=2)]


def _manager():
    manager, plugin = tiny.fresh_manager(), Plugin()
    manager.register(plugin, name="press")
    return manager, plugin


def _resolve(manager, **given):
    base = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9, "max_position_embeddings": 4}
    return resolve(None, {**base, "train_iters": 1, **given}, manager).config


def test_an_optimizers_own_flags_become_a_section_and_reach_it():
    manager, plugin = _manager()
    config = _resolve(manager, optimizer="press", press_factor=3.0)
    build_parts(config, single_layout(), manager=manager, device=torch.device("cpu"))
    assert plugin.seen == [3.0]


def test_a_schedule_of_several_chunks_gets_them():
    manager, _ = _manager()
    config = _resolve(manager, pipeline_schedule="two-chunks")
    parts = build_parts(config, single_layout(), manager=manager, device=torch.device("cpu"))
    assert [(chunk.stage.first_layer, chunk.stage.num_layers) for chunk in parts.chunks] == [(0, 1), (1, 1)]
    assert [str(action) for action in parts.train_plan.actions] == ["G", "F0", "G.1", "F0.1", "B0.1", "R.1", "B0", "R"]
    assert [str(action) for action in parts.eval_plan.actions] == ["F0", "F0.1"]
