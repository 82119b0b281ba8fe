"""``mcore generate``."""

from __future__ import annotations

import sys

import click

# Small models repeat themselves for ever when the likeliest token is always taken.
TEMPERATURE, TOP_P = 0.7, 0.95


@click.command()
@click.option("--load", required=True, metavar="DIR", help="Folder of a run, or of one checkpoint.")
@click.option(
    "--ckpt-step", type=click.IntRange(min=0), metavar="INTEGER", help="Iteration to load; default the newest."
)
@click.option("--prompt", required=True, metavar="TEXT", help="Text to continue; - reads it from standard input.")
@click.option("--max-new-tokens", default=100, show_default=True, type=click.IntRange(min=1), metavar="INTEGER")
@click.option("--greedy", is_flag=True, help="Always take the likeliest token, instead of drawing one.")
@click.option("--temperature", type=float, metavar="NUMBER", help="Draw with logits divided by this.  [default: 0.7]")
@click.option(
    "--top-p",
    type=float,
    metavar="NUMBER",
    help="Draw from the likeliest tokens of this total probability.  [default: 0.95]",
)
@click.option("--seed", type=click.IntRange(min=0), metavar="INTEGER", help="Seed of the drawing.  [default: 1234]")
def generate(
    load: str,
    ckpt_step: int | None,
    prompt: str,
    max_new_tokens: int,
    greedy: bool,
    temperature: float | None,
    top_p: float | None,
    seed: int | None,
) -> int:
    """Continue a text with a trained model, token by token as they come."""
    temperature, top_p = sampling(greedy, temperature=temperature, top_p=top_p, seed=seed)
    text = sys.stdin.read() if prompt == "-" else prompt
    check_load(load, ckpt_step)
    from mcore_cli.generate import run

    run(
        load,
        text,
        ckpt_step=ckpt_step,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=1234 if seed is None else seed,
        stream=sys.stdout,
    )
    return 0


def sampling(greedy: bool, *, temperature: float | None, top_p: float | None, seed: int | None) -> tuple[float, float]:
    """``(temperature, top_p)``; temperature 0 stands for greedy.

    Raises:
        UserError: values out of range, or flags of sampling where nothing is sampled.
    """
    from mcore_cli.errors import UserError

    problems = []
    if temperature is not None and not 0 < temperature < float("inf"):
        problems.append(
            f"--temperature {temperature}: must be above 0 and finite; use --greedy for the likeliest token"
        )
    if top_p is not None and not 0 < top_p <= 1:
        problems.append(f"--top-p {top_p}: must be above 0 and at most 1")
    drawing = {"--temperature": temperature, "--top-p": top_p, "--seed": seed}
    useless = [flag for flag, value in drawing.items() if value is not None]
    if greedy and useless:
        problems.append(f"--greedy with {', '.join(useless)}: the likeliest token is not drawn; drop one of them")
    if problems:
        raise UserError(*problems)
    if greedy:
        return 0.0, 1.0
    return TEMPERATURE if temperature is None else temperature, TOP_P if top_p is None else top_p


def check_load(load: str, ckpt_step: int | None) -> None:
    """Say at once, without importing torch, that there is nothing to load.

    Raises:
        CheckpointError: there is no complete checkpoint.
    """
    from mcore_ckpt.find import open_checkpoint
    from mcore_ckpt.stores import checkpoint_root, store_registry
    from mcore_parallel.plugins import plugin_manager

    open_checkpoint(checkpoint_root(load, store_registry(plugin_manager())), ckpt_step)
