"""Hooks that mcore-cli owns. Each takes no argument and returns a list of frozen specs."""

from mcore_cli.specs import CallbackSpec, CommandSpec
from mcore_parallel.plugins import hookspec


@hookspec
def mcore_cli_commands() -> list[CommandSpec]:  # type: ignore[empty-body]
    """Commands ``mcore NAME``."""


@hookspec
def mcore_callbacks() -> list[CallbackSpec]:  # type: ignore[empty-body]
    """Callbacks that every training run gets."""
