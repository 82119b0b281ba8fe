"""Packages: versions, ranges, files that every distribution ships, and one command that installs them all."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def projects(root: Path) -> dict[str, tuple[Path, dict]]:
    files = [path for folder in ("packages", "plugins") for path in sorted((root / folder).glob("*/pyproject.toml"))]
    loaded = {path.parent: tomllib.loads(path.read_text()) for path in files}
    return {data["project"]["name"]: (folder, data) for folder, data in loaded.items()}


def test_the_five_packages_and_the_template_are_there(projects) -> None:
    expected = {"mcore-parallel", "mcore-models", "mcore-data", "mcore-ckpt", "mcore-cli", "mcore-plugin-example"}
    assert expected <= set(projects)


def test_distribution_folder_and_import_name_agree(projects) -> None:
    for name, (folder, data) in projects.items():
        module = name.replace("-", "_")
        assert folder.name == name
        assert (folder / "src" / module / "py.typed").exists(), f"{name} ships no py.typed"
        assert data["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == [f"src/{module}"]


def test_every_distribution_has_a_readme_and_a_changelog_of_its_version(projects) -> None:
    for name, (folder, data) in projects.items():
        assert (folder / data["project"]["readme"]).read_text().strip(), f"{name} has an empty README"
        assert data["project"]["version"] in (folder / "CHANGELOG.md").read_text(), f"{name}: version not in CHANGELOG"


def test_siblings_are_asked_for_by_minor_range(projects) -> None:
    for name, (_, data) in projects.items():
        for requirement in data["project"]["dependencies"]:
            sibling = re.match(r"mcore-\w+", requirement)
            if sibling is None:
                continue
            major, minor, *_ = projects[sibling[0]][1]["project"]["version"].split(".")
            assert requirement == f"{sibling[0]}>={major}.{minor},<{major}.{int(minor) + 1}", f"{name}: {requirement}"


def test_torch_is_pinned_in_requirements_only(root: Path, projects) -> None:
    lines = [line for line in (root / "requirements.txt").read_text().splitlines() if line and line[0] != "#"]
    assert re.fullmatch(r"torch==\d+\.\d+\.\d+", lines[0])
    for name, (_, data) in projects.items():
        pins = [r for r in data["project"]["dependencies"] if r.startswith("torch") and "==" in r]
        assert pins == [], f"{name} pins torch"


def test_one_command_installs_every_distribution(root: Path, projects) -> None:
    lines = (root / "requirements.txt").read_text().splitlines()
    asked = {line.removeprefix("-e ").strip() for line in lines if line.startswith("-e ")}
    assert asked == {folder.relative_to(root).as_posix() for folder, _ in projects.values()}
    assert "-r requirements.txt" in (root / "requirements-dev.txt").read_text().splitlines()


def test_every_hook_file_and_builtin_is_declared(projects) -> None:
    """A hookspecs.py or builtin.py that no entry point names would silently never load."""
    for name, (folder, data) in projects.items():
        module = name.replace("-", "_")
        points = data["project"].get("entry-points", {})
        for stem, group in (("hookspecs", "mcore.hookspecs"), ("builtin", "mcore"), ("plugin", "mcore")):
            if (folder / "src" / module / f"{stem}.py").exists():
                assert f"{module}.{stem}" in points.get(group, {}).values(), f"{name}: {stem}.py is not in {group}"


def test_tools_cover_every_distribution(root: Path, projects) -> None:
    """The type checker's path and the import contracts list packages by name; a new one must join them."""
    tools = tomllib.loads((root / "pyproject.toml").read_text())["tool"]
    modules = {name.replace("-", "_") for name in projects}
    assert set(tools["importlinter"]["root_packages"]) == modules
    assert {Path(entry).parent.name for entry in tools["mypy"]["mypy_path"]} == set(projects)
    assert set(tools["ruff"]["lint"]["isort"]["known-first-party"]) == modules
    plugins = {name.replace("-", "_") for name, (folder, _) in projects.items() if folder.parent.name == "plugins"}
    contracts = {contract["id"]: contract for contract in tools["importlinter"]["contracts"]}
    assert set(contracts["plugins-below-cli"]["source_modules"]) == plugins
    assert set(contracts["plugins-optional"]["forbidden_modules"]) == plugins
