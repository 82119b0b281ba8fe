"""Frozen specs that plugins of mcore-cli return. This module imports no torch and no click."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CommandSpec:
    """A command ``mcore NAME``: ``load()`` returns the click command, and runs only when the command is used.

    ``summary`` is its line in ``mcore --help``.
    """

    name: str
    load: Callable[[], Any]
    summary: str = ""


@dataclass(frozen=True)
class CallbackSpec:
    """A callback of every run: ``build(config)`` takes the ``RunConfig`` and returns the callback, or None."""

    name: str
    build: Callable[..., Any]
    summary: str = ""
