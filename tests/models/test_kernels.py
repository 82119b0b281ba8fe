"""The kernels against plain formulas and against numeric derivatives."""

import itertools
import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mcore_models.core_attention import core_attention
from mcore_models.heads import HeadSplit
from mcore_models.kernels import torch_kernels
from mcore_models.pointwise import rms_norm, split_and_rotate, swiglu
from mcore_models.rope import RopeScaling, RotaryEmbedding, inverse_frequencies


def numbers(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def test_rms_norm_gradients():
    x, weight = numbers(3, 2, 5).requires_grad_(), numbers(5, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 0.1), (x, weight))
    torch.testing.assert_close(rms_norm(x, weight, 0.1), torch.nn.functional.rms_norm(x, (5,), weight, 0.1))


def test_swiglu_gradients():
    x = numbers(3, 2, 8).requires_grad_()
    assert torch.autograd.gradcheck(swiglu, (x,))
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(swiglu(x), gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2), (2, 1)])
@pytest.mark.parametrize("rotary", [4, 6])
def test_rotation_gradients(heads, groups, rotary):
    split = HeadSplit(heads, groups, 6)
    tables = RotaryEmbedding(rotary, base=100.0).tables(torch.tensor([[0, 1, 2], [0, 1, 0]]), torch.float64)
    qkv = numbers(3, 2, split.qkv_rows).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: split_and_rotate(x, tables, split), (qkv,))
    assert torch.autograd.gradcheck(lambda x: split_and_rotate(x, None, split), (qkv,))
    q, k, v = split_and_rotate(qkv, tables, split)
    plain_q, plain_k, plain_v = split_and_rotate(qkv, None, split)
    assert torch.equal(v, plain_v)
    assert torch.equal(q[..., rotary:], plain_q[..., rotary:])
    for turned, plain in ((q, plain_q), (k, plain_k)):
        as_complex = torch.complex(plain[..., : rotary // 2], plain[..., rotary // 2 : rotary])
        want = as_complex * torch.complex(tables.cos, tables.sin)
        torch.testing.assert_close(torch.cat([want.real, want.imag], -1), turned[..., :rotary])


def test_rotation_leaves_its_input_alone():
    split = HeadSplit(2, 2, 4)
    qkv = numbers(3, 1, split.qkv_rows)
    before = qkv.clone()
    split_and_rotate(qkv, RotaryEmbedding(4, base=10.0).tables(torch.arange(3), qkv.dtype), split)
    assert torch.equal(qkv, before)


def plain_attention(q, k, v, keep=None, rate=0.0):
    """One head of one sample at a time, from the definition."""
    s, b, n, d = q.shape
    t, g = k.shape[0], k.shape[2]
    out = torch.empty(s, b, n, d, dtype=q.dtype)
    for sample, head, i in itertools.product(range(b), range(n), range(s)):
        seen = t - s + i + 1
        kv = head // (n // g)
        scores = k[:seen, sample, kv] @ q[i, sample, head] / math.sqrt(d)
        weights = scores.softmax(0)
        if keep is not None:
            weights = weights * keep[sample, head, i, :seen] / (1 - rate)
        out[i, sample, head] = weights @ v[:seen, sample, kv]
    return out.flatten(2)


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (1, 5), (3, 5)])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_attention_from_the_definition(queries, keys, groups, rate):
    q, k, v = numbers(queries, 2, 4, 8), numbers(keys, 2, groups, 8, seed=1), numbers(keys, 2, groups, 8, seed=2)
    keep = numbers(2, 4, queries, keys, seed=3) > 0 if rate else None
    got = core_attention(q, k, v, keep=keep, dropout=rate)
    torch.testing.assert_close(got, plain_attention(q, k, v, keep, rate))


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_attention_gradients(rate):
    q, k, v = (numbers(3, 1, n, 4, seed=n).requires_grad_() for n in (4, 2, 2))
    keep = numbers(1, 4, 3, 3, seed=3) > 0 if rate else None
    assert torch.autograd.gradcheck(lambda q, k, v: core_attention(q, k, v, keep=keep, dropout=rate), (q, k, v))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_kernels_compute_in_fp32(dtype):
    kernels = torch_kernels()
    x, weight, bias = numbers(64, 2, 48).to(dtype), numbers(48, seed=1).to(dtype), numbers(48, seed=2).to(dtype)
    split = HeadSplit(4, 2, 6)
    tables = RotaryEmbedding(6, base=100.0).tables(torch.arange(64), dtype)
    q, k, v = (
        numbers(64, 2, 4, 6).to(dtype),
        numbers(64, 2, 2, 6, seed=1).to(dtype),
        numbers(64, 2, 2, 6, seed=2).to(dtype),
    )

    def run(cast):
        yield kernels.rms_norm(cast(x), cast(weight), 1e-5)
        yield kernels.layer_norm(cast(x), cast(weight), cast(bias), 1e-5)
        yield kernels.apply_rope(cast(x), tables, split)[0]
        yield kernels.core_attention(cast(q), cast(k), cast(v))

    for got, want in zip(run(lambda x: x), run(lambda x: x.float()), strict=True):
        assert got.dtype == dtype
        half_a_unit = 0.505 * torch.finfo(dtype).eps * want.abs() + 1e-6
        assert ((got.float() - want).abs() <= half_a_unit).all(), "more was rounded than the result"


CONFIGS = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "theta": {"rope_type": "default", "rope_theta": 500000.0},
    "factor_8": {"factor": 8.0},
    "factor_32": {"factor": 32.0},
    "bounds": {"factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 9.0},
    "original": {"factor": 8.0, "original_max_position_embeddings": 512},
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("head", [16, 64, 128])
def test_inverse_frequencies_equal_hf(name, head):
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rope = CONFIGS[name] if "rope_type" in CONFIGS[name] else {**llama3, **CONFIGS[name]}
    config = LlamaConfig(hidden_size=4 * head, num_attention_heads=4, head_dim=head, rope_parameters=rope)
    scaling = None
    if rope["rope_type"] == "llama3":
        want, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        scaling = RopeScaling(*(rope[name] for name in names))
    else:
        want, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    got = inverse_frequencies(head, base=rope["rope_theta"], scaling=scaling)
    torch.testing.assert_close(got.float(), want, rtol=1e-6, atol=0)


def test_far_positions_keep_their_angles():
    tables = RotaryEmbedding(4, base=10000.0).tables(torch.tensor([1_000_003]), torch.float32)
    assert tables.cos.flatten()[0].item() == pytest.approx(math.cos(1_000_003), abs=1e-7)


def test_odd_rotary_sizes_and_idle_scaling_are_refused():
    with pytest.raises(ValueError, match="gives 5"):
        RotaryEmbedding(5, base=10.0)
    with pytest.raises(ValueError, match=r"high-freq-factor 1\.0 must be above"):
        RopeScaling(8.0, 1.0, 1.0, 8192)
