"""Building and running a model on one rank: names, initial values, dead fields, dropout, recomputation, evaluation."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from mcore_models.build import build_stage_model
from mcore_models.config import ModelConfig
from mcore_models.dropout import DropoutState
from mcore_models.kernels import torch_kernels
from mcore_models.local_parameters import RankShape, local_parameters
from mcore_models.logical import export_logical, load_logical, logical_shapes
from mcore_models.specs import Recompute, StageSpec
from mcore_models.vocabulary import VocabularySplit
from mcore_parallel.axis import single_layout
from mcore_parallel.grad_sync import GradBuffers
from mcore_parallel.placement import placement_of
from mcore_parallel.plugins import Registry, plugin_manager


def batch(size=2, length=10, seed=1):
    return torch.randint(0, 101, (size, length), generator=torch.Generator().manual_seed(seed))


def probe(model, dropout=None):
    """What a user would see: parameter count, loss with dropout, logits."""
    tokens = batch()
    with torch.no_grad():
        loss = model(tokens, labels=batch(seed=2), dropout=dropout).item()
        return sum(p.numel() for p in model.parameters()), loss, model.logits(model(tokens)).sum().item()


CHANGES = {
    "num_layers": 3,
    "hidden_size": 64,
    "ffn_hidden_size": 64,
    "num_attention_heads": 8,
    "num_query_groups": 1,
    "kv_channels": 16,
    "max_position_embeddings": 32,
    "vocab_size": 102,
    "make_vocab_size_divisible_by": 1,
    "position_embedding_type": "none",
    "rotary_base": 500.0,
    "rotary_percent": 0.5,
    "use_rope_scaling": True,
    "rope_scaling_factor": 2.0,
    "rope_scaling_low_freq_factor": 0.5,
    "rope_scaling_high_freq_factor": 5.0,
    "rope_scaling_original_max_position_embeddings": 32,
    "normalization": "LayerNorm",
    "norm_epsilon": 0.1,
    "swiglu": False,
    "disable_bias_linear": False,
    "add_qkv_bias": True,
    "untie_embeddings_and_output_weights": False,
    "hidden_dropout": 0.5,
    "attention_dropout": 0.5,
    "init_method_std": 0.1,
}
# what the run, not the model, does with these: the family fills defaults, the kernel set and the dtype are passed in
NOT_OF_THE_MODULES = {"model", "transformer_impl", "bf16", "use_mcore_models", "group_query_attention"}


def test_every_field_is_probed():
    assert ModelConfig.model_fields.keys() == CHANGES.keys() | NOT_OF_THE_MODULES


@pytest.mark.parametrize("field", CHANGES)
def test_no_field_is_dead(tiny_fields, build, field):
    base = {**tiny_fields["gpt" if field == "max_position_embeddings" else "llama"], "init_method_std": 0.3}
    if field.startswith("rope_scaling"):
        base |= {"use_rope_scaling": True, "rope_scaling_original_max_position_embeddings": 16}
    dropout = DropoutState(1, 1, torch.arange(2))
    assert probe(build(base), dropout) != probe(build({**base, field: CHANGES[field]}), dropout)


def test_seed_and_dtype_reach_the_weights(tiny_fields, build):
    weight = build(tiny_fields["gpt"], seed=1).embedding.word_embeddings.weight
    assert not torch.equal(weight, build(tiny_fields["gpt"], seed=2).embedding.word_embeddings.weight)
    assert build(tiny_fields["gpt"], dtype=torch.bfloat16).embedding.word_embeddings.weight.dtype == torch.bfloat16


def test_layers_call_the_kernels_they_were_given(tiny_fields, build):
    called = set()

    def spy(name):
        kernel = getattr(torch_kernels(), name)

        def call(*args, **kwargs):
            called.add(name)
            return kernel(*args, **kwargs)

        return call

    names = torch_kernels().__dataclass_fields__.keys()
    kernels = replace(torch_kernels(), **{name: spy(name) for name in names})
    for family in ("gpt", "llama"):
        build(tiny_fields[family], kernels=kernels)(batch())
    assert called == set(names)


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize(("first", "last"), [(True, True), (True, False), (False, False), (False, True)])
def test_sizes_without_torch_equal_the_modules(tiny_fields, build, family, first, last):
    stage = StageSpec(0 if first else 1, 1, first, last)
    fields = {**tiny_fields[family], "num_layers": 3}
    model = build(fields, stage=stage)
    sizes = local_parameters(ModelConfig(**fields), stages=[stage], rank=RankShape(), vocab_size=101)
    assert [(p.numel(), placement_of(p).decay) for p in model.parameters()] == [
        (s.num_elements, s.decay) for s in sizes
    ]


def test_initial_values_follow_the_formula_and_never_repeat(build):
    fields = {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 500}
    arrays = export_logical(build({**fields, "max_position_embeddings": 300}))
    for name, values in arrays.items():
        if name.endswith("bias"):
            assert values.abs().max() == 0
        elif "norm" in name:
            assert (values == 1).all()
        else:
            want = 0.02 / math.sqrt(8) if "linear_proj" in name or "linear_fc2" in name else 0.02
            assert values.std().item() == pytest.approx(want, rel=0.02), name
    matrices = [values.flatten()[:16] for values in arrays.values() if values.dim() == 2]
    assert len({tuple(row.tolist()) for row in matrices}) == len(matrices)


def test_padding_rows_are_zero_and_get_no_gradient(tiny_fields, build):
    model = build(tiny_fields["gpt"])
    model(batch(), labels=batch(seed=2)).backward()
    weight = model.embedding.word_embeddings.weight
    assert weight.shape == (128, 32)
    assert weight[101:].abs().max() == 0 == weight.grad[101:].abs().max()
    assert weight.grad[:101].abs().amin(1).max() > 0
    assert logical_shapes(model)["embedding.word_embeddings.weight"] == (101, 32)


def test_padding_rows_are_zero_before_anything_is_loaded(tiny_fields):
    config = ModelConfig(**tiny_fields["gpt"])
    stage = StageSpec(0, 2, True, True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)  # makes torch.empty nan, so that what is not written shows
    try:
        model = build_stage_model(config, layout=single_layout(), stage=stage, kernels=torch_kernels())
    finally:
        torch.use_deterministic_algorithms(False)
    assert model.layers[0].mlp.linear_fc1.weight.isnan().all()
    assert (model.embedding.word_embeddings.weight[101:] == 0).all()


def test_padding_changes_nothing(tiny_fields, build):
    losses = {
        build({**tiny_fields["gpt"], "make_vocab_size_divisible_by": multiple})(batch(), labels=batch(seed=2)).item()
        for multiple in (1, 64, 128, 1000)
    }
    assert max(losses) - min(losses) < 1e-10


@pytest.mark.parametrize(("tp", "padded"), [(1, 50304), (8, 51200)])
def test_padded_vocabulary_of_gpt2(tp, padded):
    splits = [VocabularySplit(50257, 128, tp, rank) for rank in range(tp)]
    assert {split.padded_size for split in splits} == {padded}
    assert [split.first_row for split in splits] == [rank * padded // tp for rank in range(tp)]


def test_tied_weight_is_one_parameter_on_one_stage_and_placed_on_two(tiny_fields, build):
    whole = build(tiny_fields["gpt"])
    assert whole.output.weight is whole.embedding.word_embeddings.weight
    assert not placement_of(whole.output.weight).partial_axes
    last = build(tiny_fields["gpt"], stage=StageSpec(1, 1, False, True))
    assert placement_of(last.output.weight).partial_axes == ("embedding",)
    untied = build(tiny_fields["llama"])
    assert untied.output.weight is not untied.embedding.word_embeddings.weight


def test_stages_one_after_the_other_are_the_whole_model(tiny_fields, build):
    for fields in tiny_fields.values():
        tokens, labels = batch(), batch(seed=2)
        stages = [StageSpec(0, 1, True, False), StageSpec(1, 1, False, True)]
        hidden = tokens
        for stage in stages:
            model = build(fields, stage=stage)
            if not stage.is_last:
                hidden = model(hidden)
                assert hidden.shape == model.activation_shape(2, 10)
        assert torch.equal(model(hidden, labels=labels), build(fields)(tokens, labels=labels))
        with pytest.raises(ValueError, match="not the last stage"):
            build(fields, stage=stages[0]).logits(hidden)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_given_positions_restart_documents(tiny_fields, build, family):
    model = build({**tiny_fields[family], "init_method_std": 0.3})
    tokens = batch()
    default = model(tokens)
    assert torch.equal(default, model(tokens, position_ids=torch.arange(10).expand(2, 10)))
    restarted = torch.arange(10) % 5
    assert not torch.allclose(default, model(tokens, position_ids=restarted.expand(2, 10)))


def test_too_long_a_sequence_names_both_lengths(tiny_fields, build):
    with pytest.raises(ValueError, match="65 tokens is longer than max-position-embeddings 64"):
        build(tiny_fields["gpt"])(batch(length=65))


@pytest.mark.parametrize("method", ["uniform", "block"])
@pytest.mark.parametrize("num_layers", [1, 2, 5])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_recomputation_changes_no_bit(tiny_fields, build, method, num_layers, family):
    fields = {**tiny_fields[family], "num_layers": 3, "hidden_dropout": 0.2, "attention_dropout": 0.2}

    def gradients(recompute):
        model = build(fields, recompute=recompute)
        calls = []
        model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
        loss = model(batch(), labels=batch(seed=2), dropout=DropoutState(1, 2, torch.tensor([5, 6])))
        loss.backward()
        return len(calls), [loss, *(p.grad for p in model.parameters())]

    once, plain = gradients(None)
    twice, recomputed = gradients(Recompute(method, num_layers))
    assert (once, twice) == (1, 2)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def test_recompute_chunks_cover_all_layers():
    assert Recompute("uniform", 2).chunks(5) == [(0, 2, True), (2, 4, True), (4, 5, True)]
    assert Recompute("block", 2).chunks(3) == [(0, 1, True), (1, 2, True), (2, 3, False)]


def test_dropout_varies_by_step_and_evaluation_does_not(tiny_fields, build):
    model = build({**tiny_fields["gpt"], "hidden_dropout": 0.1, "attention_dropout": 0.1, "init_method_std": 0.3})
    tokens, labels = batch(), batch(seed=2)
    with torch.no_grad():
        losses = {
            model(tokens, labels=labels, dropout=DropoutState(1, step, torch.arange(2))).item() for step in range(5)
        }
        quiet = {model(tokens, labels=labels).item() for _ in range(2)}
    assert len(losses) == 5
    assert len(quiet) == 1


def test_evaluation_leaves_main_gradients_alone(tiny_fields, build):
    model = build(tiny_fields["llama"])
    buffers = GradBuffers(model.parameters(), single_layout())
    model(batch(), labels=batch(seed=2)).backward()
    buffers.finish()
    before = [p.main_grad.clone() for p in model.parameters()]
    with torch.no_grad():
        model(batch(seed=3), labels=batch(seed=4))
    assert all(torch.equal(p.main_grad, old) for p, old in zip(model.parameters(), before, strict=True))


def test_masked_tokens_have_no_part_in_the_loss(tiny_fields, build):
    model = build(tiny_fields["llama"])
    mask = (torch.rand(2, 10, generator=torch.Generator().manual_seed(1)) > 0.5).float()
    with torch.no_grad():
        whole = model(batch(), labels=batch(seed=2), loss_mask=torch.ones(2, 10))
        parts = [model(batch(), labels=batch(seed=2), loss_mask=m) for m in (mask, 1 - mask)]
        assert model(batch(), labels=batch(seed=2)) == whole
    assert 0 < mask.sum() < 20
    torch.testing.assert_close(parts[0] + parts[1], whole)


def test_load_copies_everything_or_nothing(tiny_fields, build):
    source, target = build(tiny_fields["gpt"], seed=1), build(tiny_fields["gpt"], seed=2)
    arrays = {name: values.clone() for name, values in export_logical(source).items()}
    wrong = {**arrays, "decoder.final_layernorm.weight": torch.ones(3)}
    del wrong["decoder.final_layernorm.bias"]
    before = {name: values.clone() for name, values in export_logical(target).items()}
    with pytest.raises(ValueError, match=r"final_layernorm.weight: have \(3,\), need \(32,\).*bias: missing"):
        load_logical(target, wrong)
    assert all(torch.equal(values, before[name]) for name, values in export_logical(target).items())
    load_logical(target, arrays)
    assert all(torch.equal(values, arrays[name]) for name, values in export_logical(target).items())


def test_plugins_offer_the_families_and_the_kernels():
    manager = plugin_manager(disabled=[])
    models = Registry("model", manager.collect("mcore_models"))
    assert {"gpt", "llama"} <= set(models.names())
    with pytest.raises(ValueError, match="no size 'gpt2-tiny'"):
        models["gpt"].fields("gpt2-tiny")
    kernels = Registry("kernel set", manager.collect("mcore_kernels"))["local"].build()
    assert kernels == torch_kernels()


def test_choices_and_costs_need_no_torch():
    modules = "builtin, config, cost, heads, hookspecs, local_parameters, rules, specs, traffic_cost, vocabulary"
    code = f"import sys\nfrom mcore_models import {modules}\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
