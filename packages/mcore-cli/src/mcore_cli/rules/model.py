"""Rules inside one model: heads, groups, positions and full recomputation. No torch."""

from __future__ import annotations

from mcore_cli.rules.engine import Context, Rule, Violation, nearest_divisors, nearest_multiples
from mcore_cli.rules.layout import TP


def hidden_divides(context: Context) -> Violation | None:
    """Without --kv-channels a head has hidden/heads channels."""
    model = context.config.model
    if model.kv_channels is not None or model.hidden_size % model.num_attention_heads == 0:
        return None
    return Violation(
        "head-size",
        f"--hidden-size {model.hidden_size} over --num-attention-heads {model.num_attention_heads}",
        "the hidden size must be divisible by the heads, or --kv-channels be given",
        "change one of them or give --kv-channels",
        f"--hidden-size {nearest_multiples(model.hidden_size, model.num_attention_heads)}; "
        f"--num-attention-heads {nearest_divisors(model.num_attention_heads, model.hidden_size)}",
    )


def groups_divide(context: Context) -> Violation | None:
    """Every KV head serves equally many query heads."""
    model = context.config.model
    heads, groups = model.num_attention_heads, model.num_kv_heads
    if heads % groups == 0:
        return None
    return Violation(
        "query-groups",
        f"--num-attention-heads {heads} with --num-query-groups {groups} "
        f"({TP} {context.config.parallel.tensor_model_parallel_size})",
        "query heads must be divisible by the KV heads",
        "change --num-query-groups",
        f"--num-query-groups {nearest_divisors(groups, heads)}",
    )


def groups_have_effect(context: Context) -> Violation | None:
    """--num-query-groups counts only with --group-query-attention."""
    model = context.config.model
    if model.group_query_attention or model.num_query_groups in (None, model.num_attention_heads):
        return None
    return Violation(
        "query-groups-unused",
        f"--num-query-groups {model.num_query_groups} without --group-query-attention",
        "the number of KV heads has no effect without it",
        "add --group-query-attention or drop --num-query-groups",
    )


def groups_are_given(context: Context) -> Violation | None:
    """--group-query-attention asks for a number."""
    model = context.config.model
    if not model.group_query_attention or model.num_query_groups is not None:
        return None
    return Violation(
        "query-groups-missing",
        "--group-query-attention without --num-query-groups",
        "sharing KV heads needs their number",
        "give --num-query-groups",
        f"--num-query-groups {max(1, model.num_attention_heads // 4)}",
    )


def ffn_is_wide_enough(context: Context) -> Violation | None:
    """The default width under --swiglu rounds down, for tiny models to nothing."""
    model = context.config.model
    if model.ffn_size >= 1:
        return None
    return Violation(
        "ffn-size",
        f"--hidden-size {model.hidden_size} with --swiglu",
        f"the default MLP width, 8/3 of it rounded down to a multiple of 64, is {model.ffn_size}",
        "give --ffn-hidden-size",
        f"--ffn-hidden-size {4 * model.hidden_size}",
    )


def positions_suffice(context: Context) -> Violation | None:
    """The model takes sequences as long as the data gives."""
    longest, length = context.config.model.max_position_embeddings, context.config.data.seq_length
    if longest is None or longest >= length:
        return None
    return Violation(
        "positions",
        f"--max-position-embeddings {longest} with --seq-length {length}",
        "the longest position must be at least the sequence length",
        "raise --max-position-embeddings or lower --seq-length",
        f"--max-position-embeddings {length}",
    )


def rotary_is_even(context: Context) -> Violation | None:
    """Rotary embeddings turn pairs of channels."""
    model = context.config.model
    rotated = int(model.head_size * model.rotary_percent)
    if model.position_embedding_type != "rope" or (rotated > 0 and rotated % 2 == 0):
        return None
    return Violation(
        "rotary",
        f"--rotary-percent {model.rotary_percent} of a head of {model.head_size} channels",
        f"rotary embeddings turn pairs of channels, {rotated} cannot be paired",
        "change --kv-channels, --hidden-size or --rotary-percent",
    )


def rope_bounds(context: Context) -> Violation | None:
    """Llama-3.1 interpolates between two wavelengths; the bounds may not touch."""
    model = context.config.model
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    if not model.use_rope_scaling or low < high:
        return None
    return Violation(
        "rope-bounds",
        f"--rope-scaling-low-freq-factor {low} with --rope-scaling-high-freq-factor {high}",
        "the low factor must be below the high one",
        "swap them, or use the published 1 and 4",
        "1 and 4",
    )


def recompute(context: Context) -> Violation | None:
    """Full recomputation needs a method and a number; those need full recomputation."""
    parallel = context.config.parallel
    given = {
        "--recompute-granularity": parallel.recompute_granularity,
        "--recompute-method": parallel.recompute_method,
        "--recompute-num-layers": parallel.recompute_num_layers,
    }
    missing = [name for name, value in given.items() if value is None]
    if len(missing) in (0, len(given)):
        return None
    return Violation(
        "recompute",
        " ".join(f"{name} {value}" for name, value in given.items() if value is not None),
        f"{', '.join(given)} only work together; missing: {', '.join(missing)}",
        "give all three or none",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    )


MODEL_RULES = (
    Rule("head-size", hidden_divides),
    Rule("query-groups", groups_divide),
    Rule("query-groups-unused", groups_have_effect),
    Rule("query-groups-missing", groups_are_given),
    Rule("ffn-size", ffn_is_wide_enough),
    Rule("positions", positions_suffice),
    Rule("rotary", rotary_is_even),
    Rule("rope-bounds", rope_bounds),
    Rule("recompute", recompute),
)
