"""Flags: every field has one, it sets that field and nothing else, and what is mistyped is told all at once."""

from __future__ import annotations

from typing import Any

import click
import pytest
from pydantic import create_model

from mcore_cli.commands.train import train
from mcore_cli.config import RunConfig
from mcore_cli.options import PROBLEMS, Flag, canonical, flags_of, given_flags, normalise, sections_of
from mcore_cli.resolve import resolve
from mcore_parallel.config import Section

FLAGS = flags_of(RunConfig)
# Fields whose text is a name that must be registered, or obeys a pattern.
NAMES = {"model": "llama", "name": "trial"}


def parsed(*arguments: str) -> click.Context:
    return train.make_context("train", list(arguments))


def given(*arguments: str) -> dict[str, Any]:
    ctx = parsed(*arguments)
    assert ctx.meta[PROBLEMS] == []
    return given_flags(ctx)


def sample(flag: Flag) -> tuple[list[str], Any]:
    """Arguments that set ``flag`` to something else than its default, and the value they mean."""
    default = sections_of(RunConfig)[flag.section].model_fields[flag.field].get_default(call_default_factory=True)
    if flag.kind == "switch":
        return [flag.negative if default else flag.name], not default
    if flag.kind == "list":
        return [flag.name, "0.3", "a", "0.7", "b"], ["0.3", "a", "0.7", "b"]
    if flag.choices:
        choice = next(choice for choice in flag.choices if choice != default)
        return [flag.name, choice], choice
    value = {"INTEGER": 7, "NUMBER": 0.5 if default != 0.5 else 0.25, "TEXT": NAMES.get(flag.field, "words")}[
        flag.metavar
    ]
    if flag.field == "rope_scaling_factor":
        value = 2.0
    return [flag.name, str(value)], value


@pytest.mark.parametrize("flag", FLAGS, ids=[flag.field for flag in FLAGS])
def test_every_field_can_be_set_by_its_flag(flag: Flag, manager) -> None:
    arguments, value = sample(flag)
    fields = given(*arguments)
    assert set(fields) == {flag.field}
    resolution = resolve(None, fields, manager)
    assert resolution.problems == ()
    assert getattr(getattr(resolution.config, flag.section), flag.field) == value


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.choices], ids=lambda flag: flag.field)
def test_a_bogus_choice_lists_the_choices(flag: Flag, mcore) -> None:
    outcome = mcore("train", "quickstart", flag.name, "bogus")
    assert outcome.code == 2
    line = next(line for line in outcome.err.splitlines() if flag.name in line)
    assert "'bogus'" in line
    assert all(choice in line for choice in flag.choices)


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.is_optional], ids=lambda flag: flag.field)
def test_none_unsets_an_optional_field(flag: Flag) -> None:
    assert given(flag.name, "none") == {flag.field: None}


def test_there_are_flags_for_all_sections() -> None:
    assert {flag.section for flag in FLAGS} == set(RunConfig.model_fields)
    assert len(FLAGS) == sum(len(model.model_fields) for model in sections_of(RunConfig).values())


def test_names_are_those_of_the_fields() -> None:
    odd = {flag.field: flag.name for flag in FLAGS if flag.name != "--" + flag.field.replace("_", "-")}
    assert odd == {
        "override_opt_param_scheduler": "--override-opt_param-scheduler",
        "use_checkpoint_opt_param_scheduler": "--use-checkpoint-opt_param-scheduler",
    }


def test_every_flag_has_help() -> None:
    assert [flag.name for flag in FLAGS if not flag.help] == []


def test_two_fields_of_one_name_are_refused() -> None:
    first = create_model("First", __base__=Section, lr=(float, 0.1))
    tree = create_model("Tree", __base__=RunConfig, mine=(first, first()))
    with pytest.raises(ValueError, match=r"--lr is both optimizer\.lr and mine\.lr"):
        flags_of(tree)


def test_an_off_switch_that_is_another_flag_is_refused() -> None:
    first = create_model("First", __base__=Section, load_optim=(bool, False))
    tree = create_model("Tree", __base__=RunConfig, mine=(first, first()))
    with pytest.raises(ValueError, match=r"--load-optim is both"):
        flags_of(tree)


def test_a_no_flag_is_turned_off_without_doubling() -> None:
    assert given("--no-load-optim") == {"no_load_optim": True}
    assert given("--load-optim") == {"no_load_optim": False}


@pytest.mark.parametrize("flag", FLAGS, ids=[flag.field for flag in FLAGS])
def test_underscores_and_dashes_mean_the_same(flag: Flag) -> None:
    arguments, _ = sample(flag)
    for respell in (lambda name: "--" + name[2:].replace("-", "_"), canonical):
        assert given(respell(arguments[0]), *arguments[1:]) == given(*arguments)


def test_a_value_may_be_attached() -> None:
    assert given("--lr=1e-3", "--nproc_per_node=4") == {"lr": "1e-3", "nproc_per_node": "4"}


def test_the_last_of_a_repeated_flag_wins() -> None:
    assert given("--lr", "1", "--lr", "2") == {"lr": "2"}


def test_a_list_flag_takes_all_up_to_the_next_flag() -> None:
    assert given("--data-path", "0.3", "a", "0.7", "b", "--bf16") == {
        "data_path": ["0.3", "a", "0.7", "b"],
        "bf16": True,
    }
    assert given("--data-path", "a", "--data-path=b", "--data_path", "c", "d") == {"data_path": ["a", "b", "c", "d"]}


def test_the_recipe_comes_before_a_list_flag() -> None:
    ctx = parsed("quickstart", "--data-path", "a", "b")
    assert ctx.params["recipe"] == "quickstart"


def test_negative_numbers_are_values() -> None:
    assert given("--min-lr", "-1") == {"min_lr": "-1"}


def test_all_unknown_flags_are_told_with_the_nearest() -> None:
    problems = parsed("--lrr", "1", "--hiden-size=3", "--zzzzzz", "--bf16").meta[PROBLEMS]
    assert problems == [
        "unknown flag --lrr; did you mean --lr?",
        "unknown flag --hiden-size; did you mean --hidden-size?",
        "unknown flag --zzzzzz",
    ]


@pytest.mark.parametrize(
    ("short", "flag"), [("--tp", "--tensor-model-parallel-size"), ("--gbs", "--global-batch-size")]
)
def test_abbreviations_are_understood_as_hints(short: str, flag: str) -> None:
    assert parsed(short, "2").meta[PROBLEMS] == [f"unknown flag {short}; did you mean {flag}?"]


def test_the_number_of_an_unknown_flag_is_no_recipe() -> None:
    assert parsed("--tp", "2").params["recipe"] is None
    assert parsed("--tpp", "quickstart").params["recipe"] == "quickstart"


def test_missing_and_needless_values_are_told() -> None:
    assert parsed("--lr", "--bf16=1", "--data-path").meta[PROBLEMS] == [
        "--lr needs a value",
        "--bf16 takes no value (given '1'); use --bf16 or --no-bf16",
        "--data-path needs a value",
    ]


def test_everything_after_a_double_dash_is_left_alone() -> None:
    option = click.Option(["--name"])
    assert normalise(["--name", "a", "--", "--bogus"], [option]) == (["--name", "a", "--", "--bogus"], [])


def test_help_shows_every_flag_under_its_section(mcore) -> None:
    text = mcore("train", "--help").out
    words = set(text.replace(",", " ").split())
    assert [name for flag in FLAGS for name in flag.names if name not in words] == []
    headings = [line.rstrip(":") for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Options", "Parallel", "Optimizer", "Model", "Data", "Checkpoint", "Train"]
