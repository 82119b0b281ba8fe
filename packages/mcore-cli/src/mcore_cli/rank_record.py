"""What local ranks leave behind for the process that started them: their process ids, and their errors. No torch.

Several ranks fail when one does: the others lose their connection to it. The record tells which failed first and why.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from mcore_cli.errors import USER_ERROR_CODE, RunFailed, describe, is_user_error, problems_of

# What a rank sees when a peer is gone, in the words of gloo, NCCL and torch's store.
PEER_LOST = re.compile(
    r"connection (closed|reset|refused|was likely)|broken pipe|socket closed|remote process|(closed|reset) by peer"
    r"|timed out waiting|ncclRemoteError|communicator was aborted",
    re.IGNORECASE,
)
# Windows has no SIGKILL; its SIGTERM cannot be refused either.
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
AFTERMATH_SECONDS = 3.0
KILLED = "killed.json"
INTERRUPTED_CODE = 130


@dataclass(frozen=True)
class RankError:
    """The exception that ended a rank. ``is_aftermath``: it lost a peer, so the cause is probably elsewhere."""

    rank: int
    time: float
    text: str
    trace: str
    exit_code: int
    is_aftermath: bool


@dataclass(frozen=True)
class Report:
    """The failure of a run as shown: the rank that failed first, how it ended, and its own error."""

    rank: int
    exit_code_of_rank: int
    text_of_rank: str
    trace: str = ""

    @property
    def exit_code(self) -> int:
        """The exit code of the run: that of the rank, or 128 plus the signal that killed it."""
        code = self.exit_code_of_rank
        return 128 - code if code < 0 else code or 1

    def text(self, seconds: float) -> str:
        """The traceback of that rank if it is a bug, and one line naming rank, end and error."""
        if self.exit_code_of_rank == USER_ERROR_CODE:
            return self.text_of_rank
        end = f"exited with code {self.exit_code_of_rank}"
        if self.exit_code_of_rank < 0:
            end = f"was killed by {signal_name(-self.exit_code_of_rank)}"
        line = f"error: rank {self.rank} {end} after {seconds:.0f} s: {self.text_of_rank}; all ranks were stopped"
        return f"{self.trace.rstrip()}\n{line}" if self.trace else line


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class RankRecords:
    """A folder with files of each rank: ``RANK.pid`` from its start, ``RANK.error`` or ``RANK.left`` at its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, rank: int) -> None:
        """Note this process as ``rank``."""
        self._write(f"{rank}.pid", str(os.getpid()))

    def leave(self, rank: int) -> None:
        """Note that ``rank`` ended well."""
        self._write(f"{rank}.left", "")

    def fail(self, error: RankError) -> None:
        """Note why a rank ends."""
        self._write(f"{error.rank}.error", json.dumps(asdict(error)))

    def _write(self, name: str, text: str) -> None:
        partial = self.folder / f".{name}.partial"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, self.folder / name)

    def pids(self) -> dict[int, int]:
        """Process ids of the ranks that have not ended well, by rank."""
        left = {path.stem for path in self.folder.glob("*.left")}
        return {int(p.stem): int(p.read_text()) for p in self.folder.glob("*.pid") if p.stem not in left}

    def errors(self) -> list[RankError]:
        """Errors that ranks have noted, the earliest first."""
        found = [RankError(**json.loads(path.read_text(encoding="utf-8"))) for path in self.folder.glob("*.error")]
        return sorted(found, key=lambda error: error.time)

    def send(self, number: int) -> None:
        """Send a signal to every rank that runs."""
        for pid in self.pids().values():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass  # it has just ended

    def dead(self) -> list[int]:
        """Ranks whose process is gone although they neither ended well nor noted an error: something killed them."""
        noted = {error.rank for error in self.errors()}
        return [rank for rank, pid in self.pids().items() if rank not in noted and not is_running(pid)]

    def kill(self) -> None:
        """End every rank that runs, and note which had died before."""
        self._write(KILLED, json.dumps(self.dead()))
        self.send(KILL)

    def report(self, rank: int, code: int) -> Report:
        """The failure that caused the others, given the first one that was seen: ``rank`` ended with ``code``."""
        errors = {error.rank: error for error in self.errors()}
        killed = self.folder / KILLED
        died_before = json.loads(killed.read_text()) if killed.exists() else [rank]
        if code < 0 and rank not in errors and rank in died_before:
            return Report(rank, code, "it left no error behind")
        causes = [error for error in errors.values() if not error.is_aftermath]
        first = causes[0] if causes else errors.get(rank)
        if first is None:
            return Report(rank, code, "it left no error behind")
        return Report(first.rank, first.exit_code, first.text, first.trace)


def is_running(pid: int) -> bool:
    """Whether process ``pid`` exists and is no zombie."""
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def call(target: str, arguments: tuple[Any, ...]) -> int:
    """Import ``"module:function"``, call it and return its exit code: an int result, else 0."""
    module, _, name = target.partition(":")
    result = getattr(import_module(module), name)(*arguments)
    return result if isinstance(result, int) else 0


def run_recorded(target: str, arguments: tuple[Any, ...], folder: str, launcher: int) -> None:
    """A local rank: call ``target``, and leave the reason behind if it fails. Ends with process ``launcher``."""
    rank = int(os.environ["RANK"])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(launcher,), name="mcore-launcher-watch", daemon=True).start()
    records = RankRecords(Path(folder))
    records.start(rank)
    try:
        code = call(target, arguments)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        code = _note(records, rank, error)
    if code == 0:
        records.leave(rank)
        return
    if not (records.folder / f"{rank}.error").exists():
        records.fail(RankError(rank, time.time(), f"it left with exit code {code}", "", code, is_aftermath=False))
    sys.stdout.flush()
    sys.exit(code)


def _end_with(launcher: int) -> None:
    """End this process within seconds of ``launcher``: nobody watches it any more, and a requeued run may come."""
    pause = threading.Event()
    while is_running(launcher):
        pause.wait(1.0)
    os._exit(1)


def _note(records: RankRecords, rank: int, error: BaseException) -> int:
    is_user = is_user_error(error)
    is_told = is_user or isinstance(error, RunFailed | KeyboardInterrupt)
    trace = "" if is_told else "".join(traceback.format_exception(error))
    words = " ".join(str(error).split())
    text = describe(problems_of(error)) if is_user else words if is_told else f"{type(error).__name__}: {words}"
    is_aftermath = not is_user and bool(PEER_LOST.search(text))
    code = USER_ERROR_CODE if is_user else INTERRUPTED_CODE if isinstance(error, KeyboardInterrupt) else 1
    records.fail(RankError(rank, time.time(), text, trace, code, is_aftermath))
    if is_aftermath:
        # The peer that is gone is the cause: let its end be seen before this one's.
        time.sleep(AFTERMATH_SECONDS)
    return code
