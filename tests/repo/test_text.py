"""Prose: links lead somewhere, paths stay in the repository, every hook is documented."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FOLDERS = ("docs", "packages", "plugins", "benchmarks", "examples", "tests", ".ci")
TEXT = {".md", ".py", ".toml", ".yaml", ".txt", ".json", ".sh", ""}


@pytest.fixture(scope="module")
def pages(root: Path) -> list[Path]:
    below = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.md"))]
    return [*sorted(root.glob("*.md")), *below]


@pytest.fixture(scope="module")
def texts(root: Path) -> list[Path]:
    below = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*"))]
    files = [path for path in [*sorted(root.glob("*")), *below] if path.is_file() and path.suffix in TEXT]
    return [path for path in files if "__pycache__" not in path.parts]


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def test_links_lead_somewhere(root: Path, pages: list[Path]) -> None:
    dead = []
    for page in pages:
        for target in LINK.findall(without_code(page.read_text())):
            if "://" in target or target.startswith(("#", "mailto:")):
                continue
            resolved = (page.parent / target.split("#")[0]).resolve()
            if not (resolved.exists() and resolved.is_relative_to(root)):
                dead.append(f"{page.relative_to(root)}: {target}")
    assert dead == []


def test_no_text_leads_out_of_the_repository(root: Path, texts: list[Path]) -> None:
    """A path that is right on one machine only: somebody's home, or a folder beside the checkout."""
    absolute = re.compile(r"(?<![\w.])(/home|/root|/Users)/")
    relative = re.compile(r"(?<![\w./])(?:\.\./)+[\w.-]+")
    found = []
    for path in texts:
        text = path.read_text(errors="replace")
        found += [f"{path.relative_to(root)}: {m[0]}" for m in absolute.finditer(text)]
        if path.is_relative_to(root / "tests"):
            continue  # tests of path rules hold such paths as data
        leads = [m[0] for m in relative.finditer(text)]
        found += [f"{path.relative_to(root)}: {lead}" for lead in leads if not (path.parent / lead).exists()]
    assert found == []


def hooks(root: Path) -> list[str]:
    names = []
    for path in sorted((root / "packages").glob("*/src/*/hookspecs.py")):
        tree = ast.parse(path.read_text())
        names += [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list]
    return names


def test_every_hook_is_in_the_plugin_table(root: Path) -> None:
    names = hooks(root)
    page = (root / "docs" / "architecture.md").read_text()
    assert len(names) >= 3
    assert [name for name in names if f"`{name}`" not in page] == []


def test_the_front_page_fits_one_page(root: Path) -> None:
    page = (root / "README.md").read_text()
    assert len(page.splitlines()) <= 120
    for command in (
        "pip install -r requirements.txt && mcore train quickstart",
        "pip install -r requirements-dev.txt && pytest -n auto",
    ):
        assert command in page
