"""Every layer lives on exactly one stage, or the split is refused with the sizes that would work."""

from __future__ import annotations

import pytest

from mcore_parallel.pipeline.stage import nearest_stage_counts, stage_layers


@pytest.mark.parametrize("num_stages", range(1, 13))
@pytest.mark.parametrize("num_layers", range(1, 25))
def test_all_layers_once_or_refused(num_layers: int, num_stages: int) -> None:
    if num_layers % num_stages == 0:
        held = [i for stage in range(num_stages) for i in stage_layers(num_layers, num_stages, stage)]
        assert held == list(range(num_layers))
        return
    for stage in range(num_stages):
        with pytest.raises(ValueError, match=rf"{num_layers} layers .* {num_stages} pipeline stages") as refusal:
            stage_layers(num_layers, num_stages, stage)
    named = [int(word) for word in str(refusal.value).split("parallel-size ")[2].split(" or ")]
    assert named
    for size in named:
        assert stage_layers(num_layers, size, 0)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "nearest"),
    [(30, 4, [3, 5]), (7, 2, [1, 7]), (5, 3, [1, 5]), (3, 4, [3]), (80, 48, [40, 80])],
)
def test_nearest_sizes(num_layers: int, num_stages: int, nearest: list[int]) -> None:
    assert nearest_stage_counts(num_layers, num_stages) == nearest


def test_stages_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="stage 4 is outside the 4 stages 0 to 3"):
        stage_layers(8, 4, 4)
    with pytest.raises(ValueError, match="stage -1"):
        stage_layers(8, 4, -1)
    with pytest.raises(ValueError, match="0 layers"):
        stage_layers(0, 1, 0)
