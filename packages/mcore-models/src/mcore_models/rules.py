"""What a model configuration must satisfy, as text for the user. No torch, so it runs before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mcore_models.config import ModelConfig
from mcore_models.heads import head_violations

_ROPE_FIELDS = ("rotary_base", "rotary_percent", "use_rope_scaling")
_SCALING_FIELDS = (
    "rope_scaling_factor",
    "rope_scaling_low_freq_factor",
    "rope_scaling_high_freq_factor",
    "rope_scaling_original_max_position_embeddings",
)


def violations(config: ModelConfig, *, tp: int = 1, seq_length: int | None = None) -> list[str]:
    """Every reason why ``config`` cannot be built at tensor-parallel size ``tp``; each names values, rule and fix."""
    found = [text for rule in _RULES for text in rule(config)]
    found += _tensor_parallel(config, tp)
    if seq_length is not None:
        found += _sequence(config, seq_length)
    return found


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _head_size(config: ModelConfig) -> Iterator[str]:
    if config.kv_channels is None and config.hidden_size % config.num_attention_heads:
        yield (
            f"hidden-size {config.hidden_size} is not a multiple of num-attention-heads {config.num_attention_heads}; "
            "change one or give --kv-channels"
        )


def _groups(config: ModelConfig) -> Iterator[str]:
    if config.num_query_groups is not None and not config.group_query_attention:
        yield f"num-query-groups {config.num_query_groups} has no effect without --group-query-attention; add it"
    if config.group_query_attention and config.num_query_groups is None:
        yield "group-query-attention needs --num-query-groups, the number of KV heads"


def _ffn(config: ModelConfig) -> Iterator[str]:
    if config.ffn_size < 1:
        yield (
            f"hidden-size {config.hidden_size} with --swiglu gives a default MLP width of {config.ffn_size}; "
            "give --ffn-hidden-size"
        )


def _idle_rope_fields(config: ModelConfig) -> Iterator[str]:
    def changed(field: str) -> bool:
        return bool(getattr(config, field) != ModelConfig.model_fields[field].default)

    if config.position_embedding_type != "rope":
        for field in filter(changed, _ROPE_FIELDS + _SCALING_FIELDS):
            yield (
                f"{_flag(field)} {getattr(config, field)} has no effect with position-embedding-type "
                f"{config.position_embedding_type}; use rope or leave it out"
            )
    elif not config.use_rope_scaling:
        for field in filter(changed, _SCALING_FIELDS):
            yield f"{_flag(field)} {getattr(config, field)} has no effect without --use-rope-scaling; add it"


def _rotary_size(config: ModelConfig) -> Iterator[str]:
    size = int(config.head_size * config.rotary_percent)
    if config.position_embedding_type == "rope" and (size < 2 or size % 2):
        yield (
            f"rotary-percent {config.rotary_percent} of head size {config.head_size} rotates {size} channels; "
            "they turn in pairs, so it must be even and at least 2"
        )


def _scaling_bounds(config: ModelConfig) -> Iterator[str]:
    low, high = config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
    if config.position_embedding_type == "rope" and config.use_rope_scaling and high <= low:
        yield f"rope-scaling-high-freq-factor {high} must be above rope-scaling-low-freq-factor {low}"


def _qkv_bias(config: ModelConfig) -> Iterator[str]:
    if config.add_qkv_bias and config.has_linear_bias:
        yield "add-qkv-bias has no effect where all linear layers have biases; add --disable-bias-linear or drop it"


_RULES: tuple[Callable[[ModelConfig], Iterator[str]], ...] = (
    _head_size,
    _groups,
    _ffn,
    _idle_rope_fields,
    _rotary_size,
    _scaling_bounds,
    _qkv_bias,
)


def _tensor_parallel(config: ModelConfig, tp: int) -> list[str]:
    found = head_violations(num_heads=config.num_attention_heads, num_kv_heads=config.num_kv_heads, tp=tp)
    if config.ffn_size % tp:
        found.append(f"ffn-hidden-size {config.ffn_size} is not a multiple of tensor-model-parallel-size {tp}")
    return found


def _sequence(config: ModelConfig, seq_length: int) -> list[str]:
    longest = config.max_position_embeddings
    if longest is None or seq_length <= longest:
        return []
    return [f"seq-length {seq_length} exceeds max-position-embeddings {longest}; shorten it or raise the latter"]
