"""Dropout masks: right rates, and a function of identity alone."""

from dataclasses import replace

import pytest
import torch

from mcore_models.dropout import AttentionDropout, DropoutState, HiddenDropout
from mcore_models.heads import HeadSplit
from mcore_parallel.axis import Axis


def alone():
    return Axis("tp", (0,))


def test_hidden_dropout_statistics_and_identity():
    drop = HiddenDropout(0.25, layer=1, site="mlp_output", tp=alone(), sequence_parallel=False)
    x = torch.ones(64, 4, 128, dtype=torch.float64)
    assert drop(x, None) is x
    out = drop(x, DropoutState(1, 1, torch.arange(4)))
    assert set(out.unique().tolist()) == {0.0, 1 / 0.75}
    assert out.mean().item() == pytest.approx(1.0, abs=0.02)
    assert out.mean((0, 2)).sub(1).abs().max() < 0.05
    assert replace(drop, probability=0.0)(x, DropoutState(1, 1, torch.arange(4))) is x


def test_dropout_masks_depend_on_identity_alone():
    x = torch.ones(16, 3, 32, dtype=torch.float64)
    state = DropoutState(1, 1, torch.tensor([7, 8, 9]))
    drop = HiddenDropout(0.5, layer=1, site="mlp_output", tp=alone(), sequence_parallel=False)
    whole = drop(x, state)
    assert torch.equal(drop(x[:, 1:2], replace(state, sample_ids=torch.tensor([8]))), whole[:, 1:2])
    for rank in (0, 1):
        half = replace(drop, tp=Axis("tp", (0, 1), rank), sequence_parallel=True)
        assert torch.equal(half(x[:8], state), whole[8 * rank : 8 * rank + 8])
    others = [
        drop(x, replace(state, seed=2)),
        drop(x, replace(state, step=2)),
        replace(drop, layer=2)(x, state),
        replace(drop, site="attention_output")(x, state),
        drop(x, replace(state, sample_ids=torch.tensor([8, 9, 7]))),
    ]
    assert all(not torch.equal(whole[:, i], other[:, i]) for other in others for i in range(3))


def test_attention_masks_of_a_rank_are_its_heads():
    state = DropoutState(1, 1, torch.tensor([7, 8]))
    whole = AttentionDropout(0.5, 3, HeadSplit(4, 4, 8)).keep(6, state, torch.device("cpu"))
    assert whole.shape == (2, 4, 6, 6)
    assert whole.double().mean().item() == pytest.approx(0.5, abs=0.1)
    for rank in (0, 1):
        part = AttentionDropout(0.5, 3, HeadSplit(4, 4, 8, 2, rank)).keep(6, state, torch.device("cpu"))
        assert torch.equal(part, whole[:, 2 * rank : 2 * rank + 2])
    assert not torch.equal(whole[:, 0], whole[:, 1])
    assert AttentionDropout(0.0, 3, HeadSplit(4, 4, 8)).keep(6, state, torch.device("cpu")) is None
