"""``mcore eval``."""

from __future__ import annotations

import click

from mcore_cli.commands.forward_options import LAYOUT_FIELDS, read_forward
from mcore_cli.commands.run_options import check_request
from mcore_cli.config import RunConfig
from mcore_cli.options import SectionCommand, section_options

FIELDS = (
    *LAYOUT_FIELDS,
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
    "sequence_parallel",
    "micro_batch_size",
    "global_batch_size",
    "eval_iters",
    "load",
    "ckpt_step",
)


@section_options(RunConfig, FIELDS)
@click.command("eval", cls=SectionCommand)
@click.pass_context
def evaluate(ctx: click.Context, **_flags: object) -> int:
    """Measure loss and perplexity on the validation split: that of the training run, or of other data.

    The model and its tokenizer come from the checkpoint (--load DIR); the layout is free and defaults to one rank.
    """
    request = read_forward(ctx, "mcore eval")
    check_request(request, "eval")
    from mcore_cli.launch import run_config_ranks

    return run_config_ranks(
        "mcore_cli.evaluate:run",
        request.config,
        environment=request.environment,
        nproc_per_node=request.config.train.nproc_per_node,
    )
