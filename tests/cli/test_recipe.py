"""Recipes: found by name or path, built on each other, and wrong in ways that name the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_cli.config import RunConfig
from mcore_cli.errors import UserError
from mcore_cli.recipe import find_recipe, load_recipe, shipped_recipes
from mcore_cli.resolve import complete, resolve
from mcore_cli.rules.check import find_problems

EXPECTED = [
    *(f"gpt2-{size}" for size in ("large", "medium", "small", "xl")),
    *(f"llama2-{size}" for size in ("13b", "70b", "7b")),
    *(f"llama3-{size}" for size in ("405b", "70b", "8b")),
    "quickstart",
]
# Ranks on which a recipe's own layout stands.
RANKS = {"llama2-7b": 8, "llama2-13b": 8, "llama2-70b": 64, "llama3-8b": 8, "llama3-70b": 64, "llama3-405b": 224}


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def problems(path: str) -> tuple[str, ...]:
    return load_recipe(path, RunConfig).problems


def test_the_shipped_recipes() -> None:
    assert shipped_recipes() == EXPECTED


@pytest.mark.parametrize("name", EXPECTED)
def test_a_shipped_recipe_is_legal_on_its_layout(name: str, manager) -> None:
    resolution = resolve(name, {}, manager)
    assert resolution.problems == ()
    assert load_recipe(name, RunConfig).about
    assert resolution.config.train.name == name
    config = complete(resolution.config, RANKS.get(name, 1))
    # What only the user can give: a corpus, and the files of its tokenizer.
    rest = [p for p in find_problems(config, RANKS.get(name, 1), manager) if not p.startswith("[data]")]
    assert rest == []


def test_the_quickstart_needs_nothing(manager) -> None:
    config = complete(resolve("quickstart", {}, manager).config, 1)
    assert find_problems(config, 1, manager) == []


@pytest.mark.parametrize(("tp", "pp", "dp"), [(2, 2, 2), (4, 1, 2), (1, 4, 2), (1, 8, 1), (8, 1, 1), (2, 4, 1)])
@pytest.mark.parametrize("micro", [1, 2])
def test_the_quickstart_fits_every_layout(tp: int, pp: int, dp: int, micro: int, manager) -> None:
    given = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "micro_batch_size": micro}
    config = complete(resolve("quickstart", {**given, "sequence_parallel": tp > 1}, manager).config, tp * pp * dp)
    assert find_problems(config, tp * pp * dp, manager) == []
    assert config.train.global_batch_size // (micro * dp) >= 8


@pytest.mark.parametrize("iterations", [5, 20])
def test_the_quickstart_can_be_cut_short(iterations: int, manager) -> None:
    config = complete(resolve("quickstart", {"train_iters": iterations}, manager).config, 1)
    assert find_problems(config, 1, manager) == []


def test_an_unknown_name_has_a_hint() -> None:
    with pytest.raises(UserError, match=r"no recipe 'quikstart'; did you mean quickstart\?"):
        find_recipe("quikstart")


@pytest.mark.parametrize("name", ["nowhere.yaml", "folder/recipe"])
def test_a_missing_file_is_told(name: str) -> None:
    with pytest.raises(UserError, match=f"no recipe file {name}"):
        find_recipe(name)


def test_unknown_sections_and_fields_name_line_and_nearest(tmp_path: Path) -> None:
    path = write(tmp_path, "r.yaml", "modl:\n  num_layers: 2\nmodel:\n  hiden_size: 8\n  lr: 1\ntrain:\n")
    assert problems(path) == (
        f"{path}:1: unknown section 'modl'; did you mean model?",
        f"{path}:4: section model has no field 'hiden_size'; did you mean hidden_size?",
        f"{path}:5: section model has no field 'lr'; it belongs in section optimizer",
    )


def test_a_field_outside_its_section_is_sent_there(tmp_path: Path) -> None:
    path = write(tmp_path, "r.yaml", "num_layers: 2\n")
    assert problems(path) == (f"{path}:1: unknown section 'num_layers'; it belongs in section model",)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model: [1,\n", r"r\.yaml:2: not valid YAML: "),
        ("model:\n\tnum_layers: 2\n", r"r\.yaml:2: not valid YAML: "),
        ("- a\n- b\n", r"r\.yaml:1: expected 'name: value' lines, found "),
        ("model: llama\n", r"r\.yaml:1: expected 'name: value' lines, found 'llama'"),
        ("model:\n  num_layers: 2\n  num_layers: 3\n", r"r\.yaml:3: 'num_layers' is given twice \(first on line 2\)"),
        ("model:\n  num_layers: !!python/name:os.system x\n", r"r\.yaml:2: not valid YAML: could not determine"),
    ],
)
def test_a_corrupt_file_is_one_line(tmp_path: Path, text: str, told: str) -> None:
    path = write(tmp_path, "r.yaml", text)
    with pytest.raises(UserError, match=told) as caught:
        load_recipe(path, RunConfig)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"model: \xff\xfe")
    with pytest.raises(UserError, match="not a text file in UTF-8"):
        load_recipe(str(path), RunConfig)


def test_an_empty_file_is_an_empty_recipe(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, "r.yaml", ""), RunConfig).values == {}


def test_values_remember_their_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "r.yaml", "model:\n  num_layers: 2\n")
    given = load_recipe(path, RunConfig).values["model"]["num_layers"]
    assert (given.value, given.where) == (2, f"{path}:2")


def test_a_base_is_overridden_field_by_field(tmp_path: Path, manager) -> None:
    write(tmp_path, "first.yaml", "about: one\nbase: quickstart\nmodel:\n  num_layers: 4\n")
    path = write(tmp_path, "second.yaml", "base: first.yaml\ntrain:\n  train_iters: 3\n")
    config = resolve(path, {}, manager).config
    assert (config.model.num_layers, config.model.hidden_size) == (4, 128)
    assert (config.train.train_iters, config.train.name) == (3, "second")
    assert load_recipe(path, RunConfig).about == "one"


def test_bases_in_a_circle_are_told(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "base: b.yaml\n")
    path = write(tmp_path, "b.yaml", "base: a.yaml\n")
    with pytest.raises(UserError, match=r"recipe is its own base: b\.yaml -> a\.yaml -> b\.yaml"):
        load_recipe(path, RunConfig)


def test_an_unknown_preset_is_told(tmp_path: Path, manager) -> None:
    path = write(tmp_path, "r.yaml", "preset: llama9\nmodel:\n  model: llama\n")
    assert any("no size 'llama9'" in problem for problem in resolve(path, {}, manager).problems)
