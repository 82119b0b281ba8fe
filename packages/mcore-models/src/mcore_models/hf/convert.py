"""The HF architectures that mcore reads and writes, and the choice among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mcore_models.config import ModelConfig
from mcore_models.hf.architecture import Architecture
from mcore_models.hf.gpt2 import GPT2
from mcore_models.hf.llama import LLAMA, QWEN2

_ARCHITECTURES = {architecture.name: architecture for architecture in (GPT2, LLAMA, QWEN2)}


def architecture_of(hf_config: Mapping[str, Any]) -> Architecture:
    """The architecture that an HF ``config.json`` names.

    Raises:
        ValueError: none, or one that is not known here.
    """
    names = hf_config.get("architectures") or []
    known = [name for name in names if name in _ARCHITECTURES]
    if not known:
        raise ValueError(
            f"architectures {list(names)} are not supported; supported: {', '.join(sorted(_ARCHITECTURES))}"
        )
    return _ARCHITECTURES[known[0]]


def architecture_for(config: ModelConfig) -> Architecture:
    """The HF architecture that ``config`` can be exported as."""
    if config.position_embedding_type != "rope":
        return GPT2
    return QWEN2 if config.add_qkv_bias else LLAMA


def config_from_hf(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """``ModelConfig`` fields of an HF ``config.json``.

    Raises:
        ValueError: the architecture or a setting has no counterpart; settings are never dropped silently.
    """
    return architecture_of(hf_config).config_from_hf(hf_config)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """An HF ``config.json`` of ``config``.

    Raises:
        ValueError: no supported architecture is this model; the fields in the way are named.
    """
    return architecture_for(config).config_to_hf(config)


def from_hf_state(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Logical arrays by global name from an HF state dict; see :meth:`Architecture.from_hf_state`."""
    return architecture_for(config).from_hf_state(state, config)


def to_hf_state(arrays: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """HF state dict from logical arrays by global name; see :meth:`Architecture.to_hf_state`."""
    return architecture_for(config).to_hf_state(arrays, config)


def to_hf_names(config: ModelConfig) -> dict[str, str]:
    """The HF tensor that each logical array lies in."""
    return architecture_for(config).to_hf_names(config)
