"""``mcore schedule list``, ``show`` and ``compare``: pipeline schedules on paper, before any rank starts."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from mcore_cli.main import manager_of
from mcore_cli.options import SectionCommand

if TYPE_CHECKING:
    from mcore_cli.compare import Case, Row
    from mcore_parallel.pipeline.simulate import Timeline
    from mcore_parallel.specs import ScheduleSpec

PIPE_WIDTH = 200
IMAGES = (".svg", ".png")
CASE_OPTIONS = (
    click.option("--pp", type=click.IntRange(min=1), metavar="INTEGER", help="Pipeline ranks."),
    click.option("--micro-batches", type=click.IntRange(min=1), metavar="INTEGER", help="Micro-batches of a step."),
    click.option(
        "--vpp",
        type=click.IntRange(min=1),
        metavar="INTEGER",
        help="Model chunks per rank.  [default: 2, or what the schedule takes]",
    ),
    click.option(
        "--group-size",
        type=click.IntRange(min=1),
        metavar="INTEGER",
        help="Micro-batches that go through a chunk before the next.  [default: pp]",
    ),
    click.option(
        "--times",
        default="1,1,1",
        show_default=True,
        metavar="F,B,W",
        help="Times of forward, input gradient and weight gradient of a micro-batch through all layers of a rank.",
    ),
    click.option(
        "--latency", default=0.0, type=click.FloatRange(min=0), metavar="NUMBER", help="Time that a message takes."
    ),
)


def case_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the options that describe a case."""
    for option in reversed(CASE_OPTIONS):
        command = option(command)
    return command


@click.group()
def schedule() -> None:
    """Look at pipeline schedules: what they do when, and what they cost."""


@schedule.command("list", cls=SectionCommand)
@click.pass_context
def list_schedules(ctx: click.Context) -> None:
    """Every registered schedule: chunks per rank, bubble, memory and paper."""
    from mcore_cli.pipeline import schedules_of

    for spec in sorted(schedules_of(manager_of(ctx)), key=lambda spec: spec.name):
        click.echo(f"{spec.name}: {spec.summary}")
        facts = {
            "model chunks per rank": _chunks(spec.min_chunks, spec.max_chunks),
            "bubble": spec.bubble,
            "live": spec.memory,
            "paper": spec.paper,
            "also": ", ".join(spec.aliases),
        }
        for name, value in facts.items():
            if value:
                click.echo(f"    {name}: {value}")


@schedule.command(cls=SectionCommand)
@click.argument("name", required=False)
@case_options
@click.option("--table", metavar="FILE", help="A CSV or YAML table, instead of NAME; it says its sizes itself.")
@click.option("--out", metavar="FILE", help="Draw into this .svg or .png file, too.")
@click.pass_context
def show(ctx: click.Context, name: str | None, table: str | None, out: str | None, **options: Any) -> None:
    """Draw the timeline of one step under the schedule NAME (see mcore schedule list).

    A pass is its letter (F forward, B backward, I input gradient, W weight gradient) and its micro-batch; letters are
    small for odd model chunks, dots are idle time.
    """
    from mcore_parallel.pipeline.draw import to_text

    check_image(out)
    spec, case = _asked(ctx, name, table, options)
    timeline = case.timeline(spec)
    is_terminal = sys.stdout.isatty()
    width = max(20, shutil.get_terminal_size().columns) if is_terminal else PIPE_WIDTH
    click.echo(to_text(timeline, width=width, colour=is_terminal))
    if out is not None:
        chunks = case.chunks_of(spec)
        virtual = f", {chunks} chunks per rank" if chunks > 1 else ""
        title = f"{spec.name}: {case.num_ranks} ranks, {case.num_micro_batches} micro-batches{virtual}"
        write_image(out, timeline, title=title)
        click.echo(f"wrote {out}")


def _asked(
    ctx: click.Context, name: str | None, table: str | None, options: dict[str, Any]
) -> tuple[ScheduleSpec, Case]:
    """The schedule and the case to show.

    Raises:
        UserError: neither a name nor a table, or both.
        ValueError: no such schedule, or a table that cannot be read.
    """
    from mcore_cli.errors import UserError
    from mcore_cli.pipeline import TABLE, schedules_of

    if table is None:
        if name is None:
            raise UserError("mcore schedule show needs NAME (mcore schedule list) or --table FILE")
        return schedules_of(manager_of(ctx))[name], read_case(**options)
    if name not in (None, TABLE):
        raise UserError(f"mcore schedule show {name} with --table {table}: each is a schedule; keep one")
    from mcore_parallel.pipeline.schedules.table import read_table

    read = read_table(table)
    sizes = {"pp": read.flow.num_ranks, "micro_batches": read.num_micro_batches, "vpp": read.flow.num_chunks}
    return read.spec(), read_case(**{**options, **{k: v for k, v in sizes.items() if options[k] is None}})


def check_image(out: str | None) -> None:
    """Refuse a picture of another kind than can be drawn.

    Raises:
        UserError: the name of the file does not end in one of :data:`IMAGES`.
    """
    from mcore_cli.errors import UserError

    if out is not None and not out.lower().endswith(IMAGES):
        raise UserError(f"--out {out}: must end in {' or '.join(IMAGES)}")


def write_image(out: str, timeline: Timeline, *, title: str) -> None:
    """Draw ``timeline`` into the file ``out``, which :func:`check_image` let pass."""
    from mcore_parallel.pipeline.draw import to_png, to_svg

    svg = out.lower().endswith(".svg")
    picture = to_svg(timeline, title=title).encode() if svg else to_png(timeline, title=title)
    # Opened here and not by pathlib, so that a folder that is not there is told as the user's mistake it is.
    with open(out, "wb") as file:
        file.write(picture)


@schedule.command(cls=SectionCommand)
@case_options
@click.pass_context
def compare(ctx: click.Context, times: str, **case: Any) -> None:
    """Simulate one step under every schedule that can run the case, and say why the others cannot."""
    from mcore_cli.compare import compare as compare_schedules
    from mcore_cli.pipeline import schedules_of

    asked = read_case(times=times, **case)
    rows, refused = compare_schedules(schedules_of(manager_of(ctx)), asked)
    columns = ("schedule", "vpp", "makespan", "bubble_makespan", "bubble_span", "live", "deferred W", "both")
    _print_table(columns, [_cells(row) for row in rows])
    click.echo(
        f"{asked.num_ranks} ranks, {asked.num_micro_batches} micro-batches, times F,B,W = {times}; "
        "live, deferred W: most micro-batches' worth on any rank"
    )
    for name, reason in sorted(refused.items()):
        click.echo(f"not {name}: {reason}")


def read_case(
    *,
    pp: int | None,
    micro_batches: int | None,
    vpp: int | None,
    group_size: int | None,
    times: str,
    latency: float,
) -> Case:
    """The case that options describe.

    Raises:
        UserError: a size is missing, or times that are not three numbers.
    """
    from mcore_cli.compare import Case
    from mcore_cli.errors import UserError

    if pp is None or micro_batches is None:
        missing = [flag for flag, value in (("--pp", pp), ("--micro-batches", micro_batches)) if value is None]
        raise UserError(*(f"{flag} is missing, as in --pp 4 --micro-batches 8" for flag in missing))
    return Case(pp, micro_batches, num_chunks=vpp, group_size=group_size, times=read_times(times), latency=latency)


def read_times(text: str) -> tuple[float, float, float]:
    """``1,1.5,0.5`` as numbers.

    Raises:
        UserError: not three finite numbers of which none is negative and at least one is above 0.
    """
    from mcore_cli.errors import UserError

    try:
        forward, input_grad, weight_grad = (float(part) for part in text.split(","))
    except ValueError:
        forward = input_grad = weight_grad = -1.0
    found = (forward, input_grad, weight_grad)
    if not all(0 <= number < float("inf") for number in found) or not any(found):
        raise UserError(
            f"--times {text}: must be three numbers from 0 up, not all 0: forward, input gradient and weight gradient, "
            "as in 1,1,1"
        )
    return found


def _cells(row: Row) -> tuple[str, ...]:
    shares = (f"{100 * row.bubble_makespan:.1f}%", f"{100 * row.bubble_span:.1f}%")
    return row.name, str(row.num_chunks), f"{row.makespan:g}", *shares, *map(_short, (row.live, row.deferred, row.held))


def _short(number: float) -> str:
    return f"{number:g}"


def _chunks(fewest: int, most: int | None) -> str:
    return str(fewest) if fewest == most else f"{fewest}+" if most is None else f"{fewest}-{most}"


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    # Piped output is for other programs: one row on one line.
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)
