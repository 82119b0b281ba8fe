"""The tree of a run from model family, recipe and flags: default < family < recipe < flag. No torch."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, Field, ValidationError, create_model

from mcore_cli.config import RunConfig
from mcore_cli.errors import UserError, did_you_mean
from mcore_cli.options import Flag, flag_name, flags_of, sections_of
from mcore_cli.recipe import Given, Recipe, load_recipe
from mcore_data.config import DataConfig
from mcore_data.tokenizers.build import tokenizer_type
from mcore_parallel.plugins import PluginManager, Registry

Values = dict[str, dict[str, Given]]


def run_tree(manager: PluginManager) -> type[RunConfig]:
    """``RunConfig`` with one more section for each plugin spec that has a ``config`` of its own, under its name."""
    specs = manager.collect("mcore_optimizers")
    extra: dict[str, Any] = {
        spec.name: (spec.config, Field(default_factory=spec.config))
        for spec in specs
        if spec.config is not None and spec.name not in RunConfig.model_fields
    }
    return create_model("RunConfig", __base__=RunConfig, **extra) if extra else RunConfig


@dataclass(frozen=True)
class Resolution:
    """A tree, and what is wrong with what it was made from: those values are left out of the tree."""

    config: RunConfig
    problems: tuple[str, ...] = ()


def resolve(recipe: str | None, given: Mapping[str, Any], manager: PluginManager) -> Resolution:
    """The run's tree from ``recipe`` and the fields that the user gave as flags.

    The problems are every unknown key and every value that its section refuses, with the flag, the value and the rule.

    Raises:
        UserError: the recipe cannot be read at all.
    """
    tree = run_tree(manager)
    loaded = load_recipe(recipe, tree) if recipe is not None else Recipe(name="")
    problems = list(loaded.problems)
    values = _overlay(loaded.values, given, flags_of(tree))
    family, found = _family(values, loaded.preset, manager)
    problems += found
    for name, value in family.items():
        values.setdefault("model", {}).setdefault(name, Given(value, ""))
    if loaded.name:
        values.setdefault("train", {}).setdefault("name", Given(loaded.name, ""))
    sections, found = validate(values, tree)
    return Resolution(tree(**sections), (*problems, *found))


def complete(config: RunConfig, world_size: int) -> RunConfig:
    """Fill the defaults that depend on other sections, so that the tree says what the run does.

    The save folder from the name, the longest position from the sequence, the tokenizer from its files and the global
    batch from micro-batch and data-parallel size, where ``world_size`` allows one.
    """
    data, model, train, checkpoint = config.data, config.model, config.train, config.checkpoint
    if model.max_position_embeddings is None:
        model = model.model_copy(update={"max_position_embeddings": data.seq_length})
    data = data.model_copy(update={"tokenizer_type": _tokenizer(data)})
    if checkpoint.save is None:
        checkpoint = checkpoint.model_copy(update={"save": str(Path("runs") / train.name)})
    replicas, rest = divmod(world_size, model_parallel_size(config))
    if train.global_batch_size is None and replicas > 0 and rest == 0:
        train = train.model_copy(update={"global_batch_size": train.micro_batch_size * replicas})
    return config.model_copy(update={"data": data, "model": model, "train": train, "checkpoint": checkpoint})


def _tokenizer(data: DataConfig) -> str | None:
    try:
        return tokenizer_type(data)
    except ValueError:
        return None  # the data rules say what is missing


def model_parallel_size(config: RunConfig) -> int:
    """Ranks that hold one copy of the model: tp x pp x cp."""
    parallel = config.parallel
    size = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    return size * parallel.context_parallel_size


def override(config: RunConfig, given: Mapping[str, Any]) -> RunConfig:
    """``config`` with the fields that the user gave as flags.

    Raises:
        UserError: every value that its section refuses.
    """
    values: Values = {
        section: {name: Given(getattr(getattr(config, section), name), "") for name in model.model_fields}
        for section, model in sections_of(type(config)).items()
    }
    sections, problems = validate(_overlay(values, given, flags_of(type(config))), type(config))
    if problems:
        raise UserError(*problems)
    return type(config)(**sections)


def validate(values: Values, tree: type[BaseModel]) -> tuple[dict[str, BaseModel], list[str]]:
    """Build every section of ``tree`` from the values it accepts; the second part lists all refusals, one line each."""
    sections: dict[str, BaseModel] = {}
    problems: list[str] = []
    for section, model in sections_of(tree).items():
        given = values.get(section, {})
        plain = {name: _adapt(entry.value, model.model_fields[name].annotation) for name, entry in given.items()}
        booleans = [name for name, value in plain.items() if _is_stray_boolean(value, model, name)]
        problems += [
            _told(name, given[name], model, "must be a number or text, not true or false") for name in booleans
        ]
        accepted = {name: value for name, value in plain.items() if name not in booleans}
        try:
            sections[section] = model.model_validate(accepted)
        except ValidationError as error:
            details = error.errors(include_url=False)
            problems += [_explain(detail, given, model) for detail in details]
            refused = {detail["loc"][0] for detail in details if detail["loc"]}
            sections[section] = model.model_validate({k: v for k, v in accepted.items() if k not in refused})
    return sections, problems


def _overlay(base: Mapping[str, Mapping[str, Given]], given: Mapping[str, Any], flags: list[Flag]) -> Values:
    values: Values = {section: dict(fields) for section, fields in base.items()}
    owners = {flag.field: flag.section for flag in flags}
    for name, value in given.items():
        values.setdefault(owners[name], {})[name] = Given(value, "")
    return values


def _family(values: Values, preset: str | None, manager: PluginManager) -> tuple[dict[str, Any], list[str]]:
    """The fields that the chosen model family (and its preset) fills, and what is wrong with the choice."""
    families = Registry("model", manager.collect("mcore_models"))
    chosen = values.get("model", {}).get("model", Given("gpt", ""))
    if not isinstance(chosen.value, str) or chosen.value not in families:
        hint = did_you_mean(str(chosen.value), families.names())
        return {}, [f"--model {chosen.value!r}: no such model family{hint} (known: {', '.join(families.names())})"]
    try:
        return dict(families[chosen.value].fields(preset)), []
    except ValueError as error:
        return {}, [str(error)]


def _is_stray_boolean(value: Any, model: type[BaseModel], name: str) -> bool:
    return isinstance(value, bool) and model.model_fields[name].annotation is not bool


def _adapt(value: Any, annotation: Any) -> Any:
    """A single value for a list field is a list of one; numbers in it (blend weights) are text."""
    inner = [part for part in get_args(annotation) if part is not type(None)]
    kind = inner[0] if get_origin(annotation) in (Union, types.UnionType) else annotation
    if get_origin(kind) is not list or value is None:
        return value
    items = value if isinstance(value, list) else [value]
    return [str(item) if isinstance(item, int | float) and not isinstance(item, bool) else item for item in items]


def _told(name: str, given: Given | None, model: type[BaseModel], rule: str) -> str:
    where = f" ({given.where})" if given is not None and given.where else ""
    value = "" if given is None else f" {given.value!r}" if isinstance(given.value, str) else f" {given.value}"
    return f"{flag_name(name, model.model_fields[name])}{value}{where}: {rule}"


def _explain(detail: Any, given: Mapping[str, Given], model: type[BaseModel]) -> str:
    name = str(detail["loc"][0]) if detail["loc"] else ""
    if name not in model.model_fields:
        return f"{' '.join(str(part) for part in detail['loc'])}: {detail['msg']}"
    entry = given.get(name)
    if detail["type"] == "literal_error":
        choices = _choices(model.model_fields[name].annotation)
        value = entry.value if entry is not None else detail["input"]
        return _told(name, entry, model, f"must be one of {', '.join(choices)}{did_you_mean(str(value), choices)}")
    return _told(name, entry, model, detail["msg"].replace("Input should be", "must be").replace("Value error, ", ""))


def _choices(annotation: Any) -> list[str]:
    parts = get_args(annotation)
    if any(get_args(part) for part in parts):
        return [choice for part in parts for choice in _choices(part)]
    return [str(part) for part in parts if part is not type(None)]
