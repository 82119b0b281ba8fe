"""Asking for help costs nothing: no torch, and for the front page not even the configuration."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from mcore_cli.main import run
try:
    code = run(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
loaded = [name for name in ("torch", "numpy", "pydantic", "yaml", "rich", "tokenizers") if name in sys.modules]
print("loaded:", *loaded)
sys.exit(code)
"""


def loaded_by(*arguments: str, code: int = 0) -> set[str]:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_the_front_page_loads_nothing_heavy() -> None:
    assert loaded_by("--help") == set()


@pytest.mark.parametrize("arguments", [("train", "--help"), ("data", "prepare", "--help"), ("eval", "--help")])
def test_help_of_commands_loads_no_torch(arguments: tuple[str, ...]) -> None:
    assert "torch" not in loaded_by(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "quickstart", "--print-config"),
        ("recipes",),
        ("plugins", "list"),
        ("schedule", "list"),
        ("schedule", "compare", "--pp", "4", "--micro-batches", "8"),
        ("schedule", "show", "zbv", "--pp", "4", "--micro-batches", "8", "--out", "zbv.svg"),
    ],
)
def test_looking_loads_no_torch(arguments: tuple[str, ...]) -> None:
    assert "torch" not in loaded_by(*arguments)


def test_refusing_loads_no_torch() -> None:
    assert "torch" not in loaded_by("train", "quickstart", "--num-layers", "7", "--nproc-per-node", "3", code=2)
