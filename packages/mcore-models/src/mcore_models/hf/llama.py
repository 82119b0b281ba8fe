"""LlamaForCausalLM, and Qwen2ForCausalLM, which is the same with biases on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_models.config import ModelConfig
from mcore_models.hf.architecture import Architecture, Row, refuse_unless

_SCALING = {
    "rope_scaling_factor": "factor",
    "rope_scaling_low_freq_factor": "low_freq_factor",
    "rope_scaling_high_freq_factor": "high_freq_factor",
    "rope_scaling_original_max_position_embeddings": "original_max_position_embeddings",
}


def _rope_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    # transformers 5 nests everything in rope_parameters; before, rope_theta stood beside rope_scaling
    rope = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
    rope.update(config.get("rope_parameters") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    fields: dict[str, Any] = {"rotary_base": float(rope["rope_theta"] or 10000.0)}
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"rope partial_rotary_factor is {rope['partial_rotary_factor']}, supported: 1.0")
    if kind == "llama3":
        fields["use_rope_scaling"] = True
        fields.update({ours: rope[theirs] for ours, theirs in _SCALING.items()})
    elif kind != "default":
        raise ValueError(f"rope type {kind!r} is not supported; supported: 'default', 'llama3'")
    return fields


def _common_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    fields: dict[str, Any] = {
        "model": "llama",
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "kv_channels": config.get("head_dim"),
        "max_position_embeddings": config["max_position_embeddings"],
        "vocab_size": config["vocab_size"],
        "position_embedding_type": "rope",
        **_rope_from_hf(config),
        "normalization": "RMSNorm",
        "norm_epsilon": config["rms_norm_eps"],
        "swiglu": True,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "attention_dropout": float(config.get("attention_dropout") or 0.0),
        "init_method_std": config.get("initializer_range", 0.02),
    }
    if groups != heads:
        fields |= {"group_query_attention": True, "num_query_groups": groups}
    return fields


def _llama_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    refuse_unless(config, {"hidden_act": ("silu",)}, "LlamaForCausalLM")
    attention_bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    if attention_bias != mlp_bias:
        raise ValueError(
            f"LlamaForCausalLM: attention_bias {attention_bias} with mlp_bias {mlp_bias}; supported: both or neither"
        )
    return {**_common_from_hf(config), "disable_bias_linear": not attention_bias}


def _qwen2_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    refuse_unless(config, {"hidden_act": ("silu",), "use_sliding_window": (False, None)}, "Qwen2ForCausalLM")
    return {**_common_from_hf(config), "disable_bias_linear": True, "add_qkv_bias": True}


def _common_to_hf(config: ModelConfig) -> dict[str, Any]:
    wanted = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "rotary_percent": 1.0}
    wrong = [
        f"{field} is {getattr(config, field)!r}, needed: {value!r}"
        for field, value in wanted.items()
        if getattr(config, field) != value
    ]
    if config.hidden_dropout:
        wrong.append(f"hidden_dropout is {config.hidden_dropout}, needed: 0.0")
    if wrong:
        raise ValueError("not a Llama: " + "; ".join(wrong))
    scaling = None
    if config.use_rope_scaling:
        scaling = {"rope_type": "llama3", **{theirs: getattr(config, ours) for ours, theirs in _SCALING.items()}}
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary_base,
        "rope_scaling": scaling,
        "tie_word_embeddings": config.tied,
        "attention_dropout": config.attention_dropout,
        "initializer_range": config.init_method_std,
    }


def _llama_to_hf(config: ModelConfig) -> dict[str, Any]:
    if config.add_qkv_bias:
        raise ValueError("biases on q, k and v alone are not a LlamaForCausalLM's; export as Qwen2ForCausalLM")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_common_to_hf(config),
        "attention_bias": config.has_linear_bias,
        "mlp_bias": config.has_linear_bias,
    }


def _qwen2_to_hf(config: ModelConfig) -> dict[str, Any]:
    if not config.add_qkv_bias or config.has_linear_bias:
        raise ValueError("a Qwen2ForCausalLM has biases on q, k and v, and no others")
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **_common_to_hf(config),
        "use_sliding_window": False,
    }


def _kinds(has_bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if has_bias else ("weight",)


def _layer_rows(index: int, config: ModelConfig) -> list[Row]:
    ours, theirs = f"decoder.layers.{index}", f"model.layers.{index}"
    has_bias = config.has_linear_bias
    has_qkv_bias = has_bias or config.add_qkv_bias
    pairs = [
        ("input_layernorm", "input_layernorm", False),
        *((f"self_attention.linear_{x}", f"self_attn.{x}_proj", has_qkv_bias) for x in "qkv"),
        ("self_attention.linear_proj", "self_attn.o_proj", has_bias),
        ("pre_mlp_layernorm", "post_attention_layernorm", False),
        ("mlp.linear_gate", "mlp.gate_proj", has_bias),
        ("mlp.linear_up", "mlp.up_proj", has_bias),
        ("mlp.linear_fc2", "mlp.down_proj", has_bias),
    ]
    return [
        Row(f"{theirs}.{hf}.{kind}", (f"{ours}.{logical}.{kind}",))
        for logical, hf, bias in pairs
        for kind in _kinds(bias)
    ]


def _table(config: ModelConfig) -> list[Row]:
    table = [Row("model.embed_tokens.weight", ("embedding.word_embeddings.weight",))]
    for index in range(config.num_layers):
        table += _layer_rows(index, config)
    table.append(Row("model.norm.weight", ("decoder.final_layernorm.weight",)))
    if not config.tied:
        table.append(Row("lm_head.weight", ("output_layer.weight",)))
    return table


LLAMA = Architecture(
    "LlamaForCausalLM",
    config_from_hf=_llama_from_hf,
    config_to_hf=_llama_to_hf,
    table=_table,
    embedding_key="model.embed_tokens.weight",
    ignored=("rotary_emb.inv_freq",),
)
QWEN2 = Architecture(
    "Qwen2ForCausalLM",
    config_from_hf=_qwen2_from_hf,
    config_to_hf=_qwen2_to_hf,
    table=_table,
    embedding_key="model.embed_tokens.weight",
    ignored=("rotary_emb.inv_freq",),
)
