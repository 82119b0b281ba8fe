"""Initial values and dropout masks depend on identity alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_parallel import rng
from mcore_parallel.placement import Init, Placement, columns, replicated, rows

SHAPE = (24, 10)
INIT = Init(std=0.5)


def _whole(seed: int = 1, name: str = "w") -> torch.Tensor:
    return rng.box_values(replicated(name, SHAPE, init=INIT).pieces[0], seed=seed)


@given(begin=st.integers(0, 24), end=st.integers(0, 30))
@settings(deadline=None, max_examples=40)
def test_a_row_box_equals_the_slice_of_the_whole(begin, end):
    piece = rows("w", SHAPE, begin=begin, end=end, init=INIT)
    assert torch.equal(rng.box_values(piece, seed=1), _whole()[begin : max(begin, min(end, 24))])


@given(begin=st.integers(0, 10), extent=st.integers(0, 10))
@settings(deadline=None, max_examples=20)
def test_a_column_box_equals_the_slice_of_the_whole(begin, extent):
    end = min(10, begin + extent)
    piece = columns("w", SHAPE, begin=begin, end=end, init=INIT)
    assert torch.equal(rng.box_values(piece, seed=1), _whole()[:, begin:end])


def test_initialise_fills_pieces_and_zeroes_padding(monkeypatch):
    monkeypatch.setattr(rng, "_INIT_ROWS_BYTES", 8 * 10 * 3)  # three rows at a time
    fused = Placement((
        rows("q", SHAPE, begin=4, end=10, init=INIT),
        replace(rows("k", SHAPE, begin=20, end=26, init=INIT), start=6),
    ))  # fmt: skip
    local = torch.full((12, 10), float("nan"), dtype=torch.float64)
    rng.initialise(local, fused, seed=1)
    assert torch.equal(local[:6], _whole(name="q")[4:10])
    assert torch.equal(local[6:10], _whole(name="k")[20:24])
    assert local[10:].abs().max() == 0


def test_names_seeds_and_rows_give_different_values():
    assert not torch.equal(_whole(), _whole(seed=2))
    assert not torch.equal(_whole(), _whole(name="v"))
    flat = rng.box_values(replicated("w", (5000,), init=INIT).pieces[0], seed=1)
    assert len(torch.unique(flat)) == 5000


def test_values_are_standard_normal():
    x = rng.box_values(replicated("w", (400_000,), init=Init(std=1.0)).pieces[0], seed=3)
    assert x.mean().item() == pytest.approx(0, abs=0.01)
    assert x.std().item() == pytest.approx(1, abs=0.01)
    assert (x**3).mean().item() == pytest.approx(0, abs=0.03)
    assert (x**4).mean().item() == pytest.approx(3, abs=0.08)
    neighbours = torch.corrcoef(torch.stack([x[:-1], x[1:]]))[0, 1].item()
    assert neighbours == pytest.approx(0, abs=0.01)


def test_zeros_and_ones():
    for kind, value in (("zeros", 0.0), ("ones", 1.0)):
        piece = replicated("n", (3,), init=Init(kind)).pieces[0]
        assert rng.box_values(piece, seed=1).tolist() == [value] * 3


def _mask(samples, positions, channels, *, step=0, layer=0, site="mlp", p=0.3):
    keys = rng.site_keys(torch.tensor(samples), seed=9, step=step, layer=layer, site=site)
    return rng.keep_mask(keys, positions=torch.tensor(positions), channels=torch.tensor(channels), probability=p)


def test_masks_of_any_split_are_slices_of_the_whole():
    whole = _mask([4, 7, 8, 9], range(8), range(6))
    assert torch.equal(_mask([8, 9], [2, 3], [4, 5]), whole[2:4, 2:, 4:])


def test_masks_have_their_rate_and_differ_between_sites_steps_layers_and_samples():
    whole = _mask(range(20), range(50), range(40))
    assert whole.float().mean().item() == pytest.approx(0.7, abs=0.01)
    others = [
        _mask(range(20), range(50), range(40), step=1),
        _mask(range(20), range(50), range(40), layer=1),
        _mask(range(20), range(50), range(40), site="attention"),
        _mask(range(20, 40), range(50), range(40)),
    ]
    for other in others:  # independent masks agree where both keep or both drop: 0.7^2 + 0.3^2
        assert (other == whole).float().mean().item() == pytest.approx(0.58, abs=0.01)
    across = (whole[1:] == whole[:-1]).float().mean().item(), (whole[..., 1:] == whole[..., :-1]).float().mean().item()
    assert across == pytest.approx((0.58, 0.58), abs=0.01)


def test_dropout_scales_what_it_keeps():
    x = torch.ones(4, 1, 5)
    mask = _mask([1], range(4), range(5), p=0.5)
    assert torch.equal(rng.dropout(x, mask, 0.5), mask.float() * 2)
    assert bool(_mask([1], range(4), range(5), p=0.0).all())
