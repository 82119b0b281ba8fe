"""The tree: default < family < recipe < flag; what is printed reads back to the same tree; all mistakes at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcore_cli.config import RunConfig
from mcore_cli.dump import to_yaml
from mcore_cli.errors import UserError
from mcore_cli.options import Flag, flags_of, sections_of
from mcore_cli.resolve import complete, override, resolve, run_tree
from mcore_parallel.config import Section
from mcore_parallel.plugins import PluginManager, hookimpl
from mcore_parallel.specs import OptimizerSpec


def test_precedence(tmp_path: Path, manager) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("model: {model: llama, normalization: LayerNorm, num_layers: 3}\n")
    config = resolve(str(path), {"num_layers": "5"}, manager).config
    assert config.model.hidden_size == 768  # default
    assert config.model.swiglu  # family
    assert config.model.normalization == "LayerNorm"  # recipe over family
    assert config.model.num_layers == 5  # flag over recipe


def test_only_given_flags_override(manager) -> None:
    plain = resolve("quickstart", {}, manager).config
    assert resolve("quickstart", {"lr": "1e-5"}, manager).config.train == plain.train


def test_a_flag_can_choose_the_family(manager) -> None:
    config = resolve(None, {"model": "llama"}, manager).config
    assert config.model.position_embedding_type == "rope"
    assert not config.model.tied


def test_an_unknown_family_is_told(manager) -> None:
    problem = resolve(None, {"model": "lama"}, manager).problems[0]
    assert problem == "--model 'lama': no such model family; did you mean llama? (known: gpt, llama)"


def test_all_mistakes_are_collected(tmp_path: Path, manager) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("train:\n  seed: -4\n  bogus: 1\nmodel:\n  num_layers: true\n  bf16: 7\n")
    given = {"lr": "nan", "lr_decay_style": "cosin", "hidden_size": "big", "adam_beta1": "1"}
    problems = resolve(str(path), given, manager).problems
    assert set(problems) == {
        f"{path}:3: section train has no field 'bogus'",
        f"--seed -4 ({path}:2): must be greater than or equal to 0",
        f"--num-layers True ({path}:5): must be a number or text, not true or false",
        f"--bf16 7 ({path}:6): must be a valid boolean, unable to interpret input",
        "--lr 'nan': must be a finite number",
        "--lr-decay-style 'cosin': must be one of constant, linear, cosine, inverse-square-root, WSD; "
        "did you mean cosine?",
        "--hidden-size 'big': must be a valid integer, unable to parse string as an integer",
        "--adam-beta1 '1': must be less than 1",
    }


def test_refused_values_are_left_out(manager) -> None:
    resolution = resolve("quickstart", {"num_layers": "x", "hidden_size": "256"}, manager)
    assert len(resolution.problems) == 1
    assert (resolution.config.model.num_layers, resolution.config.model.hidden_size) == (
        12,
        256,
    )  # the default, as if it had not been given


def test_lists_may_be_written_short(tmp_path: Path, manager) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("data: {data_path: one}\n")
    assert resolve(str(path), {}, manager).config.data.data_path == ["one"]
    path.write_text("data: {data_path: [0.25, a, 3, b]}\n")
    assert resolve(str(path), {}, manager).config.data.data_path == ["0.25", "a", "3", "b"]


def test_complete_fills_what_other_sections_decide(manager) -> None:
    given = {"seq_length": 96, "vocab_file": "v", "merge_file": "m", "name": "trial", "micro_batch_size": 3}
    config = complete(resolve(None, {**given, "tensor_model_parallel_size": 2}, manager).config, 8)
    assert config.model.max_position_embeddings == 96
    assert config.data.tokenizer_type == "GPT2BPETokenizer"
    assert config.checkpoint.save == "runs/trial"
    assert config.train.global_batch_size == 12
    assert complete(config, 8) == config


def test_complete_leaves_the_batch_open_on_ranks_that_do_not_divide(manager) -> None:
    config = resolve(None, {"tensor_model_parallel_size": 4}, manager).config
    assert complete(config, 6).train.global_batch_size is None
    assert complete(config, 2).train.global_batch_size is None


def test_override_changes_only_what_is_given(manager) -> None:
    config = resolve("quickstart", {}, manager).config
    changed = override(config, {"seq_length": "64", "nproc_per_node": None})
    assert changed.data.seq_length == 64
    assert changed.model_copy(update={"data": config.data}) == config
    with pytest.raises(UserError, match="--seq-length '0'"):
        override(config, {"seq_length": "0"})


FLAGS = flags_of(RunConfig)
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)
ODD_WORDS = st.sampled_from(["yes", "null", "1e3", "0x1f", "1:30", "~", " a ", "a: b", "#", "'", '"', "- x", "none"])


def values(flag: Flag) -> st.SearchStrategy[Any]:
    info = sections_of(RunConfig)[flag.section].model_fields[flag.field]
    if flag.kind == "switch":
        return st.booleans()
    if flag.kind == "list":
        return st.lists(WORDS | ODD_WORDS, max_size=4)
    if flag.choices:
        return st.sampled_from(flag.choices)
    bounds = {type(item).__name__: item for item in info.metadata}
    if flag.metavar == "INTEGER":
        return st.integers(1, getattr(bounds.get("Le"), "le", 2**20))
    if flag.metavar == "NUMBER":
        low = getattr(bounds.get("Ge"), "ge", 1e-12)
        return st.floats(low, 0.99 if "Lt" in bounds or "Le" in bounds else 1e12, allow_nan=False)
    return WORDS | ODD_WORDS


TEXT = {"model": st.sampled_from(["gpt", "llama"]), "name": st.from_regex(r"[a-z0-9 _-]{1,8}", fullmatch=True)}
FIELDS = st.fixed_dictionaries({}, optional={f.field: TEXT.get(f.field, values(f)) for f in FLAGS})


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(fields=FIELDS)
def test_what_is_printed_reads_back_to_the_same_tree(fields: dict[str, Any], manager, tmp_path: Path) -> None:
    fields.setdefault("rope_scaling_factor", 2.0)
    fields["rope_scaling_factor"] = max(1.0, fields["rope_scaling_factor"])
    resolution = resolve(None, fields, manager)
    assert resolution.problems == ()
    config = complete(resolution.config, 4)
    path = tmp_path / "printed.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    again = resolve(str(path), {}, manager)
    assert again.problems == ()
    assert again.config == config
    assert complete(again.config, 4) == config


@pytest.mark.parametrize("name", ["quickstart", "gpt2-xl", "llama3-405b"])
def test_print_config_is_a_recipe(name: str, mcore, tmp_path: Path) -> None:
    first = mcore("train", name, "--lr", "1.25e-4", "--data-path", "0.3", "a", "0.7", "b", "--print-config")
    assert (first.code, first.err) == (0, "")
    (tmp_path / "again.yaml").write_text(first.out)
    assert mcore("train", "again.yaml", "--print-config").out == first.out
    assert yaml.safe_load(first.out)["data"]["data_path"] == ["0.3", "a", "0.7", "b"]


class ShampooConfig(Section):
    """A third party's own section."""

    shampoo_block: int = 16


class Shampoo:
    """A third party's plugin."""

    @hookimpl
    def mcore_optimizers(self) -> list[OptimizerSpec]:
        return [OptimizerSpec("shampoo", build=list, config=ShampooConfig)]


def test_a_plugins_section_has_flags_and_recipes(tmp_path: Path) -> None:
    manager = PluginManager()
    manager.load_entry_points()
    manager.register(Shampoo(), name="shampoo")
    tree = run_tree(manager)
    assert "--shampoo-block" in [flag.name for flag in flags_of(tree)]
    path = tmp_path / "r.yaml"
    path.write_text("shampoo: {shampoo_block: 8}\n")
    assert resolve(str(path), {}, manager).config.shampoo.shampoo_block == 8
    assert resolve(str(path), {"shampoo_block": "4"}, manager).config.shampoo.shampoo_block == 4


def test_without_plugins_the_tree_is_the_plain_one(manager) -> None:
    assert run_tree(manager) is RunConfig
