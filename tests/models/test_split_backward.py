"""Split backwards of a whole model: the same products, each once, under recomputation, tied weights and real ranks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_models.build import build_stage_models, distinct_parameters, initialise_model
from mcore_models.config import ModelConfig
from mcore_models.kernels import torch_kernels
from mcore_models.specs import Recompute, StageSpec
from mcore_parallel.axis import build_layout, single_layout
from mcore_parallel.grad_sync import GradBuffers
from mcore_parallel.mesh import build_mesh
from mcore_parallel.placement import placement_of
from mcore_parallel.testing import run_ranks
from mcore_parallel.weight_grad import WeightGradQueue

FIELDS = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 101, "ffn_hidden_size": 48,
    "max_position_embeddings": 16, "make_vocab_size_divisible_by": 8, "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
LINEARS = 2 * 4  # qkv, projection, fc1, fc2 of each layer
WHOLE = [StageSpec(0, 2, True, True)]
FOLDED = [StageSpec(0, 1, True, False), StageSpec(1, 1, False, True)]


class CountProducts(TorchDispatchMode):
    """Counts matrix products by operation."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("mm", "addmm"):
            self.count["products"] += 1
        return function(*args, **(kwargs or {}))


def build(layout, *, stages=WHOLE, recompute=None, sequence_parallel=False, dtype=torch.float64, **fields):
    models = build_stage_models(
        ModelConfig(**{**FIELDS, **fields}),
        layout=layout,
        stages=stages,
        kernels=torch_kernels(),
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        dtype=dtype,
    )
    for model in models:
        initialise_model(model, seed=1)
    parameters = distinct_parameters(models)
    queue = WeightGradQueue()
    queue.attach(parameters)
    buffers = GradBuffers(parameters, layout)
    buffers.begin_step(1)
    return models, parameters, queue, buffers


def loss_of(models):
    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(0, 101, (2, 2, 8), generator=generator)
    hidden = models[0](tokens, labels=labels if len(models) == 1 else None)
    return hidden if len(models) == 1 else models[1](hidden, labels=labels)


def backward(loss, queue, *, split):
    """Products in the backward (or input gradient), and in the weight gradient."""
    first, second = CountProducts(), CountProducts()
    if not split:
        with first:
            loss.backward()
        return first.count["products"], 0
    with first, queue.deferring(0, 0):
        loss.backward()
    with second:
        queue.drain(0, 0)
    return first.count["products"], second.count["products"]


@pytest.mark.parametrize("recompute", [None, Recompute("uniform", 1), Recompute("uniform", 2), Recompute("block", 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_each_product_runs_once_and_the_gradients_are_the_same_bits(recompute, dtype):
    whole = build(single_layout(), recompute=recompute, dtype=dtype)
    together, _ = backward(loss_of(whole[0]), whole[2], split=False)
    models, parameters, queue, _ = build(single_layout(), recompute=recompute, dtype=dtype)
    first, second = backward(loss_of(models), queue, split=True)
    assert second == LINEARS
    assert first + second == together
    for mine, want in zip(parameters, whole[1], strict=True):
        assert torch.equal(mine.main_grad, want.main_grad)
        assert mine.grad is None


def test_recomputation_keeps_accumulating_into_the_main_grad():
    """Autograd's copy of a recomputed weight has no main grad: its gradient would be rounded to the weight's type."""
    kept = build(single_layout(), dtype=torch.bfloat16)
    backward(loss_of(kept[0]), kept[2], split=False)
    again = build(single_layout(), dtype=torch.bfloat16, recompute=Recompute("uniform", 1))
    backward(loss_of(again[0]), again[2], split=False)
    for mine, want in zip(again[1], kept[1], strict=True):
        assert mine.main_grad.dtype == torch.float32
        assert torch.equal(mine.main_grad, want.main_grad)


def test_gradients_count_as_ready_when_they_are():
    models, parameters, queue, buffers = build(single_layout())
    backward(loss_of(models), queue, split=False)
    buffers.finish()
    buffers.begin_step(1)
    loss = loss_of(models)
    with queue.deferring(0, 0):
        loss.backward()
    launched = [name for bucket in buffers.buckets if bucket.launched for name in bucket.names]
    assert launched  # norms and biases
    assert not any(".linear_" in name and name.endswith("weight") for name in launched)
    queue.drain(0, 0)
    assert buffers.num_launched == len(buffers.buckets)
    assert len(parameters) > LINEARS


def test_both_ends_on_one_rank_share_the_tied_weight():
    models, parameters, queue, buffers = build(single_layout(), stages=FOLDED)
    word = models[0].embedding.word_embeddings.weight
    assert models[1].output.weight is word
    assert [placement_of(p).chunk for p in models[0].parameters()] == [0] * len(list(models[0].parameters()))
    assert {placement_of(p).chunk for p in models[1].parameters() if p is not word} == {1}
    assert not any(piece.partial_over for piece in placement_of(word).pieces)
    want = build(single_layout())
    backward(loss_of(want[0]), want[2], split=False)
    first, second = backward(loss_of(models), queue, split=True)
    assert (first > 0, second) == (True, LINEARS)
    assert [p.shape for p in parameters] == [p.shape for p in want[1]]
    for mine, whole in zip(parameters, want[1], strict=True):
        torch.testing.assert_close(mine.main_grad, whole.main_grad, rtol=1e-12, atol=1e-12)
    assert {bucket.chunk for bucket in buffers.buckets} == {0, 1}


def split_rank(rank, world, sequence_parallel):
    layout = build_layout(build_mesh(world, tp=world), rank)
    found = []
    for split in (False, True):
        models, parameters, queue, buffers = build(layout, sequence_parallel=sequence_parallel)
        layout.recorder.clear()
        layout.recorder.enabled = True
        backward(loss_of(models), queue, split=split)
        layout.recorder.enabled = False
        buffers.finish()
        grads = [p.main_grad.clone() for p in parameters]
        found.append((grads, layout.recorder.totals(), queue.peak_bytes))
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks_move_and_compute_the_same(sequence_parallel):
    tokens, hidden, ffn = 2 * 8, 32, 48
    cut = 2 if sequence_parallel else 1
    # per layer: input and output gradient of qkv, of the projection, of fc1 and of fc2
    inputs = hidden // cut + hidden // 2 + hidden // cut + ffn // 2
    outputs = 3 * hidden // 2 + hidden + ffn // 2 + hidden
    for (together, moved, _), (split, moved_split, held) in run_ranks(split_rank, 2, sequence_parallel):
        assert moved_split == moved
        assert held == 2 * tokens * (inputs + outputs) * 8
        assert all(torch.equal(a, b) for a, b in zip(split, together, strict=True))
