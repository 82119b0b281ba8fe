"""Which head splits and configurations are legal, and what the others are told."""

import pytest

from mcore_models.config import ModelConfig
from mcore_models.heads import HeadSplit
from mcore_models.rules import violations
from mcore_parallel.plugins import plugin_manager


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("groups", [1, 2, 3, 4])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
def test_heads_divide_or_are_refused_with_the_three_numbers(heads, groups, tp):
    legal = heads % groups == 0 and heads % tp == 0 and (groups % tp == 0 or tp % groups == 0)
    if not legal:
        with pytest.raises(ValueError, match=f"{heads} query heads with {groups} KV heads at .*size {tp}"):
            HeadSplit(heads, groups, 8, tp)
        return
    splits = [HeadSplit(heads, groups, 8, tp, rank) for rank in range(tp)]
    assert [split.first_head for split in splits] == [rank * heads // tp for rank in range(tp)]
    for split in splits:
        for head in range(split.first_head, split.first_head + split.local_heads):
            local = (head - split.first_head) // (split.local_heads // split.local_kv_heads)
            assert split.first_kv_head + local == head // (heads // groups)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 30}, "hidden-size 30 is not a multiple of num-attention-heads 4"),
        ({"num_query_groups": 2}, "num-query-groups 2 has no effect without --group-query-attention"),
        ({"group_query_attention": True}, "needs --num-query-groups"),
        ({"swiglu": True, "hidden_size": 16, "ffn_hidden_size": None}, "give --ffn-hidden-size"),
        ({"rotary_base": 5.0}, "--rotary-base 5.0 has no effect with position-embedding-type learned_absolute"),
        ({"position_embedding_type": "rope", "rope_scaling_factor": 2.0}, "no effect without --use-rope-scaling"),
        ({"position_embedding_type": "rope", "rotary_percent": 0.4}, "rotates 3 channels"),
        (
            {"position_embedding_type": "rope", "use_rope_scaling": True, "rope_scaling_high_freq_factor": 0.5},
            "rope-scaling-high-freq-factor 0.5 must be above",
        ),
        ({"add_qkv_bias": True}, "add-qkv-bias has no effect"),
        ({"ffn_hidden_size": 51}, "ffn-hidden-size 51 is not a multiple of tensor-model-parallel-size 2"),
        ({"num_attention_heads": 1}, "1 query heads with 1 KV heads at tensor-model-parallel-size 2"),
        ({}, "seq-length 65 exceeds max-position-embeddings 64"),
    ],
)
def test_rules_name_the_values_and_the_way_out(tiny_fields, changes, words):
    found = violations(ModelConfig(**{**tiny_fields["gpt"], **changes}), tp=2, seq_length=65 if not changes else 64)
    assert len(found) == 1
    assert words in found[0]


def test_all_violations_come_together(tiny_fields, build):
    with pytest.raises(ValueError, match=r"no effect without --group-query-attention.*add-qkv-bias"):
        build({**tiny_fields["gpt"], "num_query_groups": 2, "add_qkv_bias": True})


def test_legal_configurations_have_no_violations(tiny_fields):
    for fields in tiny_fields.values():
        assert violations(ModelConfig(**fields), tp=4, seq_length=64) == []
    for spec in plugin_manager(disabled=[]).collect("mcore_models"):
        for size in spec.presets:
            assert violations(ModelConfig(**spec.fields(size)), tp=1) == []
