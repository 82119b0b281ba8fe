"""What a model is. Field names are Megatron's; a field's description is its flag's help. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mcore_parallel.config import Section


class ModelConfig(Section):
    """Shape and choices of a transformer language model."""

    model: str = Field(
        "gpt", description="Model family, by its plugin name; it only fills defaults of the fields below."
    )
    num_layers: int = Field(12, ge=1, description="Transformer layers.")
    hidden_size: int = Field(768, ge=1, description="Width of the residual stream.")
    ffn_hidden_size: int | None = Field(
        None,
        ge=1,
        description="Width of the MLP; default 4 x hidden, or 8/3 x hidden rounded down to 64 with --swiglu.",
    )
    num_attention_heads: int = Field(12, ge=1, description="Query heads.")
    group_query_attention: bool = Field(False, description="Share KV heads among query heads, see num-query-groups.")
    num_query_groups: int | None = Field(None, ge=1, description="KV heads; default as many as query heads.")
    kv_channels: int | None = Field(
        None, ge=1, description="Size of a head; default hidden-size / num-attention-heads."
    )
    max_position_embeddings: int | None = Field(
        None, ge=1, description="Longest sequence the model can take; default seq-length."
    )
    vocab_size: int | None = Field(None, ge=1, description="Tokens the model knows; default the tokenizer's.")
    make_vocab_size_divisible_by: int = Field(
        128, ge=1, description="Embedding rows are padded inside to a multiple of this x tp; never in a checkpoint."
    )
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = Field(
        "learned_absolute", description="How positions enter."
    )
    rotary_base: float = Field(10000.0, gt=0, description="Base (theta) of rotary embeddings.")
    rotary_percent: float = Field(1.0, gt=0, le=1, description="Share of each head that is rotated.")
    use_rope_scaling: bool = Field(False, description="Llama-3.1 scaling of rotary frequencies.")
    rope_scaling_factor: float = Field(8.0, ge=1, description="Factor of the Llama-3.1 scaling.")
    rope_scaling_low_freq_factor: float = Field(1.0, gt=0, description="Low-frequency bound of the Llama-3.1 scaling.")
    rope_scaling_high_freq_factor: float = Field(
        4.0, gt=0, description="High-frequency bound of the Llama-3.1 scaling."
    )
    rope_scaling_original_max_position_embeddings: int = Field(
        8192, ge=1, description="Context length before the Llama-3.1 scaling."
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = Field("LayerNorm", description="Kind of norm.")
    norm_epsilon: float = Field(1e-5, gt=0, description="Epsilon of the norms.")
    swiglu: bool = Field(False, description="Gated SiLU instead of GELU in the MLP.")
    disable_bias_linear: bool = Field(False, description="No biases in the linear layers.")
    add_qkv_bias: bool = Field(False, description="Biases on q, k, v even with --disable-bias-linear.")
    untie_embeddings_and_output_weights: bool = Field(
        False, description="Give the output layer its own weight instead of the word embedding's."
    )
    hidden_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout of embeddings and of residual branches.")
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout of attention probabilities.")
    init_method_std: float = Field(
        0.02, gt=0, description="Std of initial weights; projections into the residual: / sqrt(2 x num-layers)."
    )
    transformer_impl: str = Field("local", description="Kernel set, by its plugin name (local: plain torch).")
    bf16: bool = Field(
        False, description="bfloat16 parameters and activations, fp32 main gradients and master weights."
    )
    use_mcore_models: bool = Field(
        False, description="As in Megatron today: no effect, every model is mcore's. Prints one line."
    )

    @property
    def head_size(self) -> int:
        """Channels of one head (``d``)."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def num_kv_heads(self) -> int:
        """KV heads (``g``)."""
        if not self.group_query_attention or self.num_query_groups is None:
            return self.num_attention_heads
        return self.num_query_groups

    @property
    def ffn_size(self) -> int:
        """Width of the MLP (``f``)."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return int(8 * self.hidden_size / 3) // 64 * 64 if self.swiglu else 4 * self.hidden_size

    @property
    def tied(self) -> bool:
        """Whether the output layer uses the word embedding."""
        return not self.untie_embeddings_and_output_weights

    @property
    def has_linear_bias(self) -> bool:
        """Whether linear layers have biases."""
        return not self.disable_bias_linear
