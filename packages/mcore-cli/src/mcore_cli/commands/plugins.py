"""``mcore plugins list``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import click

from mcore_cli.main import manager_of
from mcore_parallel.plugins import PluginManager

HOOK_PREFIX = "mcore_"
KINDS = {
    "mcore_pipeline_schedules": "pipeline schedule",
    "mcore_optimizers": "optimizer",
    "mcore_kernels": "kernel set",
    "mcore_models": "model",
    "mcore_datasets": "dataset",
    "mcore_tokenizers": "tokenizer",
    "mcore_checkpoint_stores": "checkpoint store",
    "mcore_callbacks": "callback",
    "mcore_cli_commands": "command",
}
PIPE_WIDTH = 200
COLUMNS = ("kind", "name", "plugin", "distribution", "version", "about")


@click.group()
def plugins() -> None:
    """What is registered, and by whom."""


@plugins.command("list")
@click.pass_context
def list_plugins(ctx: click.Context) -> None:
    """Every registered thing with its plugin and distribution; then the plugins that failed or are disabled."""
    from rich.console import Console
    from rich.table import Table

    manager = manager_of(ctx)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for row in sorted(registered(manager)):
        table.add_row(*row)
    # Piped output is for other programs: one row on one line.
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)
    for record in manager.records:
        if record.error is not None or record.disabled:
            state = "disabled by MCORE_DISABLED_PLUGINS" if record.disabled else f"failed: {record.error}"
            click.echo(f"plugin {record.name} of {record.distribution} ({record.value}) {state}")


def registered(manager: PluginManager) -> Iterator[tuple[str, ...]]:
    """One row of :data:`COLUMNS` for each registered spec."""
    records = {record.name: record for record in manager.records}
    for hook in sorted(name for name in vars(manager.hook) if name.startswith(HOOK_PREFIX)):
        for implementation in getattr(manager.hook, hook).get_hookimpls():
            record = records.get(implementation.plugin_name)
            distribution = record.distribution if record is not None else ""
            for spec in implementation.function():
                yield (
                    KINDS.get(hook, hook.removeprefix(HOOK_PREFIX)),
                    spec.name,
                    implementation.plugin_name,
                    distribution,
                    _version(distribution),
                    _about(spec),
                )


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except (metadata.PackageNotFoundError, ValueError):
        return ""


def _about(spec: Any) -> str:
    return str(getattr(spec, "summary", ""))
