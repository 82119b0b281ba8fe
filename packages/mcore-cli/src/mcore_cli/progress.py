"""Progress of work that is counted in bytes: a bar on a terminal, nothing in a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def byte_progress(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """Yields ``show(done, total, text)``; the bar is on stderr and goes away at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn(title),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def show(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total, description=text)

        yield show
