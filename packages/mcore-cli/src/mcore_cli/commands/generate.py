"""``mcore generate``."""

from __future__ import annotations

import sys

import click

from mcore_cli.commands.forward_options import LAYOUT_FIELDS, read_forward
from mcore_cli.commands.run_options import Request, check_request
from mcore_cli.config import RunConfig
from mcore_cli.errors import UserError
from mcore_cli.options import SectionCommand, section_options
from mcore_cli.resolve import model_parallel_size
from mcore_cli.text_request import TextRequest

# Small models repeat themselves for ever when the likeliest token is always taken.
TEMPERATURE, TOP_P, DRAW_SEED = 0.7, 0.95, 1234


@section_options(RunConfig, (*LAYOUT_FIELDS, "load", "ckpt_step"))
@click.command(cls=SectionCommand)
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
@click.pass_context
def generate(ctx: click.Context, prompt: str, max_new_tokens: int, **flags: object) -> int:
    """Continue a text with a trained model, token by token as they come.

    The model and its tokenizer come from the checkpoint (--load DIR); the layout is free and defaults to one rank.
    """
    chosen = {name: flags[name] for name in ("greedy", "temperature", "top_p", "seed")}
    temperature, top_p, seed = sampling(**chosen)  # type: ignore[arg-type]
    request = read_forward(ctx, "mcore generate", {"micro_batch_size": 1, "global_batch_size": 1})
    check_ranks(request)
    check_request(request, "generate")
    text = sys.stdin.read() if prompt == "-" else prompt
    from mcore_cli.launch import run_config_ranks

    return run_config_ranks(
        "mcore_cli.generate:run",
        request.config,
        TextRequest(text, max_new_tokens, temperature, top_p, seed),
        environment=request.environment,
        nproc_per_node=request.config.train.nproc_per_node,
    )


def check_ranks(request: Request) -> None:
    """One text needs one copy of the model.

    Raises:
        UserError: the ranks are not those of one copy.
    """
    needed = model_parallel_size(request.config)
    if request.world_size != needed:
        raise UserError(
            f"{request.world_size} rank(s) for tp x pp = {needed}: one text is made by one copy of the model; "
            f"give --nproc-per-node {needed}, or sizes that multiply to {request.world_size}"
        )


def sampling(
    greedy: bool, *, temperature: float | None, top_p: float | None, seed: int | None
) -> tuple[float, float, int]:
    """``(temperature, top_p, seed)``; temperature 0 stands for greedy.

    Raises:
        UserError: values out of range, or flags of sampling where nothing is sampled.
    """
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
    seed = DRAW_SEED if seed is None else seed
    if greedy:
        return 0.0, 1.0, seed
    return TEMPERATURE if temperature is None else temperature, TOP_P if top_p is None else top_p, seed
