"""Frozen specs that plugins of mcore-parallel return. This module imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ScheduleSpec:
    """A pipeline schedule: ``plan(num_stages, num_micro_batches)`` returns each rank's list of compute actions.

    ``num_chunks`` is the number of model chunks a rank holds (1 without virtual stages).
    """

    name: str
    plan: Callable[..., Any]
    num_chunks: int = 1
    summary: str = ""


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer: ``build(groups, config)`` returns a ``torch.optim.Optimizer`` over flat shards.

    With ``config``, a pydantic model of the optimizer's own settings, those become flags and a section of recipes under
    ``name``, and ``build`` gets the section as the keyword ``settings``.

    ``groups`` are torch parameter groups (``params``, ``weight_decay``, ``lr``); ``config`` the ``OptimizerConfig``.
    ``slots`` are the names of its per-element state tensors, in the words of its ``state`` entries.
    """

    name: str
    build: Callable[..., Any]
    slots: tuple[str, ...] = ()
    config: type | None = None
