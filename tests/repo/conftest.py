"""The source tree as the structure tests see it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Source:
    """One Python file of the repository."""

    root: Path
    path: Path

    @property
    def where(self) -> str:
        """Path relative to the repository."""
        return self.path.relative_to(self.root).as_posix()

    @property
    def shipped(self) -> bool:
        """Whether the file belongs to a package (not to tests, docs or benchmarks)."""
        return "src" in self.path.relative_to(self.root).parts

    @property
    def module(self) -> str:
        """Dotted import name of a shipped file."""
        parts = self.path.relative_to(self.root).with_suffix("").parts
        parts = parts[parts.index("src") + 1 :]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def text(self) -> str:
        """Contents."""
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        """Syntax tree."""
        return ast.parse(self.text, filename=self.where)


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def sources(root: Path) -> list[Source]:
    """Every Python file of packages, plugins, benchmarks, examples, docs and tests."""
    folders = ("packages", "plugins", "benchmarks", "examples", "docs", "tests")
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    hidden = {"build", "dist", "__pycache__", ".venv", "venv"}
    return [Source(root, path) for path in paths if not hidden & set(path.relative_to(root).parts)]


@pytest.fixture(scope="session")
def shipped(sources: list[Source]) -> list[Source]:
    """The files that users install."""
    return [source for source in sources if source.shipped]
