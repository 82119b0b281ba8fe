"""Parameter counts against published ones, FLOPs against hand counts and against torch's counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from mcore_models.config import ModelConfig
from mcore_models.cost import flops_per_token, matmul_parameters, parameter_count, part_costs
from mcore_models.logical import logical_shapes
from mcore_models.zoo.gpt2 import GPT
from mcore_models.zoo.llama import LLAMA

PUBLISHED = {
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
}


def test_every_preset_has_its_published_number_of_parameters():
    found = {}
    for spec in (GPT, LLAMA):
        for size in spec.presets:
            config = ModelConfig(**spec.fields(size))
            found[size] = parameter_count(config, vocab_size=config.vocab_size)
    assert found == PUBLISHED


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("changes", [{}, {"kv_channels": 16}, {"add_qkv_bias": True, "disable_bias_linear": True}])
def test_the_count_is_that_of_the_built_model(tiny_fields, build, family, changes):
    fields = {**tiny_fields[family], **changes}
    shapes = logical_shapes(build(fields))
    built = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert parameter_count(ModelConfig(**fields), vocab_size=101) == built


def reference_config(**changes):
    fields = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "ffn_hidden_size": 128,
        "vocab_size": 1000,
        **LLAMA.defaults,
        **changes,
    }
    return ModelConfig(**fields)


def test_flops_by_hand():
    config = reference_config()
    assert matmul_parameters(config, vocab_size=1000) == 137_728
    full = flops_per_token(config, seq_length=32, vocab_size=1000, convention="model-full")
    causal = flops_per_token(config, seq_length=32, vocab_size=1000, convention="model-causal")
    assert (full, causal) == (826_368 + 49_152, 826_368 + 24_576)


@pytest.mark.parametrize("changes", [{}, {"kv_channels": 32}, {"swiglu": False}, {"num_query_groups": 1}])
def test_flops_against_torchs_counter(build, changes):
    config = reference_config(**changes, make_vocab_size_divisible_by=1)
    model = build(config.model_dump())

    def attention(q, k, v, *args, out_shape=None, **kwargs):
        return sdpa_flop_count(q, (q[0], q[1], *k[2:]), (q[0], q[1], *v[2:]))

    name = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={name: attention}) as counter, torch.no_grad():
        model.logits(model(torch.zeros(2, 32, dtype=torch.int64)))
    counted = 3 * counter.get_total_flops() / (2 * 32)
    assert counted == pytest.approx(
        flops_per_token(config, seq_length=32, vocab_size=1000, convention="model-full"), rel=0.01
    )


@pytest.mark.parametrize("preset", ["llama2-7b", "llama3-8b"])
def test_costs_of_parts_sum_to_the_whole(preset):
    config = ModelConfig(**LLAMA.fields(preset))
    parts = part_costs(config, seq_length=4096, vocab_size=32000)
    whole = flops_per_token(config, seq_length=4096, vocab_size=32000)
    assert parts.embedding + sum(parts.layers) + parts.output == whole
    assert len(set(parts.layers)) == 1
    assert parts.output == 6 * 32000 * config.hidden_size
