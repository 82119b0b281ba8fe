"""Parameters and floating-point operations of a model, in closed form. Pure integers, no torch.

A multiply-add counts as two operations. Norms, activations, softmax, rotary embeddings, lookups and the optimizer are
left out, as is usual; recomputation is left out too, so the same model has the same count under every layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mcore_models.config import ModelConfig

Convention = Literal["model-causal", "model-full"]


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of one transformer layer: ``matmul`` in matrix products, ``vectors`` in norms and biases."""

    attention: int
    mlp: int
    vectors: int

    @property
    def matmul(self) -> int:
        """Parameters that take part in matrix products."""
        return self.attention + self.mlp

    @property
    def total(self) -> int:
        """All parameters."""
        return self.matmul + self.vectors


def layer_parameters(config: ModelConfig) -> LayerParameters:
    """Parameters of one layer."""
    hidden, ffn = config.hidden_size, config.ffn_size
    queries, keys = config.num_attention_heads * config.head_size, config.num_kv_heads * config.head_size
    widths_in = (2 if config.swiglu else 1) * ffn
    vectors = 2 * norm_parameters(config)
    if config.has_linear_bias or config.add_qkv_bias:
        vectors += queries + 2 * keys
    if config.has_linear_bias:
        vectors += hidden + widths_in + hidden
    return LayerParameters(
        attention=hidden * (queries + 2 * keys) + queries * hidden,
        mlp=hidden * widths_in + ffn * hidden,
        vectors=vectors,
    )


def norm_parameters(config: ModelConfig) -> int:
    """Parameters of one norm."""
    return config.hidden_size * (2 if config.normalization == "LayerNorm" else 1)


def embedding_parameters(config: ModelConfig, vocab_size: int) -> int:
    """Word embedding and, if learned, position embedding."""
    positions = 0
    if config.position_embedding_type == "learned_absolute":
        if config.max_position_embeddings is None:
            raise ValueError("learned positions need max-position-embeddings: give it, or a seq-length to take it from")
        positions = config.max_position_embeddings
    return (vocab_size + positions) * config.hidden_size


def parameter_count(config: ModelConfig, *, vocab_size: int) -> int:
    """Logical parameters of the whole model: no vocabulary padding, tied weights once."""
    output = 0 if config.tied else vocab_size * config.hidden_size
    layers = config.num_layers * layer_parameters(config).total
    return embedding_parameters(config, vocab_size) + layers + norm_parameters(config) + output


def matmul_parameters(config: ModelConfig, *, vocab_size: int) -> int:
    """Parameters in matrix products, the output layer among them (tied or not), the lookup not."""
    return config.num_layers * layer_parameters(config).matmul + vocab_size * config.hidden_size


def attention_flops_per_token(config: ModelConfig, *, seq_length: int, convention: Convention) -> int:
    """Forward and backward operations of ``q k^T`` and ``p v`` per token, over all layers.

    ``model-full`` counts every key for every query (2 products x 2 x ``s * n * d``, three times for forward and
    backward); ``model-causal`` half of that, which is what a causal mask leaves (to within one part in ``s``).
    """
    width = config.num_attention_heads * config.head_size
    full = config.num_layers * 3 * 2 * 2 * seq_length * width
    return {"model-full": full, "model-causal": full // 2}[convention]


def flops_per_token(
    config: ModelConfig, *, seq_length: int, vocab_size: int, convention: Convention = "model-causal"
) -> int:
    """Operations of one training step (forward and backward) per token: 6 per matrix parameter, plus attention.

    The vocabulary is the true one, without padding. See :func:`attention_flops_per_token` for the conventions.
    """
    products = 6 * matmul_parameters(config, vocab_size=vocab_size)
    return products + attention_flops_per_token(config, seq_length=seq_length, convention=convention)


@dataclass(frozen=True)
class PartCosts:
    """Forward and backward operations per token of each part of a model; the parts sum to :func:`flops_per_token`."""

    embedding: int
    layers: tuple[int, ...]
    output: int


def part_costs(config: ModelConfig, *, seq_length: int, vocab_size: int) -> PartCosts:
    """What each part costs, attention as under a causal mask. The embedding is a lookup and multiplies nothing."""
    attention = attention_flops_per_token(config, seq_length=seq_length, convention="model-causal")
    layer = 6 * layer_parameters(config).matmul + attention // config.num_layers
    return PartCosts(0, (layer,) * config.num_layers, 6 * vocab_size * config.hidden_size)
