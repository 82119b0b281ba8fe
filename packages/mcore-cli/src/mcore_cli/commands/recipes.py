"""``mcore recipes`` and ``mcore recipes show NAME``."""

from __future__ import annotations

import click

from mcore_cli.main import manager_of
from mcore_cli.recipe import find_recipe, load_recipe, shipped_recipes
from mcore_cli.resolve import resolve, run_tree
from mcore_models.cost import parameter_count
from mcore_parallel.plugins import PluginManager

# Of the byte tokenizer: it stands in where a recipe leaves the vocabulary to the tokenizer.
BYTE_VOCABULARY = 257


@click.group(invoke_without_command=True)
@click.pass_context
def recipes(ctx: click.Context) -> None:
    """List the shipped recipes with their sizes, or show one."""
    if ctx.invoked_subcommand is None:
        manager = manager_of(ctx)
        rows = [_row(name, manager) for name in shipped_recipes()]
        rows.sort(key=lambda row: row[1])
        width = max(len(name) for name, _, _ in rows)
        for name, parameters, about in rows:
            click.echo(f"{name:<{width}}  {human_count(parameters):>6}  {about}")


@recipes.command()
@click.argument("name")
def show(name: str) -> None:
    """Print the recipe NAME as it is written; mcore train NAME --print-config prints the whole tree."""
    click.echo(find_recipe(name).read_text(encoding="utf-8"), nl=False)


def _row(name: str, manager: PluginManager) -> tuple[str, int, str]:
    config = resolve(name, {}, manager).config
    model = config.model.model_copy(
        update={"max_position_embeddings": config.model.max_position_embeddings or config.data.seq_length}
    )
    parameters = parameter_count(model, vocab_size=model.vocab_size or BYTE_VOCABULARY)
    return name, parameters, load_recipe(name, run_tree(manager)).about


def human_count(number: int) -> str:
    """``1.5M`` for 1,540,000."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            value = number / size
            return f"{value:.0f}{unit}" if value >= 100 else f"{value:.1f}{unit}"
    return str(number)
