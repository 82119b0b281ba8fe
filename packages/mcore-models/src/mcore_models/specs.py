"""Frozen specs of mcore-models: what plugins return and what a stage is. This module imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class KernelSpec:
    """A kernel set, chosen by ``--transformer-impl``: ``build()`` returns a :class:`mcore_models.kernels.KernelSet`."""

    name: str
    build: Callable[[], Any]
    summary: str = ""


@dataclass(frozen=True)
class ModelSpec:
    """A model family, chosen by ``--model``: field choices of ``ModelConfig``, and its published sizes as data.

    ``defaults`` are the fields that make the family what it is; a preset holds the fields of one size and wins over
    them.
    """

    name: str
    defaults: Mapping[str, Any]
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    summary: str = ""

    def fields(self, preset: str | None = None) -> dict[str, Any]:
        """``ModelConfig`` fields of the family, or of one of its sizes.

        Raises:
            ValueError: there is no such size; the text lists those there are.
        """
        if preset is None:
            return {"model": self.name, **self.defaults}
        if preset not in self.presets:
            raise ValueError(f"model {self.name!r} has no size {preset!r} (known: {', '.join(sorted(self.presets))})")
        return {"model": self.name, **self.defaults, **self.presets[preset]}


@dataclass(frozen=True)
class StageSpec:
    """The part of the model one pipeline stage holds.

    Layers ``first_layer : first_layer + num_layers`` (global numbers), the embedding if ``is_first``, the final norm
    and the output layer if ``is_last``.
    """

    first_layer: int
    num_layers: int
    is_first: bool
    is_last: bool

    @property
    def is_whole(self) -> bool:
        """Whether this stage is the whole model (pipeline size 1)."""
        return self.is_first and self.is_last


def holds_both_ends(stages: Sequence[StageSpec]) -> bool:
    """Whether the first and the last stage of the model are both among a rank's ``stages``."""
    return any(stage.is_first for stage in stages) and any(stage.is_last for stage in stages)


@dataclass(frozen=True)
class Recompute:
    """Full activation recomputation: ``uniform`` in chunks of ``num_layers`` layers, or ``block``: the first
    ``num_layers`` layers of the stage, each by itself."""

    method: Literal["uniform", "block"] = "uniform"
    num_layers: int = 1

    def chunks(self, num_stage_layers: int) -> list[tuple[int, int, bool]]:
        """``(begin, end, recomputed)`` over the layers of a stage, in order and without gaps."""
        if self.method == "uniform":
            starts = range(0, num_stage_layers, self.num_layers)
            return [(begin, min(begin + self.num_layers, num_stage_layers), True) for begin in starts]
        return [(i, i + 1, i < self.num_layers) for i in range(num_stage_layers)]
