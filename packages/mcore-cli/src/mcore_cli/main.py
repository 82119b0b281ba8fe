"""The command ``mcore``: finds the subcommands through the plugin hook, and tells user mistakes in one place."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from mcore_cli.errors import USER_ERROR_CODE, RunFailed, describe, did_you_mean, is_user_error, problems_of
from mcore_cli.specs import CommandSpec
from mcore_parallel.plugins import PluginManager, Registry, plugin_manager


class PluginGroup(click.Group):
    """A group whose commands come from the hook ``mcore_cli_commands`` and are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands of all plugins."""
        return [spec.name for spec in commands(manager_of(ctx))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command ``cmd_name``, imported now; None if no plugin has it."""
        known = commands(manager_of(ctx))
        return known[cmd_name].load() if cmd_name in known else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click, with the nearest name when there is no such command."""
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            hint = did_you_mean(args[0], known)
            raise click.UsageError(f"no command {args[0]!r}{hint} (commands: {', '.join(known)})", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One line for each command, from its spec, so that help imports none of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(spec.name, spec.summary) for spec in commands(manager_of(ctx))])


def manager_of(ctx: click.Context) -> PluginManager:
    """The plugin manager of this invocation, made at first use; plugins that failed are named on stderr once."""
    root = ctx.find_root()
    if root.obj is None:
        root.obj = plugin_manager()
        for record in root.obj.failures:
            click.echo(f"warning: plugin {record.name} of {record.distribution} is skipped: {record.error}", err=True)
    manager: PluginManager = root.obj
    return manager


def commands(manager: PluginManager) -> Registry[CommandSpec]:
    """Every command that a plugin registered."""
    return Registry("command", manager.collect("mcore_cli_commands"))


def show_version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    """Print the version and leave."""
    if wanted:
        from importlib.metadata import version

        click.echo(f"mcore {version('mcore-cli')}")
        ctx.exit()


@click.group(cls=PluginGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=show_version,
    help="Show the version and exit.",
)
def mcore() -> None:
    """Train transformer language models on any layout, from a laptop CPU to thousands of GPUs."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``mcore`` with ``arguments`` (default: those of the process) and exit.

    Exit code 0 for success, 1 for a failed run, 2 for user mistakes (both in plain lines on stderr), 130 for an
    interrupt; a bug raises.
    """
    sys.exit(run(sys.argv[1:] if arguments is None else list(arguments)))


def run(arguments: list[str]) -> int:
    """Run ``mcore`` and return its exit code; a bug raises."""
    try:
        result = mcore.main(args=arguments, prog_name="mcore", standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        return 130
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return USER_ERROR_CODE
    except click.ClickException as error:
        click.echo(describe([error.format_message()]), err=True)
        return USER_ERROR_CODE
    except RunFailed as error:
        click.echo(describe([str(error)]), err=True)
        return 1
    except (ValueError, OSError) as error:
        if not is_user_error(error):
            raise
        click.echo(describe(problems_of(error)), err=True)
        return USER_ERROR_CODE
    return result if isinstance(result, int) else 0
