"""The benchmarks run, and refuse to compare contenders that compute different things."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(root / "benchmarks" / "train_step.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=root)


@pytest.fixture
def train_step(root: Path, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    spec = importlib.util.spec_from_file_location("benchmarks_train_step", root / "benchmarks" / "train_step.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_all_contenders_train_the_same_model(root: Path) -> None:
    done = run(root, "--tiny", "--rounds", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("mcore, one rank", "plain PyTorch", "transformers 5", "GEMMs only"):
        assert name in done.stdout
    assert "losses agree within" in done.stdout


def test_unknown_contenders_are_named(root: Path) -> None:
    done = run(root, "--contenders", "mcore,megatron")
    assert done.returncode == 2
    assert "unknown contenders megatron" in done.stderr


def test_different_losses_are_an_error(train_step, monkeypatch, capsys) -> None:
    monkeypatch.setattr(train_step, "run", lambda *_: records(train_step, wrong=1.001))
    assert train_step.main(["--tiny", "--rounds", "2"]) == 1
    assert "computed different losses" in capsys.readouterr().err
    monkeypatch.setattr(train_step, "run", lambda *_: records(train_step, wrong=float("nan")))
    assert train_step.main(["--tiny", "--rounds", "2"]) == 1
    monkeypatch.setattr(train_step, "run", lambda *_: records(train_step, wrong=1.0))
    assert train_step.main(["--tiny", "--rounds", "2"]) == 0


def records(train_step, wrong: float):
    def record(name, seconds, losses):
        return train_step.Record(name, 1.0, seconds=seconds, losses=losses, others=[0.0] * len(seconds))

    return {
        "plain": record("plain", [2.0, 8.0, 2.0], [1.0, 1.0, 1.0]),
        "mcore": record("mcore", [1.0, 2.0, 1.0], [1.0, wrong, 1.0]),
        "gemm": record("gemm", [0.5, 1.0, 0.5], [None, None, None]),
    }


def test_ratios_are_paired_within_rounds(train_step) -> None:
    found = records(train_step, wrong=1.0)
    assert train_step.paired_ratio(found["plain"], found["mcore"]) == 2.0
    assert train_step.paired_ratio(found["mcore"], found["gemm"]) == 2.0
    table = train_step.report(found, train_step.TINY)
    assert "50.0%" in table[2]
    assert "2.000" in table[2]


def test_the_flop_count_matches_the_shapes(train_step) -> None:
    """The 58 M Llama: 41,680,896 weights in GEMMs, 2 operations each, three products, 2048 tokens."""
    work = train_step.Workload()
    assert work.gemm_flops == 6 * 2048 * (8 * (4 * 512**2 + 3 * 512 * 1376) + 512 * 32000)
    assert sum(w.numel() for w in train_step.weights(work).values()) == 58_073_600


@pytest.fixture
def pipeline(root: Path, monkeypatch):
    spec = importlib.util.spec_from_file_location("benchmarks_pipeline", root / "benchmarks" / "pipeline.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_the_executor_holds_what_the_simulator_says(pipeline, capsys) -> None:
    arguments = ["--pp", "2", "--micro-batches", "4", "--unit-ms", "1", "--rounds", "1"]
    assert pipeline.main([*arguments, "--schedules", "zbv,1f1b"]) == 0
    out = capsys.readouterr().out
    assert "zbv (v=2)" in out
    assert "4 (1), 4 (3)" in out  # activations, and weight gradients put off
    assert pipeline.main([*arguments, "--micro-batches", "3", "--schedules", "dualpipev"]) == 0
    assert "left out: dualpipev" in capsys.readouterr().out


def test_other_peaks_than_the_simulators_are_an_error(pipeline, monkeypatch, capsys) -> None:
    monkeypatch.setattr(pipeline, "measure", lambda *_, **__: pipeline.Measured([1.0], (9, 9), (0, 0)))
    assert pipeline.main(["--pp", "2", "--schedules", "1f1b"]) == 1
    assert "1f1b: (9, 9) live" in capsys.readouterr().err
