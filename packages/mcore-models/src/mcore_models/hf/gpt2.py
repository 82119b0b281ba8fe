"""GPT2LMHeadModel, whose Conv1D layers keep ``[in, out]`` and fuse q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_models.config import ModelConfig
from mcore_models.hf.architecture import Architecture, Row, refuse_unless


def _from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    supported = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    }
    refuse_unless(config, supported, "GPT2LMHeadModel")
    residual, embedding = config.get("resid_pdrop", 0.1), config.get("embd_pdrop", 0.1)
    if residual != embedding:
        raise ValueError(f"GPT2LMHeadModel: resid_pdrop {residual} and embd_pdrop {embedding} must be equal")
    return {
        "model": "gpt",
        "num_layers": config["n_layer"],
        "hidden_size": config["n_embd"],
        "ffn_hidden_size": config.get("n_inner") or 4 * config["n_embd"],
        "num_attention_heads": config["n_head"],
        "max_position_embeddings": config["n_positions"],
        "vocab_size": config["vocab_size"],
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": config["layer_norm_epsilon"],
        "swiglu": False,
        "disable_bias_linear": False,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", True),
        "hidden_dropout": float(residual),
        "attention_dropout": float(config.get("attn_pdrop", 0.1)),
        "init_method_std": config.get("initializer_range", 0.02),
    }


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    wanted = {
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "swiglu": False,
        "disable_bias_linear": False,
        "num_kv_heads": config.num_attention_heads,
        "head_size": config.hidden_size // config.num_attention_heads,
    }
    wrong = [
        f"{field} is {getattr(config, field)!r}, needed: {value!r}"
        for field, value in wanted.items()
        if getattr(config, field) != value
    ]
    if wrong:
        raise ValueError("not a GPT-2: " + "; ".join(wrong))
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_inner": config.ffn_size,
        "n_head": config.num_attention_heads,
        "n_positions": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.norm_epsilon,
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
        "initializer_range": config.init_method_std,
        "tie_word_embeddings": config.tied,
    }


def _layer_rows(index: int, config: ModelConfig) -> list[Row]:
    ours, theirs = f"decoder.layers.{index}", f"transformer.h.{index}"
    qkv_rows = (config.num_attention_heads * config.head_size, *[config.num_kv_heads * config.head_size] * 2)
    table = []
    for kind in ("weight", "bias"):
        matrix = kind == "weight"
        qkv = tuple(f"{ours}.self_attention.linear_{x}.{kind}" for x in "qkv")
        table += [
            Row(f"{theirs}.ln_1.{kind}", (f"{ours}.input_layernorm.{kind}",)),
            Row(f"{theirs}.attn.c_attn.{kind}", qkv, rows=qkv_rows, transposed=matrix),
            Row(f"{theirs}.attn.c_proj.{kind}", (f"{ours}.self_attention.linear_proj.{kind}",), transposed=matrix),
            Row(f"{theirs}.ln_2.{kind}", (f"{ours}.pre_mlp_layernorm.{kind}",)),
            Row(f"{theirs}.mlp.c_fc.{kind}", (f"{ours}.mlp.linear_fc1.{kind}",), transposed=matrix),
            Row(f"{theirs}.mlp.c_proj.{kind}", (f"{ours}.mlp.linear_fc2.{kind}",), transposed=matrix),
        ]
    return table


def _table(config: ModelConfig) -> list[Row]:
    table = [
        Row("transformer.wte.weight", ("embedding.word_embeddings.weight",)),
        Row("transformer.wpe.weight", ("embedding.position_embeddings.weight",)),
    ]
    for index in range(config.num_layers):
        table += _layer_rows(index, config)
    table += [Row(f"transformer.ln_f.{kind}", (f"decoder.final_layernorm.{kind}",)) for kind in ("weight", "bias")]
    if not config.tied:
        table.append(Row("lm_head.weight", ("output_layer.weight",)))
    return table


GPT2 = Architecture(
    "GPT2LMHeadModel",
    config_from_hf=_from_hf,
    config_to_hf=_to_hf,
    table=_table,
    embedding_key="transformer.wte.weight",
    base_prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
)
