"""Logits and all gradients against Hugging Face models with random weights."""

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, Qwen2RotaryEmbedding

from mcore_models.build import build_stage_model
from mcore_models.config import ModelConfig
from mcore_models.hf.convert import config_from_hf, config_to_hf, from_hf_state, to_hf_names, to_hf_state
from mcore_models.kernels import torch_kernels
from mcore_models.logical import export_logical, load_logical
from mcore_models.specs import StageSpec
from mcore_parallel.axis import single_layout

TINY = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "sdpa",
}
SCALING = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMAS = {
    "mha": {"num_key_value_heads": 4},
    "gqa_4_2": {},
    "gqa_4_1": {"num_key_value_heads": 1},
    "head_dim": {"head_dim": 16},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "llama3_rope": {"rope_parameters": SCALING},
    "llama3_rope_32": {"rope_parameters": {**SCALING, "factor": 32.0, "rope_theta": 500000.0}},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "epsilon": {"rms_norm_eps": 0.1},
}
GPT2S = {
    "plain": {},
    "inner": {"n_inner": 40},
    "untied": {"tie_word_embeddings": False},
    "epsilon": {"layer_norm_epsilon": 0.1},
}


def randomise(model):
    """No parameter may keep a value (1 or 0) that hides whether it is used."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name or ".ln_" in name else 0.0
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(centre + 0.1 * noise)
    return model


def build_llama(changes, kind="Llama"):
    config_class = getattr(transformers, f"{kind}Config")
    config = config_class(**{**TINY, **changes}, architectures=[f"{kind}ForCausalLM"])
    return randomise(getattr(transformers, f"{kind}ForCausalLM")(config).eval())


def build_gpt2(changes):
    config = transformers.GPT2Config(
        **{"vocab_size": 101, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **changes},
        architectures=["GPT2LMHeadModel"],
        attn_implementation="sdpa",
    )
    return randomise(transformers.GPT2LMHeadModel(config).eval())


def widen(model):
    """HF casts norms and rotary tables of Llama to fp32 whatever the model; let them be float64 like the rest."""

    def norm(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def rotary(self, x, position_ids):
        dim = model.config.head_dim if getattr(model.config, "head_dim", None) else 32 // 4
        base = model.config.rope_parameters["rope_theta"]
        angles = position_ids.unsqueeze(-1) / base ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()

    for module in model.modules():
        if isinstance(module, (LlamaRMSNorm, Qwen2RMSNorm)):
            module.forward = norm.__get__(module)
        if isinstance(module, (LlamaRotaryEmbedding, Qwen2RotaryEmbedding)):
            module.forward = rotary.__get__(module)
    return model.double()


def ours_from(hf, dtype):
    fields = config_from_hf(hf.config.to_dict())
    config = ModelConfig(**{**fields, "hidden_dropout": 0.0, "attention_dropout": 0.0})
    stage = StageSpec(0, config.num_layers, True, True)
    model = build_stage_model(config, layout=single_layout(), stage=stage, kernels=torch_kernels(), dtype=dtype)
    load_logical(model, from_hf_state(hf.state_dict(), config))
    return model, config


def compare(hf, dtype, bound):
    model, config = ours_from(hf, dtype)
    tokens = torch.randint(0, 101, (2, 60), generator=torch.Generator().manual_seed(1))
    labels = torch.randint(0, 101, (2, 60), generator=torch.Generator().manual_seed(2))
    mask = (torch.rand(2, 60, generator=torch.Generator().manual_seed(3)) > 0.3).float()
    theirs = hf(tokens).logits
    losses = torch.nn.functional.cross_entropy(theirs.flatten(0, 1), labels.flatten(), reduction="none")
    loss = (losses * mask.flatten()).sum()
    loss.backward()
    with torch.no_grad():
        logits = model.logits(model(tokens)).transpose(0, 1)
    assert logits.shape == theirs.shape
    assert ((logits - theirs).abs().amax((0, 2)) <= bound * theirs.abs().max()).all(), "some position differs"
    ours = model(tokens, labels=labels, loss_mask=mask)
    ours.backward()
    assert abs(ours.item() - loss.item()) <= bound * loss.item()
    got = export_logical(model, read=lambda p: p.grad)
    truth = from_hf_state({name: p.grad for name, p in hf.named_parameters()}, config)
    assert got.keys() == truth.keys()
    scale = max(grad.abs().max().item() for grad in truth.values())
    for name, want in truth.items():
        # without rotation the true gradient of a key bias is zero: what there is, is both sides' rounding
        floor = 1e-2 if name.endswith("linear_k.bias") and dtype == torch.float32 else 1e-3
        error = (got[name] - want).abs().max().item() / max(want.abs().max().item(), floor * scale)
        assert error <= bound, f"{name}: {error}"


@pytest.mark.parametrize("name", LLAMAS)
def test_llama_float32(name):
    compare(build_llama(LLAMAS[name]), torch.float32, 1e-5)


@pytest.mark.parametrize("name", ["gqa_4_2", "gqa_4_1", "head_dim", "theta", "tied", "biases"])
def test_llama_float64(name):
    compare(widen(build_llama(LLAMAS[name])), torch.float64, 1e-12)


@pytest.mark.parametrize("name", GPT2S)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_gpt2(name, dtype, bound):
    compare(build_gpt2(GPT2S[name]).to(dtype), dtype, bound)


def test_qwen2_has_its_biases():
    compare(widen(build_llama({}, kind="Qwen2")), torch.float64, 1e-12)


@pytest.mark.parametrize("name", LLAMAS)
def test_llama_round_trip_is_exact(name):
    check_round_trip(
        build_llama(LLAMAS[name]), transformers.LlamaConfig, ("rope_parameters", "head_dim", "rms_norm_eps")
    )


@pytest.mark.parametrize("name", GPT2S)
def test_gpt2_round_trip_is_exact(name):
    check_round_trip(build_gpt2(GPT2S[name]), transformers.GPT2Config, ("layer_norm_epsilon", "n_head"))


def check_round_trip(hf, config_class, fields):
    model, config = ours_from(hf, torch.float32)
    state = to_hf_state(export_logical(model), config)
    theirs = {name: p for name, p in hf.state_dict().items() if name != "lm_head.weight" or not config.tied}
    assert state.keys() == theirs.keys()
    assert set(to_hf_names(config).values()) == state.keys()
    assert all(torch.equal(state[name], theirs[name]) and state[name].is_contiguous() for name in state)
    again = config_class(**config_to_hf(config))
    for field in (*fields, "vocab_size", "tie_word_embeddings", "initializer_range", "max_position_embeddings"):
        assert getattr(again, field) == getattr(hf.config, field), field


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1), (6, 3)])
def test_each_head_lands_in_its_rows(heads, groups):
    hf = build_llama({"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": 8, "hidden_size": 48})
    with torch.no_grad():
        for module, first, count in (("q_proj", 10, heads), ("k_proj", 100, groups), ("v_proj", 200, groups)):
            weight = getattr(hf.model.layers[0].self_attn, module).weight
            weight.view(count, 8, -1).copy_(torch.arange(first, first + count).view(-1, 1, 1).expand(-1, 8, 48))
    model, _ = ours_from(hf, torch.float32)
    fused = model.layers[0].self_attention.linear_qkv.weight.view(heads + 2 * groups, -1)
    want = [*range(10, 10 + heads), *range(100, 100 + groups), *range(200, 200 + groups)]
    assert fused.amin(1).tolist() == want == fused.amax(1).tolist()


def test_bare_gpt2_checkpoint_has_no_prefix():
    hf = build_gpt2({})
    config = ModelConfig(**config_from_hf(hf.config.to_dict()))
    bare = from_hf_state(hf.transformer.state_dict(), config)
    full = from_hf_state(hf.state_dict(), config)
    assert bare.keys() == full.keys()
    assert all(torch.equal(bare[name], full[name]) for name in bare)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["BertModel"]}, "BertModel"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias True with mlp_bias False"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, "linear"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 1e4}}, "0.5"),
    ],
)
def test_what_would_be_lost_is_refused(changes, words):
    hf_config = {**transformers.LlamaConfig(**TINY, architectures=["LlamaForCausalLM"]).to_dict(), **changes}
    with pytest.raises(ValueError, match=words):
        config_from_hf(hf_config)


def test_settings_of_older_files_are_read():
    old = transformers.LlamaConfig(**TINY, architectures=["LlamaForCausalLM"]).to_dict()
    del old["rope_parameters"]
    scaling = {key: value for key, value in SCALING.items() if key != "rope_theta"}
    fields = config_from_hf({**old, "rope_theta": 123.0, "rope_scaling": scaling})
    assert fields["rotary_base"] == 123.0
    assert fields["use_rope_scaling"]
    assert fields["rope_scaling_original_max_position_embeddings"] == 16


def test_missing_and_unexpected_tensors_are_named():
    hf = build_gpt2({})
    config = ModelConfig(**config_from_hf(hf.config.to_dict()))
    state = dict(hf.state_dict())
    state["extra"] = state.pop("transformer.ln_f.bias")
    with pytest.raises(ValueError, match=r"missing transformer.ln_f.bias; unexpected extra"):
        from_hf_state(state, config)
