"""What importing costs: every module imports by itself, and those that describe a run need no torch."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

# Modules of a package that describe, validate or register: reading them must cost nothing.
TORCH_FREE_STEMS = {"config", "hookspecs", "specs", "builtin", "plugin"}
TORCH_FREE = {
    "mcore_parallel.plugins",
    "mcore_parallel.mesh",
    "mcore_parallel.placement",
    "mcore_parallel.traffic",
    "mcore_data.loader",
    "mcore_cli.main",
    "mcore_cli.options",
    "mcore_cli.recipe",
}
TORCH_FREE_PACKAGES = ("mcore_cli.rules", "mcore_data", "mcore_cli.commands")

BLOCKED = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise ImportError(f"{name} must not be imported here")

sys.meta_path.insert(0, Blocker())
failed = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(f"{name}: {error}")
print("\\n".join(failed))
"""
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def run(code: str, names: list[str]) -> str:
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def is_torch_free(module: str) -> bool:
    in_package = any(module == p or module.startswith(f"{p}.") for p in TORCH_FREE_PACKAGES)
    describes = module.count(".") == 1 and module.rsplit(".", 1)[-1] in TORCH_FREE_STEMS
    return in_package or describes or module in TORCH_FREE


def test_every_module_imports(shipped) -> None:
    names = [source.module for source in shipped if source.path.name != "__main__.py"]
    assert len(names) > 30
    run(IMPORT_ALL, names)


def test_descriptions_import_no_torch(shipped) -> None:
    names = [source.module for source in shipped if is_torch_free(source.module)]
    assert {"mcore_parallel.config", "mcore_models.config", "mcore_ckpt.config", "mcore_cli.config"} <= set(names)
    assert run(BLOCKED, names) == ""


def test_the_blocker_blocks() -> None:
    assert "torch must not be imported here" in run(BLOCKED, ["mcore_parallel.axis"])


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_the_command_line_answers_without_torch(argument: str) -> None:
    code = (
        "import sys\n"
        "from mcore_cli.main import main\n"
        "try:\n    main([sys.argv[1]])\n"
        "except SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    assert "mcore" in run(code, [argument])


def imported(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_the_trainer_knows_no_command_line(shipped) -> None:
    """Scripts call the trainer without the command line, so neither it nor what it is built from may import click."""
    library = {"mcore_cli.trainer", "mcore_cli.build", "mcore_cli.callbacks", "mcore_cli.config"}
    found = {source.module: imported(source.tree) for source in shipped if source.module in library}
    assert "mcore_cli.trainer" in found
    assert [name for name, imports in found.items() if "click" in imports] == []


def test_only_the_collectives_talk(shipped) -> None:
    """All communication goes through one file, so that it can be counted and checked."""
    talking = {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "batch_isend_irecv"}
    allowed = {"mcore_parallel.collectives"}
    found = []
    for source in shipped:
        if source.module in allowed or ".testing" in source.module:
            continue
        for node in ast.walk(source.tree):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in talking
                and isinstance(node.value, ast.Name)
                and node.value.id == "dist"
            ):
                found.append(f"{source.where}:{node.lineno}: dist.{node.attr}")
    assert found == []
