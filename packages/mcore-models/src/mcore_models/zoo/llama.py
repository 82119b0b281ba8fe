"""The Llama family: Llama 2 (arXiv:2307.09288), Llama 3 and 3.1 (arXiv:2407.21783). Data only."""

from __future__ import annotations

from typing import Any

from mcore_models.specs import ModelSpec


def _size(layers: int, hidden: int, ffn: int, heads: int, groups: int | None = None, **fields: Any) -> dict[str, Any]:
    shared = {"group_query_attention": True, "num_query_groups": groups} if groups else {}
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        **shared,
        **fields,
    }


_LLAMA2: dict[str, Any] = {"vocab_size": 32000, "max_position_embeddings": 4096}
_LLAMA3: dict[str, Any] = {"vocab_size": 128256, "max_position_embeddings": 8192, "rotary_base": 500000.0}
_LLAMA31: dict[str, Any] = {
    **_LLAMA3,
    "max_position_embeddings": 131072,
    "use_rope_scaling": True,
    "rope_scaling_factor": 8.0,
    "rope_scaling_low_freq_factor": 1.0,
    "rope_scaling_high_freq_factor": 4.0,
    "rope_scaling_original_max_position_embeddings": 8192,
}
_SIZE_405B = _size(126, 16384, 53248, 128, 8, **_LLAMA31)

LLAMA = ModelSpec(
    name="llama",
    summary="Llama: rotary positions, RMSNorm, SwiGLU, grouped KV heads, no biases, untied embeddings",
    defaults={
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-5,
        "swiglu": True,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
    },
    presets={
        "llama2-7b": _size(32, 4096, 11008, 32, **_LLAMA2),
        "llama2-13b": _size(40, 5120, 13824, 40, **_LLAMA2),
        "llama2-70b": _size(80, 8192, 28672, 64, 8, **_LLAMA2),
        "llama3-8b": _size(32, 4096, 14336, 32, 8, **_LLAMA3),
        "llama3-70b": _size(80, 8192, 28672, 64, 8, **_LLAMA3),
        "llama3-405b": _SIZE_405B,  # exists as 3.1 only
        "llama3.1-8b": _size(32, 4096, 14336, 32, 8, **_LLAMA31),
        "llama3.1-70b": _size(80, 8192, 28672, 64, 8, **_LLAMA31),
        "llama3.1-405b": _SIZE_405B,
    },
)
