"""Starting the ranks of a run: in this process, joined to those of a launcher, or as local ones through torch elastic.

Local ranks are forked from a server that has imported torch once, so that eight ranks start as quickly as one; the
server holds no threads and no device, which makes the fork safe. This module imports torch only when it starts ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from mcore_cli.config import RunConfig
from mcore_cli.environment import Environment
from mcore_cli.rank_record import KILL, RankRecords, Report, call, run_recorded
from mcore_cli.resolve import run_tree
from mcore_parallel.plugins import plugin_manager

PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
GRACE_SECONDS = 5.0


def run_ranks(target: str, *arguments: Any, environment: Environment, nproc_per_node: int | None) -> int:
    """Call ``target`` ("module:function") with ``arguments`` on every rank of the run; returns the exit code.

    A process that a launcher started becomes its rank; otherwise ``nproc_per_node`` local ranks are started, or this
    process alone does the work. ``arguments`` must pickle.

    Raises:
        Exception: whatever ``target`` raises in this process. Failures of local ranks are told on stderr instead.
    """
    if environment.is_rank:
        return _join(target, arguments, environment)
    if nproc_per_node is None or nproc_per_node == 1:
        return call(target, arguments)
    return start_local_ranks(target, arguments, nproc_per_node)


def run_config_ranks(
    target: str, config: RunConfig, *more: Any, environment: Environment, nproc_per_node: int | None
) -> int:
    """:func:`run_ranks` for a ``target`` whose first argument is the run's tree."""
    values = config.model_dump()  # the tree's type is made at run time where plugins have sections: no pickle knows it
    arguments = (target, values, *more)
    return run_ranks(
        "mcore_cli.launch:call_with_config", *arguments, environment=environment, nproc_per_node=nproc_per_node
    )


def call_with_config(target: str, values: dict[str, Any], *more: Any) -> int:
    """Call ``target`` with the tree that ``values`` are the dump of, and ``more``."""
    return call(target, (run_tree(plugin_manager()).model_validate(values), *more))


def set_threads(nproc: int, variables: MutableMapping[str, str]) -> None:
    """Share the cores among the ranks of this node, unless the user has set ``OMP_NUM_THREADS``."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    variables.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))


def _join(target: str, arguments: tuple[Any, ...], environment: Environment) -> int:
    os.environ.update(environment.variables())
    set_threads(environment.local_world_size, os.environ)
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return call(target, arguments)
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(call)(target, arguments) or 0


def start_local_ranks(target: str, arguments: tuple[Any, ...], nproc: int) -> int:
    """Run ``target`` on ``nproc`` local ranks; returns 0, or the exit code of the rank that failed first.

    One rank's failure ends the others within seconds, and only its error is printed. SIGTERM and SIGINT are passed on,
    so that ranks can save and leave; a second one kills them.
    """
    set_threads(nproc, os.environ)
    _prepare_server(arguments)
    with tempfile.TemporaryDirectory(prefix="mcore-ranks-") as folder:
        records = RankRecords(Path(folder))
        with _signals_passed_on(records), _failures_end_all(records):
            started = time.monotonic()
            report = _run_elastic(target, arguments, nproc, records)
        if report is None:
            return 0
        print(report.text(time.monotonic() - started), file=sys.stderr, flush=True)
        return report.exit_code


def _start_method() -> str:
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def _prepare_server(arguments: tuple[Any, ...]) -> None:
    """Start the process that ranks are forked from; it imports torch and what they will call while this one goes on."""
    if _start_method() != "forkserver":
        return
    from multiprocessing import forkserver

    targets = [argument.partition(":")[0] for argument in arguments if isinstance(argument, str) and ":" in argument]
    multiprocessing.set_forkserver_preload(["torch.distributed", *targets])
    # The server inherits this: a signal to the whole process group is for the ranks, and they need their parent.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_elastic(target: str, arguments: tuple[Any, ...], nproc: int, records: RankRecords) -> Report | None:
    """Run to the end; None if all ranks succeeded, else the report of the one that failed first."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence_elastic()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        role="mcore",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.05,
        start_method=_start_method(),
        logs_specs=DefaultLogsSpecs(log_dir=str(records.folder)),
        # This module passes signals on and keeps watching; elastic would stop watching and forget the exit codes.
        signals_to_handle="",
        shutdown_timeout=int(GRACE_SECONDS),
    )
    try:
        elastic_launch(config, run_recorded)(target, arguments, str(records.folder), os.getpid())
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return records.report(rank, failure.exitcode)
    return None


def _silence_elastic() -> None:
    """Elastic logs each rank's end with tracebacks of its own; the report says it in one line."""
    import logging

    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False


@contextmanager
def _signals_passed_on(records: RankRecords) -> Iterator[None]:
    """While this holds, signals to this process go to the ranks; a second SIGTERM or SIGINT kills them."""
    received: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        is_repeated = number in received and number in (signal.SIGTERM, signal.SIGINT)
        received.append(number)
        records.send(KILL if is_repeated else number)
        if not records.pids():  # no rank has started: there is nothing to save
            raise KeyboardInterrupt

    numbers = [getattr(signal, name) for name in PASSED_ON if hasattr(signal, name)]
    before: dict[int, Callable[..., Any] | int | None] = {n: signal.signal(n, pass_on) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _failures_end_all(records: RankRecords) -> Iterator[None]:
    """While this holds, a rank that dies takes the others with it after a grace, however deep they are in a call.

    Elastic sends them SIGTERM and waits half a minute; ranks take that as "save and leave", and may wait for the dead.
    """
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            if records.errors() or records.dead():
                if not done.wait(GRACE_SECONDS):
                    records.kill()
                return

    thread = threading.Thread(target=watch, name="mcore-rank-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
