"""Recipes: YAML files with sections of the run's tree, each value remembered with the line it came from. No torch.

Besides sections, a recipe may hold ``about`` (one line of description), ``base`` (a recipe it builds upon: a shipped
name, or a path beside it) and ``preset`` (a published size of its model family).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from mcore_cli.errors import UserError, did_you_mean
from mcore_cli.options import sections_of

SHIPPED = Path(__file__).parent / "recipes"
HEADER_KEYS = ("about", "base", "preset")
SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Given:
    """A value that a recipe gives, and where: ``FILE:LINE``."""

    value: Any
    where: str


@dataclass(frozen=True)
class Recipe:
    """A recipe with its bases merged in: ``values[section][field]``."""

    name: str
    about: str = ""
    preset: str | None = None
    values: Mapping[str, Mapping[str, Given]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def shipped_recipes() -> list[str]:
    """Names of the recipes in the package, sorted."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def find_recipe(name: str, beside: Path | None = None) -> Path:
    """The file of recipe ``name``: a path (relative ones are looked up in ``beside`` too), or a shipped name.

    Raises:
        UserError: there is no such recipe.
    """
    if name in shipped_recipes():
        return SHIPPED / f"{name}.yaml"
    folders = [Path()] if beside is None else [beside, Path()]
    for candidate in (folder / name for folder in folders):
        if candidate.is_file():
            return candidate
    if name.endswith(SUFFIXES) or "/" in name or "\\" in name:
        raise UserError(f"no recipe file {name}")
    known = shipped_recipes()
    raise UserError(
        f"no recipe {name!r}{did_you_mean(name, known)} (shipped: {', '.join(known)}; or give the path of a YAML file)"
    )


def load_recipe(name: str, tree: type[BaseModel]) -> Recipe:
    """Read recipe ``name`` and its bases against the sections of ``tree``.

    Unknown sections and fields are listed in ``Recipe.problems``, so that they can be told with others.

    Raises:
        UserError: a file is missing or is no YAML mapping, or bases go round in a circle.
    """
    return _load(find_recipe(name), tree, seen=())


def _load(path: Path, tree: type[BaseModel], seen: tuple[Path, ...]) -> Recipe:
    if path.resolve() in seen:
        raise UserError(f"{path}: recipe is its own base: {' -> '.join(p.name for p in (*seen, path))}")
    node = _parse(path)
    header: dict[str, str] = {}
    values: dict[str, dict[str, Given]] = {}
    problems: list[str] = []
    for key, (value, line) in _entries(node, path).items():
        if key in HEADER_KEYS:
            header[key] = str(_construct(value, path))
        elif key not in sections_of(tree):
            known = [*sections_of(tree), *HEADER_KEYS]
            problems.append(f"{path}:{line}: unknown section {key!r}{_hint(key, known, tree)}")
        else:
            fields, found = _section(key, value, path, tree)
            values[key] = fields
            problems += found
    recipe = Recipe(path.stem, header.get("about", ""), header.get("preset"), values, tuple(problems))
    if "base" not in header:
        return recipe
    base = _load(find_recipe(header["base"], beside=path.parent), tree, (*seen, path.resolve()))
    return _merge(base, recipe)


def _merge(base: Recipe, over: Recipe) -> Recipe:
    sections = {*base.values, *over.values}
    values = {name: {**base.values.get(name, {}), **over.values.get(name, {})} for name in sections}
    problems = (*base.problems, *over.problems)
    return Recipe(over.name, over.about or base.about, over.preset or base.preset, values, problems)


def _section(key: str, node: yaml.Node, path: Path, tree: type[BaseModel]) -> tuple[dict[str, Given], list[str]]:
    known = sections_of(tree)[key].model_fields
    values: dict[str, Given] = {}
    problems: list[str] = []
    if isinstance(node, yaml.ScalarNode) and _construct(node, path) is None:
        return values, problems
    for name, (value, line) in _entries(node, path).items():
        where = f"{path}:{line}"
        if name in known:
            values[name] = Given(_construct(value, path), where)
        else:
            problems.append(f"{where}: section {key} has no field {name!r}{_hint(name, known, tree)}")
    return values, problems


def _hint(name: str, known: Any, tree: type[BaseModel]) -> str:
    owner = [section for section, model in sections_of(tree).items() if name in model.model_fields]
    if owner:
        return f"; it belongs in section {owner[0]}"
    return did_you_mean(name, known)


def _parse(path: Path) -> yaml.Node:
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise UserError(_one_line(path, error)) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file in UTF-8 (byte {error.start})") from None
    return node if node is not None else yaml.MappingNode("tag:yaml.org,2002:map", [])


def _one_line(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or " ".join(str(error).split())
    where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
    return f"{where}: not valid YAML: {what}"


def _entries(node: yaml.Node, path: Path) -> dict[str, tuple[yaml.Node, int]]:
    line = node.start_mark.line + 1 if node.start_mark is not None else 1
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path}:{line}: expected 'name: value' lines, found {str(_construct(node, path))[:40]!r}")
    entries: dict[str, tuple[yaml.Node, int]] = {}
    for key, value in node.value:
        name = str(_construct(key, path))
        if name in entries:
            raise UserError(
                f"{path}:{key.start_mark.line + 1}: {name!r} is given twice (first on line {entries[name][1]})"
            )
        entries[name] = (value, key.start_mark.line + 1)
    return entries


def _construct(node: yaml.Node, path: Path) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise UserError(_one_line(path, error)) from None
    finally:
        loader.dispose()
