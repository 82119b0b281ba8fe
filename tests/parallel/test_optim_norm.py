"""The arithmetic of norms and clipping on one rank."""

import math

import pytest
import torch

from mcore_parallel.axis import single_layout
from mcore_parallel.optim.grad_norm import clip_coefficient, global_norm, sum_of_squares


def test_fp32_norm_of_a_long_flat_buffer_keeps_its_digits():
    flat = torch.full((5_000_003,), 1.1, dtype=torch.float32)
    exact = 5_000_003 * float(flat[0]) ** 2
    assert float(sum_of_squares([flat], device=flat.device)) == pytest.approx(exact, rel=1e-6)


def test_norm_of_nothing_is_zero_and_nan_stays_nan():
    world = single_layout().axis("world")
    assert global_norm([], world=world, device=torch.device("cpu")) == 0.0
    assert math.isnan(global_norm([torch.tensor([math.nan])], world=world, device=torch.device("cpu")))
    assert global_norm([torch.tensor([math.inf])], world=world, device=torch.device("cpu")) == math.inf


def test_clip_coefficient_table():
    assert clip_coefficient(2.0, 1.0) == 1.0 / (2.0 + 1e-6)
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(2.0, 0.0) == 1.0
    assert clip_coefficient(0.0, 1.0) == 1.0
