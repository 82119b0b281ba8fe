"""What a Hugging Face architecture is to mcore: a config mapping and a table of tensors, on whole arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_models.config import ModelConfig


@dataclass(frozen=True)
class Row:
    """One HF tensor: the logical arrays in it, one under the other, and their rows; ``transposed`` when HF keeps
    ``[in, out]``."""

    hf: str
    logical: tuple[str, ...]
    rows: tuple[int, ...] = ()
    transposed: bool = False


@dataclass(frozen=True)
class Architecture:
    """How one HF model class maps to mcore, both ways.

    ``ignored``: endings of HF keys that hold no parameters. ``tied_key``: HF's name of the output weight when tied.
    ``base_prefix``: what the keys of the bare model (without head) lack.
    """

    name: str
    config_from_hf: Callable[[Mapping[str, Any]], dict[str, Any]]
    config_to_hf: Callable[[ModelConfig], dict[str, Any]]
    table: Callable[[ModelConfig], list[Row]]
    embedding_key: str
    tied_key: str = "lm_head.weight"
    base_prefix: str = ""
    ignored: tuple[str, ...] = ()

    def from_hf_state(self, state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        """Logical arrays by global name, from an HF state dict.

        Raises:
            ValueError: tensors are missing, or there are some that the model has no place for; all are named.
        """
        state = self._normalised(state, config)
        table = self.table(config)
        wanted = {row.hf for row in table}
        problems = [f"missing {name}" for name in sorted(wanted - state.keys())]
        problems += [f"unexpected {name}" for name in sorted(state.keys() - wanted)]
        if problems:
            raise ValueError(f"the tensors are not those of this {self.name}: " + "; ".join(problems))
        return {name: part for row in table for name, part in _take_apart(row, state[row.hf])}

    def to_hf_state(self, arrays: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        """HF state dict (contiguous tensors; a tied output weight is left out) from logical arrays by global name."""
        return {row.hf: _put_together(row, arrays) for row in self.table(config)}

    def to_hf_names(self, config: ModelConfig) -> dict[str, str]:
        """The HF tensor that each logical array lies in."""
        return {name: row.hf for row in self.table(config) for name in row.logical}

    def _normalised(self, state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        kept = {name: tensor for name, tensor in state.items() if not name.endswith(self.ignored)}
        if self.base_prefix and self.embedding_key not in kept:
            kept = {self.base_prefix + name: tensor for name, tensor in kept.items()}
        output = kept.get(self.tied_key)
        if config.tied and output is not None:
            embedding = kept.get(self.embedding_key)
            if embedding is not None and not torch.equal(embedding, output):
                raise ValueError(f"{self.tied_key} differs from {self.embedding_key}, but the config ties them")
            del kept[self.tied_key]
        return kept


def _take_apart(row: Row, tensor: Tensor) -> list[tuple[str, Tensor]]:
    tensor = tensor.t() if row.transposed else tensor
    if len(row.logical) == 1:
        return [(row.logical[0], tensor)]
    if tensor.shape[0] != sum(row.rows):
        raise ValueError(f"{row.hf} has {tensor.shape[0]} outputs, but {' + '.join(map(str, row.rows))} are expected")
    return list(zip(row.logical, tensor.split(list(row.rows)), strict=True))


def _put_together(row: Row, arrays: Mapping[str, Tensor]) -> Tensor:
    parts = [arrays[name] for name in row.logical]
    tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (tensor.t() if row.transposed else tensor).contiguous()


def refuse_unless(config: Mapping[str, Any], expected: Mapping[str, tuple[Any, ...]], architecture: str) -> None:
    """Refuse settings that would be lost: each of ``expected`` must be absent or hold one of the given values.

    Raises:
        ValueError: all settings that do not, with the values that would do.
    """
    wrong = [
        f"{name} is {config[name]!r}, supported: {', '.join(map(repr, allowed))}"
        for name, allowed in expected.items()
        if name in config and config[name] not in allowed
    ]
    if wrong:
        raise ValueError(f"{architecture}: " + "; ".join(wrong))
