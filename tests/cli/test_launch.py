"""Starting ranks, and telling which of them failed first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mcore_cli import launch
from mcore_cli.environment import Environment
from mcore_cli.errors import RunFailed, UserError
from mcore_cli.rank_record import RankError, RankRecords, Report, call, is_running, run_recorded

CALLS: list[object] = []


def remember(value: object) -> int:
    CALLS.append((value, os.environ.get("RANK")))
    return 3


def fail_as_user() -> None:
    raise UserError("one", "two")


def fail_as_run() -> None:
    raise RunFailed("loss is not finite")


def fail_as_bug() -> None:
    raise KeyError("gone")


def lose_a_peer() -> None:
    raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1234")


def leave() -> None:
    raise SystemExit(4)


HERE = "test_launch"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])


@pytest.fixture
def records(tmp_path: Path) -> RankRecords:
    return RankRecords(tmp_path)


def error(rank: int, at: float, *, text: str = "boom", aftermath: bool = False, code: int = 1) -> RankError:
    return RankError(rank, at, text, "Traceback", code, aftermath)


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_alone_the_target_is_called_here() -> None:
    CALLS.clear()
    assert launch.run_ranks(f"{HERE}:remember", 7, environment=Environment(), nproc_per_node=None) == 3
    assert launch.run_ranks(f"{HERE}:remember", 8, environment=Environment(), nproc_per_node=1) == 3
    assert CALLS == [(7, None), (8, None)]


def test_under_a_launcher_this_process_is_its_rank(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    CALLS.clear()
    environment = Environment("slurm", rank=2, world_size=4, master_address="here", master_port=99)
    assert launch.run_ranks(f"{HERE}:remember", 7, environment=environment, nproc_per_node=None) == 3
    assert CALLS == [(7, "2")]
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("here", "99")


def test_several_local_ranks_are_started(monkeypatch) -> None:
    started = []
    monkeypatch.setattr(launch, "start_local_ranks", lambda *given: started.append(given) or 5)
    assert launch.run_ranks("a:b", 7, environment=Environment(), nproc_per_node=4) == 5
    assert started == [("a:b", (7,), 4)]


def test_a_tree_travels_as_plain_values(monkeypatch, small) -> None:
    seen = []
    monkeypatch.setattr(launch, "run_ranks", lambda *given, **_: seen.append(given) or 0)
    config = small()
    launch.run_config_ranks("a:b", config, environment=Environment(), nproc_per_node=2)
    name, target, values = seen[0]
    CALLS.clear()
    assert (name, target) == ("mcore_cli.launch:call_with_config", "a:b")
    assert launch.call_with_config(f"{HERE}:remember", values) == 3
    assert CALLS[0][0] == config


def test_threads_are_shared_unless_set() -> None:
    cores = len(os.sched_getaffinity(0))
    for nproc, expected in ((1, cores), (cores, 1), (64 * cores, 1)):
        variables: dict[str, str] = {}
        launch.set_threads(nproc, variables)
        assert variables == {"OMP_NUM_THREADS": str(expected)}
    variables = {"OMP_NUM_THREADS": "5"}
    launch.set_threads(2, variables)
    assert variables == {"OMP_NUM_THREADS": "5"}


def test_call_returns_an_exit_code() -> None:
    assert call(f"{HERE}:remember", (1,)) == 3
    assert call("builtins:str", (1,)) == 0


@pytest.mark.parametrize(
    ("target", "code", "text", "has_trace"),
    [
        ("fail_as_user", 2, "2 errors:\n  - one\n  - two", False),
        ("fail_as_run", 1, "loss is not finite", False),
        ("fail_as_bug", 1, "KeyError: 'gone'", True),
        ("leave", 4, "it left with exit code 4", False),
    ],
)
def test_a_failing_rank_notes_why(target, code, text, has_trace, records, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as stop:
        run_recorded(f"{HERE}:{target}", (), str(records.folder), os.getpid())
    noted = records.errors()
    assert stop.value.code == code
    assert [(e.rank, e.exit_code, e.text, e.is_aftermath) for e in noted] == [(3, code, text, False)]
    assert bool(noted[0].trace) == has_trace


def test_a_rank_that_lost_its_peer_lets_it_go_first(records, monkeypatch) -> None:
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        run_recorded(f"{HERE}:lose_a_peer", (), str(records.folder), os.getpid())
    assert records.errors()[0].is_aftermath
    assert waited
    assert waited[0] > 1


def test_a_rank_that_ends_well_is_not_counted(records, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    run_recorded("builtins:str", (), str(records.folder), os.getpid())
    assert (records.pids(), records.errors(), records.dead()) == ({}, [], [])


def test_running_and_dead(records) -> None:
    records.start(0)
    (records.folder / "1.pid").write_text(str(dead_pid()))
    assert is_running(os.getpid())
    assert records.dead() == [1]
    assert set(records.pids()) == {0, 1}


def test_the_earliest_cause_is_reported(records) -> None:
    records.fail(error(0, 3.0, text="late"))
    records.fail(error(1, 1.0, text="lost", aftermath=True))
    records.fail(error(2, 2.0, text="cause"))
    assert records.report(0, 1) == Report(2, 1, "cause", "Traceback")


def test_a_killed_rank_is_the_cause_of_its_peers_errors(records) -> None:
    records.fail(error(0, 1.0, text="something odd"))
    assert records.report(3, -9) == Report(3, -9, "it left no error behind")


def test_a_rank_that_was_killed_for_anothers_error_is_not_the_cause(records) -> None:
    records.fail(error(2, 1.0, text="cause"))
    (records.folder / "killed.json").write_text(json.dumps([]))
    assert records.report(0, -9).rank == 2


def test_without_any_cause_the_aftermath_is_reported(records) -> None:
    records.fail(error(0, 1.0, text="lost", aftermath=True))
    assert records.report(0, 1).text_of_rank == "lost"
    assert records.report(5, 7) == Report(5, 7, "it left no error behind")


def test_the_report_is_one_line_after_the_trace() -> None:
    text = Report(2, 1, "KeyError: 'gone'", "Traceback\n  x\n").text(3.2)
    assert (
        text == "Traceback\n  x\nerror: rank 2 exited with code 1 after 3 s: KeyError: 'gone'; all ranks were stopped"
    )
    killed = Report(1, -9, "it left no error behind")
    assert killed.text(0) == (
        "error: rank 1 was killed by SIGKILL after 0 s: it left no error behind; all ranks were stopped"
    )
    assert (killed.exit_code, Report(0, -15, "").exit_code, Report(0, 3, "").exit_code) == (137, 143, 3)


def test_user_mistakes_are_shown_as_they_are() -> None:
    report = Report(1, 2, "error: bad --lr")
    assert (report.text(1), report.exit_code) == ("error: bad --lr", 2)


RANKS = """
import os, signal, sys, time
rank = int(os.environ.get("RANK", -1))

def connect():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    return dist

def succeed():
    print("rank", rank, os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"], flush=True)

def raise_in_one():
    dist = connect()
    if rank == 1:
        raise KeyError("gone")
    dist.barrier()

def kill_one():
    dist = connect()
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(1000):
        dist.barrier()

def kill_one_of_the_deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connect()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(300)

def mistake():
    from mcore_cli.errors import UserError
    raise UserError("bad value")

def save_and_leave():
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    open(f"{rank}.ready", "w").close()
    while not asked:
        time.sleep(0.05)
    print("saved", rank, flush=True)
"""
MAIN = """
import sys
from mcore_cli.launch import start_local_ranks
if __name__ == "__main__":
    sys.exit(start_local_ranks("ranks:" + sys.argv[1], (), 3))
"""


@pytest.fixture
def start(tmp_path: Path):
    """Start three local ranks in a process of their own."""
    (tmp_path / "ranks.py").write_text(RANKS)
    (tmp_path / "main.py").write_text(MAIN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(target: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "main.py", target],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "code", "end"),
    [
        ("raise_in_one", 1, "error: rank 1 exited with code 1 after N s: KeyError: 'gone'; all ranks were stopped"),
        (
            "kill_one",
            137,
            "error: rank 2 was killed by SIGKILL after N s: it left no error behind; all ranks were stopped",
        ),
        (
            "kill_one_of_the_deaf",
            139,
            "error: rank 0 was killed by SIGSEGV after N s: it left no error behind; all ranks were stopped",
        ),
        ("mistake", 2, "error: bad value"),
    ],
)
def test_the_first_failing_rank_is_told(target: str, code: int, end: str, start) -> None:
    process = start(target)
    out, err = process.communicate(timeout=100)
    assert process.returncode == code, err
    words = err.splitlines()[-1].split(" ")
    words = ["N" if word.isdigit() and words[i - 1] == "after" else word for i, word in enumerate(words)]
    assert " ".join(words) == end
    assert err.count("Traceback") == (1 if target == "raise_in_one" else 0)
    assert out == ""


@pytest.mark.slow
def test_ranks_run_and_end(start) -> None:
    process = start("succeed")
    out, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (0, "")
    assert sorted(out.splitlines()) == [f"rank {rank} 3 1" for rank in range(3)]


@pytest.mark.slow
def test_a_signal_is_passed_on_and_ranks_leave_well(start, tmp_path: Path) -> None:
    process = start("save_and_leave")
    while len(list(tmp_path.glob("*.ready"))) < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (0, "")
    assert sorted(out.splitlines()) == ["saved 0", "saved 1", "saved 2"]
