"""Layers on stages: every layer once, in model order, or a refusal that names the numbers."""

from __future__ import annotations

import pytest

from mcore_parallel.pipeline.actions import looped_flow
from mcore_parallel.pipeline.stage import PlacementError, place_layers

CELLS = [(layers, pp, vpp) for layers in range(1, 25) for pp in range(1, 7) for vpp in range(1, 5)]


def test_even_split_holds_every_layer_once_or_names_the_numbers() -> None:
    for layers, pp, vpp in CELLS:
        if layers % (pp * vpp) == 0:
            placed = place_layers(layers, looped_flow(pp, vpp))
            assert len(placed) == pp * vpp
            assert [layer for stage in placed for layer in stage] == list(range(layers))
            assert {len(stage) for stage in placed} == {layers // (pp * vpp)}
            continue
        with pytest.raises(PlacementError, match=rf"{layers} layers .* {pp * vpp} pipeline stages") as refusal:
            place_layers(layers, looped_flow(pp, vpp))
        assert f"--num-layers {layers} over --pipeline-model-parallel-size {pp}" in refusal.value.values
        assert vpp == 1 or f"x {vpp} virtual stages" in refusal.value.values


def test_interleaved_stages_are_dealt_round_the_ranks() -> None:
    flow = looped_flow(2, 2)
    placed = place_layers(8, flow)
    held = {place: list(layers) for place, layers in zip(flow.places, placed, strict=True)}
    assert held == {(0, 0): [0, 1], (1, 0): [2, 3], (0, 1): [4, 5], (1, 1): [6, 7]}
