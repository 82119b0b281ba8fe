"""Tiny configurations and rank jobs that the integration tests share."""

from __future__ import annotations

from datetime import timedelta

import torch

from mcore_cli.config import RunConfig
from mcore_cli.resolve import complete
from mcore_cli.results import StepResult
from mcore_cli.stop import StopRequest
from mcore_cli.trainer import drive, start
from mcore_cli.verify import ParityReport, logical_weights, parity
from mcore_cli.world import World, build_run_layout
from mcore_parallel.axis import Layout
from mcore_parallel.plugins import PluginManager, plugin_manager

LLAMA = {
    "model": "llama",
    "group_query_attention": True,
    "num_query_groups": 2,
    "ffn_hidden_size": 24,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
}
GPT = {"model": "gpt", "ffn_hidden_size": 32}
SHAPE = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "vocab_size": 37,
    "make_vocab_size_divisible_by": 1,
    "max_position_embeddings": 8,
}


def tiny_config(family: dict, **fields) -> RunConfig:
    """A tree of the tiny model; ``fields`` go to the section that has them."""
    sections = {
        "parallel": {},
        "optimizer": {"lr": 1e-2, "weight_decay": 0.1},
        "model": {**SHAPE, **family},
        "data": {"seq_length": 8, "dataset": "mock", "tokenizer_type": "NullTokenizer", "tokenizer_model": "36"},
        "train": {"micro_batch_size": 1, "global_batch_size": 8, "train_iters": 4},
        "checkpoint": {},
    }
    owners = {name: section for section, part in RunConfig() for name in type(part).model_fields}
    for name, value in fields.items():
        sections[owners[name]][name] = value
    return RunConfig.model_validate(sections)


def layout_of(config: RunConfig, rank: int, world: int) -> Layout:
    """The layout of ``config`` on a rank of the pool."""
    return build_run_layout(config, world_of(rank, world), manager=fresh_manager())


def fresh_manager() -> PluginManager:
    """All plugins, none of which may have failed."""
    manager = plugin_manager(disabled=())
    assert not manager.failures, manager.failures
    return manager


def parity_job(
    rank: int, world: int, config: RunConfig, ragged: bool, bound: float, sabotage=None
) -> ParityReport | None:
    """Run the oracle on a rank; ``sabotage(rank)`` may break something first."""
    if sabotage is not None:
        sabotage(rank)
    layout = layout_of(config, rank, world)
    dtype = torch.float64 if bound < 1e-7 else torch.float32
    return parity(
        config, layout, manager=fresh_manager(), device=torch.device("cpu"), dtype=dtype, bound=bound, ragged=ragged
    )


def world_of(rank: int, world: int) -> World:
    """A rank of the pool as the trainer sees it."""
    return World(rank, world, rank, torch.device("cpu"), timedelta(seconds=60))


def train_job(rank: int, world: int, config: RunConfig, folder: str) -> tuple[list[StepResult], dict, list[str]]:
    """Train in ``folder`` as ``mcore train`` would; step results, logical weights (rank 0) and notices."""
    config = complete(config, world)
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"save": folder})})
    trainer, notices = start(config, world_of(rank, world), manager=fresh_manager(), stop=StopRequest())
    recorder = Recorder()
    drive(trainer, [recorder])
    trainer.data.train.close()
    return recorder.steps, logical_weights(trainer.parts), notices


class Recorder:
    """A callback that keeps what it is told."""

    def __init__(self) -> None:
        self.steps, self.evals, self.saves = [], [], []

    def on_start(self, run):
        """Nothing to keep."""

    def on_step(self, result):
        self.steps.append(result)

    def on_eval(self, result):
        self.evals.append(result)

    def on_save(self, result):
        self.saves.append(result)

    def on_notice(self, text):
        """Nothing to keep."""

    def on_end(self, reason):
        """Nothing to keep."""

    def close(self):
        """Nothing to let go of."""
