"""What ``train`` and ``verify`` share: a recipe and flags become a checked tree. No torch."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from mcore_cli.config import RunConfig
from mcore_cli.environment import Environment, detect, world_size
from mcore_cli.errors import USER_ERROR_CODE, UserError
from mcore_cli.main import manager_of
from mcore_cli.options import PROBLEMS, SectionCommand, given_flags, section_options
from mcore_cli.resolve import complete, resolve, run_tree
from mcore_cli.rules.check import Purpose, find_problems
from mcore_parallel.plugins import PluginManager

TELLING_SECONDS = 5.0
FLAG = re.compile(r"--[a-z][\w-]*")


class RunCommand(SectionCommand):
    """A command on a whole run: what is wrong with its flags is told together with the rules that the run breaks."""

    tells_problems = True


@dataclass(frozen=True)
class Request:
    """A run that was asked for: its completed tree, and where this process stands among the ranks.

    ``problems`` are those found so far: unknown names, and values that sections refuse.
    """

    config: RunConfig
    environment: Environment
    manager: PluginManager
    problems: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return world_size(self.environment, self.config.train.nproc_per_node)


def read_request(ctx: click.Context, recipe: str | None) -> Request:
    """The run that recipe and flags ask for, not yet checked.

    Raises:
        UserError: there is no such recipe, or it cannot be read.
    """
    manager = manager_of(ctx)
    try:
        resolution = resolve(recipe, given_flags(ctx), manager)
    except UserError as error:
        raise UserError(*ctx.meta[PROBLEMS], *error.problems) from None
    nproc = resolution.config.train.nproc_per_node
    environment = detect(os.environ, nproc)
    config = complete(resolution.config, world_size(environment, nproc))
    return Request(config, environment, manager, (*ctx.meta[PROBLEMS], *resolution.problems))


def check_request(request: Request, purpose: Purpose) -> None:
    """Check every rule; under a launcher all ranks check, and the first one tells.

    Raises:
        UserError: what is wrong, all of it.
        SystemExit: something is wrong and the first rank tells it.
    """
    found = find_problems(request.config, request.world_size, request.manager, purpose)
    # A refused value was left out of the tree: rules that met its default instead have nothing to say about it.
    doubtful = {flag for problem in request.problems for flag in FLAG.findall(problem)}
    problems = [*request.problems, *(line for line in found if not doubtful.intersection(FLAG.findall(line)))]
    tell_problems(request, problems)


def tell_problems(request: Request, problems: Sequence[str]) -> None:
    """Raise if there are ``problems``.

    Raises:
        UserError: what is wrong, all of it.
        SystemExit: something is wrong and the first rank tells it.
    """
    if not problems:
        return
    if request.environment.rank == 0:
        raise UserError(*problems)
    # A launcher ends all ranks when the first of them leaves: let that be the one that tells.
    time.sleep(TELLING_SECONDS)
    raise SystemExit(USER_ERROR_CODE)


def tree_options(command: click.Command) -> click.Command:
    """Decorator: the flags of every section, those of plugins included."""
    from mcore_parallel.plugins import plugin_manager

    return section_options(run_tree(plugin_manager()))(command)


def notice_no_ops(config: RunConfig, tell: Callable[[str], Any]) -> None:
    """Say which accepted flag does nothing: the one that Megatron's guides still give and that is a no-op there too."""
    if config.model.use_mcore_models:
        tell("note: --use-mcore-models has no effect, every model here is mcore's")
