"""On CUDA: one rank agrees with the CPU, and the oracle passes over NCCL. Skipped without a GPU."""

from __future__ import annotations

import pytest
import tiny
import torch

from mcore_cli.build import build_parts
from mcore_cli.step import backward_all
from mcore_cli.verify import _own_batches, logical_weights, parity, parity_samples
from mcore_parallel.axis import single_layout

pytestmark = pytest.mark.gpu


def _train(device, **fields):
    config = tiny.tiny_config(tiny.LLAMA, hidden_dropout=0.1, **fields)
    layout = single_layout(config.model.num_kv_heads)
    parts = build_parts(config, layout, manager=tiny.fresh_manager(), device=torch.device(device))
    batches = _own_batches(parts, parity_samples(config, 8, ragged=True))
    losses = []
    for step in range(3):
        losses.append(sum(loss.item() for loss in backward_all(parts, batches, step=step)))
        parts.optimizer.step(30.0)
    return losses, logical_weights(parts)


def test_cuda_agrees_with_the_cpu():
    losses, weights = _train("cuda")
    want, want_weights = _train("cpu")
    assert losses == pytest.approx(want, rel=1e-4)
    for name, array in weights.items():
        torch.testing.assert_close(array, want_weights[name], rtol=1e-2, atol=1e-3)


def test_bf16_trains():
    losses, _ = _train("cuda", bf16=True)
    assert losses[-1] < losses[0]


def test_the_oracle_on_one_gpu():
    config = tiny.tiny_config(tiny.GPT)
    report = parity(config, single_layout(), manager=tiny.fresh_manager(), device=torch.device("cuda"))
    assert report.failures == []
