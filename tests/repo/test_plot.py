"""The picture of the README is drawn from a run's own metrics."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def metrics(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def draw(root: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", root / "docs" / "images" / "plot_loss.py", *arguments]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=110)


def test_a_loss_is_drawn_from_steps_alone(root: Path, tmp_path: Path) -> None:
    run = metrics(
        tmp_path / "metrics.jsonl",
        [
            {"kind": "start", "time": 0.0},
            {"kind": "step", "iteration": 1, "loss": 5.5},
            {"kind": "eval", "iteration": 1, "loss": 99.0},
            {"kind": "step", "iteration": 2, "loss": 4.5},
            {"kind": "end", "reason": "done"},
        ],
    )
    done = draw(root, run, "--output", tmp_path / "loss.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_last_of_a_repeated_step_counts(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(root / "docs" / "images"))
    import plot_loss

    steps = [{"kind": "step", "iteration": i, "loss": loss} for i, loss in ((1, 5.0), (2, 4.0), (3, 3.0), (2, 4.5))]
    assert plot_loss.read(metrics(tmp_path / "m.jsonl", steps), "loss") == ([1, 2, 3], [5.0, 4.5, 3.0])
    with pytest.raises(ValueError, match="no step with 'mfu'"):
        plot_loss.read(tmp_path / "m.jsonl", "mfu")
