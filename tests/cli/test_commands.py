"""The small commands: recipes, plugins, data; and how errors of all kinds leave the process."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from mcore_cli import launch
from mcore_cli.commands.generate import sampling
from mcore_cli.commands.recipes import human_count
from mcore_cli.errors import RunFailed, UserError, is_user_error, problems_of
from mcore_cli.main import commands
from mcore_cli.main import mcore as group
from mcore_cli.specs import CommandSpec
from mcore_parallel.plugins import PluginManager, hookimpl


def test_recipes_are_listed_by_size(mcore) -> None:
    lines = mcore("recipes").out.splitlines()
    names = [line.split()[0] for line in lines]
    assert names[0] == "quickstart"
    assert names[-1] == "llama3-405b"
    sizes = {line.split()[0]: line.split()[1] for line in lines}
    assert sizes["gpt2-small"] == "124M"
    assert sizes["gpt2-xl"] == "1.6B"
    assert sizes["llama2-7b"] == "6.7B"
    assert sizes["llama3-8b"] == "8.0B"
    assert sizes["llama3-70b"] == "70.6B"
    assert sizes["llama3-405b"] == "406B"


def test_a_recipe_is_shown_as_written(mcore) -> None:
    assert mcore("recipes", "show", "quickstart").out.startswith("about: ")


@pytest.mark.parametrize(
    ("number", "text"), [(7, "7"), (1_542_528, "1.5M"), (124_439_808, "124M"), (7 * 10**12, "7.0T")]
)
def test_counts_for_people(number: int, text: str) -> None:
    assert human_count(number) == text


def test_plugins_are_listed_with_their_origin(mcore) -> None:
    outcome = mcore("plugins", "list")
    assert outcome.code == 0
    rows = [line.split() for line in outcome.out.splitlines()]
    assert rows[0] == ["kind", "name", "plugin", "distribution", "version", "about"]
    assert any(row[:5] == ["optimizer", "adam", "parallel", "mcore-parallel", "0.1.0"] for row in rows)
    assert any(row[:5] == ["command", "train", "cli", "mcore-cli", "0.1.0"] for row in rows)
    assert any(row[:5] == ["model", "llama", "models", "mcore-models", "0.1.0"] for row in rows)


def test_disabled_plugins_are_listed_as_such(mcore, monkeypatch) -> None:
    monkeypatch.setenv("MCORE_DISABLED_PLUGINS", "models")
    out = mcore("plugins", "list").out
    assert "plugin models of mcore-models (mcore_models.builtin) disabled by MCORE_DISABLED_PLUGINS" in out
    assert " llama " not in out


class Greeter:
    """A third party's command."""

    @hookimpl
    def mcore_cli_commands(self) -> list[CommandSpec]:
        return [
            CommandSpec("greet", lambda: click.Command("greet", callback=lambda: click.echo("hello")), "Say hello.")
        ]


def test_a_plugins_command_is_found_and_listed(capsys) -> None:
    manager = PluginManager()
    manager.load_entry_points()
    manager.register(Greeter(), name="greeter")
    assert "greet" in commands(manager)
    group.main(["greet"], standalone_mode=False, obj=manager)
    assert capsys.readouterr().out == "hello\n"
    group.main(["--help"], standalone_mode=False, obj=manager)
    assert "greet     Say hello." in capsys.readouterr().out


def test_a_broken_plugin_is_named_and_the_rest_goes_on(mcore, monkeypatch) -> None:
    from importlib import metadata

    real = [point for group in ("mcore", "mcore.hookspecs") for point in metadata.entry_points(group=group)]
    points = metadata.EntryPoints([*real, metadata.EntryPoint("broken", "nowhere_to_be_found", "mcore")])
    monkeypatch.setattr(metadata, "entry_points", lambda **wanted: points.select(**wanted) if wanted else points)
    outcome = mcore("recipes", "show", "quickstart")
    assert outcome.code == 0
    assert outcome.err == (
        "warning: plugin broken of unknown is skipped: ModuleNotFoundError: No module named 'nowhere_to_be_found'\n"
    )


def test_prepare_and_inspect(mcore, tmp_path: Path) -> None:
    text = tmp_path / "some.jsonl"
    text.write_text("".join(json.dumps({"text": words}) + "\n" for words in ("hello", "wide world")))
    byte = ("--tokenizer-type", "ByteTokenizer")
    made = mcore("data", "prepare", "--input", str(text), "--output-prefix", "out/my", *byte, "--append-eod")
    assert (made.code, made.err) == (0, "")
    assert made.out.splitlines()[0] == "2 documents, 17 tokens (uint16) with ByteTokenizer"
    assert (tmp_path / "out" / "my_text_document.idx").exists()
    plain = mcore("data", "inspect", "out/my", "--tokens", "5").out.splitlines()
    assert "2 documents" in plain[0]
    assert plain[1] == f"document 0: {' '.join(str(i) for i in b'hello')}"
    assert mcore("data", "inspect", "out/my", *byte).out.splitlines()[2] == "document 1: 'wide world'"


def test_prepare_takes_several_inputs(mcore, tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    made = mcore(
        "data", "prepare", "--input", "a.txt", "b.txt", "--output-prefix", "my", "--tokenizer_type", "ByteTokenizer"
    )
    assert made.out.startswith("2 documents, 10 tokens")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (0.7, 0.95, 1234)),
        ({"greedy": True}, (0.0, 1.0, 1234)),
        ({"temperature": 0.5}, (0.5, 0.95, 1234)),
        ({"top_p": 0.9, "seed": 3}, (0.7, 0.9, 3)),
    ],
)
def test_sampling(given, expected) -> None:
    flags = {"greedy": False, "temperature": None, "top_p": None, "seed": None, **given}
    assert sampling(flags.pop("greedy"), **flags) == expected


def test_the_no_op_of_megatrons_guides_is_noticed(mcore, monkeypatch) -> None:
    monkeypatch.setattr(launch, "run_ranks", lambda *_, **__: 0)
    outcome = mcore("train", "quickstart", "--use-mcore-models")
    assert (outcome.code, outcome.err) == (0, "note: --use-mcore-models has no effect, every model here is mcore's\n")
    assert mcore("train", "quickstart").err == ""


def test_the_exit_code_of_the_run_is_passed_through(mcore, monkeypatch) -> None:
    monkeypatch.setattr(launch, "run_ranks", lambda *_, **__: 137)
    assert mcore("train", "quickstart").code == 137
    assert mcore("verify", "quickstart").code == 137


def failing(error: BaseException):
    def fail(*_: object, **__: object) -> int:
        raise error

    return fail


def test_a_failed_run_is_one_line(mcore, monkeypatch) -> None:
    monkeypatch.setattr(launch, "run_ranks", failing(RunFailed("loss is nan at step 3")))
    outcome = mcore("train", "quickstart")
    assert (outcome.code, outcome.err) == (1, "error: loss is nan at step 3\n")


def test_an_interrupt_is_one_line(mcore, monkeypatch) -> None:
    monkeypatch.setattr(launch, "run_ranks", failing(KeyboardInterrupt()))
    outcome = mcore("train", "quickstart")
    assert (outcome.code, outcome.err.strip()) == (130, "interrupted")


@pytest.mark.parametrize("error", [ValueError("shapes differ"), KeyError("gone"), OSError(28, "No space left")])
def test_a_bug_keeps_its_traceback(error: Exception, mcore, monkeypatch) -> None:
    monkeypatch.setattr(launch, "run_ranks", failing(error))
    with pytest.raises(type(error)):
        mcore("train", "quickstart")


def raised(code: str, module: str) -> BaseException:
    try:
        exec(compile(code, module, "exec"), {"__name__": module})
    except Exception as error:
        return error
    raise AssertionError


def test_only_our_own_value_errors_are_for_users() -> None:
    assert is_user_error(raised("raise ValueError('x')", "mcore_data.blend"))
    assert not is_user_error(raised("raise ValueError('x')", "numpy.core"))
    assert not is_user_error(raised("raise TypeError('x')", "mcore_data.blend"))
    assert is_user_error(UserError("x"))
    missing = raised("open('nowhere')", "mcore_data.blend")
    assert is_user_error(missing)
    assert problems_of(missing) == ("nowhere: No such file or directory",)


def test_the_version(mcore) -> None:
    outcome = mcore("--version")
    assert (outcome.code, outcome.out) == (0, "mcore 0.1.0\n")
