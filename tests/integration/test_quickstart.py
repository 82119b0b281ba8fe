"""The quick start: every layout that is shown on it follows the one-rank run, and it learns."""

from __future__ import annotations

import pytest
import tiny

from mcore_cli.resolve import resolve
from mcore_parallel.testing import run_ranks

LAYOUT = {
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "pipeline_model_parallel_size": 2,
    "use_distributed_optimizer": True,
}


def _run(world, tmp_path, **fields):
    given = {"data_cache_path": str(tmp_path / "cache"), "device": "cpu", **fields}
    config = resolve("quickstart", given, tiny.fresh_manager()).config
    return run_ranks(tiny.train_job, world, config, str(tmp_path / f"run{world}"), limit=500)[0][0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_steps_on_eight_ranks_follow_one_rank(tmp_path):
    one = _run(1, tmp_path, exit_interval=20)
    eight = _run(8, tmp_path, exit_interval=20, **LAYOUT)
    assert len(one) == len(eight) == 20
    assert [step.loss for step in eight] == pytest.approx([step.loss for step in one], abs=1e-4)
    assert one[-1].loss < one[0].loss - 1.5


def test_the_order_of_samples_is_that_of_one_rank(tmp_path):
    """A few steps of a cut-down quick start: the same loss per step means the same samples per step."""
    small = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 32, "exit_interval": 2}
    one = _run(1, tmp_path, **small)
    four = _run(4, tmp_path, **small, use_distributed_optimizer=True)
    assert [step.loss for step in four] == pytest.approx([step.loss for step in one], abs=1e-5)
    assert [step.consumed_samples for step in four] == [32, 64]
