"""``mcore verify [RECIPE] [flags]``."""

from __future__ import annotations

import click

from mcore_ckpt.config import CheckpointConfig
from mcore_cli.commands.run_options import RunCommand, check_request, read_request, tree_options
from mcore_cli.errors import UserError
from mcore_cli.options import given_flags

USELESS = {
    *CheckpointConfig.model_fields,
    "eval_interval",
    "eval_iters",
    "log_interval",
    "tensorboard_dir",
    "peak_tflops",
    "exit_interval",
    "exit_duration_in_mins",
}


@tree_options
@click.command(cls=RunCommand)
@click.argument("recipe", required=False)
@click.pass_context
def verify(ctx: click.Context, recipe: str | None, **_flags: object) -> int:
    """Prove that a layout does not change the answer.

    Takes one step of the run in float64 under its layout and on one rank, and compares loss, every gradient, the
    gradient norm and the updated weights. RECIPE and flags are those of mcore train.
    """
    refuse_useless(ctx)
    request = read_request(ctx, recipe)
    check_request(request, "verify")
    from mcore_cli.launch import run_config_ranks

    return run_config_ranks(
        "mcore_cli.verify:run",
        request.config,
        environment=request.environment,
        nproc_per_node=request.config.train.nproc_per_node,
    )


def refuse_useless(ctx: click.Context) -> None:
    """Verifying takes one step from fresh weights: nothing is loaded, saved, evaluated or logged.

    Raises:
        UserError: flags that have no say in that.
    """
    useless = sorted(name for name in given_flags(ctx) if name in USELESS)
    if useless:
        flags = ", ".join("--" + name.replace("_", "-") for name in useless)
        raise UserError(
            f"{flags}: mcore verify takes one step from fresh weights, and loads, saves, evaluates and logs nothing; "
            "drop them"
        )
