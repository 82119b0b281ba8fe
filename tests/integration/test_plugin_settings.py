"""What a plugin's spec asks for reaches it, or is refused."""

from __future__ import annotations

import pytest
import tiny
import torch
from pydantic import Field

from mcore_cli.build import build_parts, build_plans
from mcore_cli.resolve import resolve
from mcore_parallel.axis import single_layout
from mcore_parallel.config import Section
from mcore_parallel.optim.builtin import build_sgd
from mcore_parallel.pipeline.schedules.one_f_one_b import plan
from mcore_parallel.plugins import hookimpl
from mcore_parallel.specs import OptimizerSpec, ScheduleSpec


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


def test_a_schedule_of_several_chunks_is_refused():
    manager, _ = _manager()
    config = _resolve(manager, pipeline_schedule="two-chunks")
    with pytest.raises(ValueError, match=r"two-chunks needs 2 model chunks per rank.*use one of.*1f1b"):
        build_plans(config, single_layout(), manager=manager)
