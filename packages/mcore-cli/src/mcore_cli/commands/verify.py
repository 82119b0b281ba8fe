"""``mcore verify [RECIPE] [flags]``."""

from __future__ import annotations

import click

from mcore_cli.commands.run_options import RunCommand, check_request, read_request, tree_options


@tree_options
@click.command(cls=RunCommand)
@click.argument("recipe", required=False)
@click.pass_context
def verify(ctx: click.Context, recipe: str | None, **_flags: object) -> int:
    """Prove that a layout does not change the answer.

    Takes one step of the run in float64 under its layout and on one rank, and compares loss, every gradient, the
    gradient norm and the updated weights. RECIPE and flags are those of mcore train.
    """
    request = read_request(ctx, recipe)
    check_request(request, "verify")
    from mcore_cli.launch import run_config_ranks

    return run_config_ranks(
        "mcore_cli.verify:run",
        request.config,
        environment=request.environment,
        nproc_per_node=request.config.train.nproc_per_node,
    )
