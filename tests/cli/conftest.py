"""Running the command line in this process, and checkpoints that cost nothing to make."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.find import step_name
from mcore_ckpt.manifest import COMMIT, MANIFEST, Manifest, encode_commit, encode_manifest
from mcore_cli.config import RunConfig
from mcore_cli.main import run
from mcore_cli.options import flags_of
from mcore_cli.resolve import complete, resolve
from mcore_parallel.plugins import PluginManager, plugin_manager

# A small legal run: tests break one thing of it at a time.
SMALL = {
    "num_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "seq_length": 32,
    "dataset": "stdlib",
    "micro_batch_size": 2,
    "global_batch_size": 16,
    "train_iters": 10,
}


@dataclass(frozen=True)
class Outcome:
    """What a command did: exit code and its two streams."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def manager() -> PluginManager:
    return plugin_manager(disabled=())


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder, and no launcher around."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def mcore(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run ``mcore`` with arguments in this process."""

    def call(*arguments: str) -> Outcome:
        capsys.readouterr()
        try:
            code = run(list(arguments))
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        out, err = capsys.readouterr()
        return Outcome(code, out, err)

    return call


@pytest.fixture
def small(manager: PluginManager) -> Callable[..., RunConfig]:
    """The small run with other fields, completed for a number of ranks."""

    def make(world_size: int = 1, **fields: Any) -> RunConfig:
        resolution = resolve(None, {**SMALL, **fields}, manager)
        assert resolution.problems == ()
        return complete(resolution.config, world_size)

    return make


@pytest.fixture(scope="session")
def known_flags() -> set[str]:
    return {name for flag in flags_of(RunConfig) for name in flag.names}


@pytest.fixture(scope="session")
def flags_in() -> Callable[[str], set[str]]:
    """The flags that a text names."""
    return lambda text: set(re.findall(r"--[a-zA-Z][\w-]*\w", text))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Commit a checkpoint without arrays into a folder; returns the folder."""

    def make(step: int = 4, *, root: str = "ckpt", **state: Any) -> Path:
        folder = tmp_path / root / step_name(step)
        folder.mkdir(parents=True)
        manifest = Manifest(step, "a", world_size=1, num_cells=0, num_bytes=0, files={}, state=state)
        text = encode_manifest(manifest)
        (folder / MANIFEST).write_bytes(text)
        (folder / COMMIT).write_bytes(encode_commit(manifest, text))
        return folder.parent

    return make
