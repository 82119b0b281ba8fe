"""``mcore eval``."""

from __future__ import annotations

import os

import click

from mcore_ckpt.find import open_checkpoint
from mcore_ckpt.stores import checkpoint_root, store_registry
from mcore_cli.commands.run_options import Request, check_request
from mcore_cli.config import RunConfig
from mcore_cli.environment import detect, world_size
from mcore_cli.errors import UserError
from mcore_cli.main import manager_of
from mcore_cli.options import SectionCommand, given_flags, section_options
from mcore_cli.pipeline import one_stage
from mcore_cli.resolve import complete, override, run_tree

# Everything else is the model's, and comes from the checkpoint.
FIELDS = (
    "dataset",
    "data_path",
    "split",
    "seq_length",
    "tokenizer_type",
    "tokenizer_model",
    "vocab_file",
    "merge_file",
    "eod_mask_loss",
    "data_cache_path",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "pipeline_split",
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "sequence_parallel",
    "use_tp_pp_dp_mapping",
    "distributed_backend",
    "distributed_timeout_minutes",
    "transformer_impl",
    "micro_batch_size",
    "global_batch_size",
    "eval_iters",
    "device",
    "nproc_per_node",
    "load",
    "ckpt_step",
)
# The layout is that of this evaluation; that of the training run has no say.
LAYOUT = {
    **one_stage(),
    "tensor_model_parallel_size": 1,
    "sequence_parallel": False,
    "use_tp_pp_dp_mapping": False,
    "nproc_per_node": None,
}


@section_options(RunConfig, FIELDS)
@click.command("eval", cls=SectionCommand)
@click.pass_context
def evaluate(ctx: click.Context, **_flags: object) -> int:
    """Measure loss and perplexity on the validation split: that of the training run, or of other data.

    The model and its tokenizer come from the checkpoint (--load DIR); the layout is free and defaults to one rank.
    """
    request = read_evaluation(ctx)
    check_request(request, "eval")
    from mcore_cli.launch import run_config_ranks

    return run_config_ranks(
        "mcore_cli.evaluate:run",
        request.config,
        environment=request.environment,
        nproc_per_node=request.config.train.nproc_per_node,
    )


def read_evaluation(ctx: click.Context) -> Request:
    """The configuration of the checkpoint with the flags of this evaluation.

    Raises:
        UserError: no checkpoint, or values that sections refuse.
    """
    manager, given = manager_of(ctx), given_flags(ctx)
    load = given.get("load")
    if load is None:
        raise UserError("mcore eval needs --load DIR, the folder of a run or of one checkpoint")
    tree = run_tree(manager)
    step = override(tree(), {k: v for k, v in given.items() if k == "ckpt_step"}).checkpoint.ckpt_step
    info = open_checkpoint(checkpoint_root(load, store_registry(manager)), step)
    saved = tree.model_validate(info.state["config"])
    config = override(saved, {**LAYOUT, **given})
    environment = detect(os.environ, config.train.nproc_per_node)
    return Request(complete(config, world_size(environment, config.train.nproc_per_node)), environment, manager)
