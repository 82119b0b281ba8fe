"""The README of the package does what it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import ModuleType

import click

from mcore_cli.main import mcore as group
from mcore_parallel.plugins import PluginManager

PAGE = (Path(__file__).parents[2] / "packages" / "mcore-cli" / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)


def test_every_command_of_the_readme_exists(manager) -> None:
    lines = [line.split("#")[0] for block in blocks("") for line in block.splitlines() if line.startswith("mcore ")]
    assert len(lines) >= 8
    for line in lines:
        words = shlex.split(line)[1:]
        command: click.Command | None = group
        while words and isinstance(command, click.Group):
            command = command.get_command(click.Context(group, obj=manager), words.pop(0))
        assert command is not None, line
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= known, line


def test_the_printed_config_of_the_readme(mcore) -> None:
    line = next(line for block in blocks("") for line in block.splitlines() if "--print-config" in line)
    outcome = mcore(*shlex.split(line)[1:])
    assert outcome.code == 0
    assert "dataset: gpt" in outcome.out


def test_the_recipe_of_the_readme(mcore, tmp_path: Path) -> None:
    (tmp_path / "deeper.yaml").write_text(blocks("yaml")[0])
    outcome = mcore("train", "deeper.yaml", "--print-config")
    assert outcome.code == 0
    assert "num_layers: 16\n" in outcome.out
    assert "hidden_size: 128\n" in outcome.out


def test_the_plugin_of_the_readme(capsys) -> None:
    plugin = ModuleType("greeter")
    exec(blocks("python")[0], plugin.__dict__)
    manager = PluginManager()
    manager.load_entry_points()
    manager.register(plugin, name="greeter")
    group.main(["greet"], standalone_mode=False, obj=manager)
    assert capsys.readouterr().out == "hello\n"
