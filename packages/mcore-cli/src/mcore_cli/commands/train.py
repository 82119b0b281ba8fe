"""``mcore train [RECIPE] [flags]``."""

from __future__ import annotations

from functools import partial

import click

from mcore_cli.commands.run_options import (
    RunCommand,
    check_request,
    notice_no_ops,
    read_request,
    tell_problems,
    tree_options,
)


@tree_options
@click.command(cls=RunCommand)
@click.argument("recipe", required=False)
@click.option(
    "--print-config", is_flag=True, help="Print the whole tree as YAML, which is a recipe, and train nothing."
)
@click.pass_context
def train(ctx: click.Context, recipe: str | None, print_config: bool, **_flags: object) -> int:
    """Train a model.

    RECIPE is a shipped name (see mcore recipes) or a YAML file; flags win over it. List flags such as --data-path take
    all values up to the next flag, so give RECIPE first.
    """
    request = read_request(ctx, recipe)
    if print_config:
        from mcore_cli.dump import to_yaml

        tell_problems(request, request.problems)
        click.echo(to_yaml(request.config), nl=False)
        return 0
    check_request(request, "train")
    if request.environment.rank == 0:
        notice_no_ops(request.config, partial(click.echo, err=True))
    from mcore_cli.launch import run_config_ranks

    return run_config_ranks(
        "mcore_cli.trainer:run",
        request.config,
        environment=request.environment,
        nproc_per_node=request.config.train.nproc_per_node,
    )
