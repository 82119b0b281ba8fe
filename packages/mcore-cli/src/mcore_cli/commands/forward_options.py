"""What ``eval`` and ``generate`` share: a checkpoint's configuration under a layout of their own. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import click

from mcore_ckpt.find import open_checkpoint
from mcore_ckpt.stores import checkpoint_root, store_registry
from mcore_cli.commands.run_options import Request
from mcore_cli.environment import detect, world_size
from mcore_cli.errors import UserError
from mcore_cli.main import manager_of
from mcore_cli.options import given_flags
from mcore_cli.pipeline import one_stage
from mcore_cli.resolve import complete, override, run_tree
from mcore_parallel.config import OptimizerConfig

# What a layout for forward passes has a say in. Everything else is the model's, and comes from the checkpoint.
LAYOUT_FIELDS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "pipeline_split",
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "use_tp_pp_dp_mapping",
    "distributed_backend",
    "distributed_timeout_minutes",
    "transformer_impl",
    "device",
    "nproc_per_node",
)
# The layout is that of these passes; that of the training run has no say.
ONE_RANK = {
    **one_stage(),
    "tensor_model_parallel_size": 1,
    "sequence_parallel": False,
    "use_distributed_optimizer": False,
    "optimizer": OptimizerConfig().optimizer,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "use_tp_pp_dp_mapping": False,
    "nproc_per_node": None,
}


def read_forward(ctx: click.Context, command: str, more: Mapping[str, Any] | None = None) -> Request:
    """The configuration of the checkpoint that ``--load`` names, with ``more`` and then the flags over it.

    Raises:
        UserError: no checkpoint, or values that sections refuse.
    """
    manager, given = manager_of(ctx), given_flags(ctx)
    load = given.get("load")
    if load is None:
        raise UserError(f"{command} needs --load DIR, the folder of a run or of one checkpoint")
    tree = run_tree(manager)
    step = override(tree(), {k: v for k, v in given.items() if k == "ckpt_step"}).checkpoint.ckpt_step
    info = open_checkpoint(checkpoint_root(load, store_registry(manager)), step)
    saved = tree.model_validate(info.state["config"])
    config = override(saved, {**ONE_RANK, **(more or {}), **given})
    environment = detect(os.environ, config.train.nproc_per_node)
    return Request(complete(config, world_size(environment, config.train.nproc_per_node)), environment, manager)
