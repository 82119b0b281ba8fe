"""Bytes per step and axis, as the recorder counts them, equal the closed form exactly."""

from __future__ import annotations

import pytest
import tiny
import torch

from mcore_cli.build import build_parts, stages_of
from mcore_cli.pipeline import pipeline_shape, schedules_of
from mcore_cli.step import backward_all
from mcore_cli.verify import _own_batches, parity_samples
from mcore_models.local_parameters import RankShape
from mcore_models.specs import Recompute
from mcore_models.traffic_cost import StepShape, num_crossings, step_traffic
from mcore_parallel.testing import run_ranks

CASES = {
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp4-sp": (4, {"tensor_model_parallel_size": 4, "sequence_parallel": True}),
    "dp2": (2, {}),
    "dp4-zero": (4, {"use_distributed_optimizer": True, "ddp_bucket_size": 700}),
    "pp4": (4, {"pipeline_model_parallel_size": 4}),
    "pp2-recompute": (2, {
        "pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 1,
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
    }),
    "tp2-sp-recompute": (2, {
        "tensor_model_parallel_size": 2, "sequence_parallel": True,
        "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3,
    }),
    "pp2-vpp2-zero": (4, {
        "pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2,
        "pipeline_schedule": "interleaved", "use_distributed_optimizer": True, "ddp_bucket_size": 700,
    }),
    "zbv-tp2-sp": (4, {
        "pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv", "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
    }),
    "zb-h1-recompute": (4, {
        "pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1", "recompute_granularity": "full",
        "recompute_method": "uniform", "recompute_num_layers": 1,
    }),
    "all": (8, {
        "tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2,
        "use_distributed_optimizer": True, "micro_batch_size": 2,
    }),
}  # fmt: skip


def _traffic(rank, world, config):
    layout = tiny.layout_of(config, rank, world)
    device = torch.device("cpu")
    parts = build_parts(config, layout, manager=tiny.fresh_manager(), device=device, dtype=torch.float32)
    batches = _own_batches(parts, parity_samples(config, 8, ragged=True))
    backward_all(parts, batches, step=0)
    layout.recorder.clear()
    layout.recorder.enabled = True
    backward_all(parts, batches, step=1)
    parts.optimizer.step(10.0)
    totals = {key: count for key, count in layout.recorder.totals().items() if key[0] != "world"}
    return totals, _closed_form(config, layout, len(batches))


def _closed_form(config, layout, num_micro_batches):
    parallel = config.parallel
    tp, pp = layout.axis("tp"), layout.axis("pp")
    shape = pipeline_shape(config, schedules_of(tiny.fresh_manager()))
    recompute = None
    if parallel.recompute_method is not None:
        recompute = Recompute(parallel.recompute_method, parallel.recompute_num_layers)
    return step_traffic(
        config.model,
        stages=stages_of(config, shape, pp.rank),
        rank=RankShape(tp=tp.size, tp_rank=tp.rank, sequence_parallel=parallel.sequence_parallel),
        shape=StepShape(
            seq_length=config.data.seq_length,
            micro_batch_size=config.train.micro_batch_size,
            num_micro_batches=num_micro_batches,
            num_crossings=num_crossings(shape.flow, pp.rank),
            data_ranks=layout.axis("dp", "cp").size,
            zero=parallel.use_distributed_optimizer,
            bucket_size=parallel.ddp_bucket_size,
            recompute=recompute,
        ),
        vocab_size=config.model.vocab_size,
    )


@pytest.mark.parametrize("family", [tiny.LLAMA, tiny.GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("case", CASES)
def test_recorded_bytes_equal_the_closed_form(case, family):
    world, fields = CASES[case]
    tied = {"untie_embeddings_and_output_weights": family is tiny.LLAMA}
    for rank, (counted, expected) in enumerate(run_ranks(_traffic, world, tiny.tiny_config(family, **fields, **tied))):
        assert counted == expected, f"rank {rank}"
        assert counted


def test_tied_ends_on_one_rank_exchange_nothing():
    """Under a V the word embedding is one parameter; dealt round, its two copies are summed."""
    tied = {"untie_embeddings_and_output_weights": False, "pipeline_model_parallel_size": 2}
    folded = tiny.tiny_config(tiny.GPT, pipeline_schedule="dualpipev", **tied)
    assert not any(axis == "embedding" for counted, _ in run_ranks(_traffic, 2, folded) for axis, _ in counted)
    looped = tiny.tiny_config(tiny.GPT, pipeline_schedule="interleaved", num_virtual_stages_per_pipeline_rank=2, **tied)
    for counted, _ in run_ranks(_traffic, 2, looped):
        assert counted["embedding", "all_reduce"] == 37 * 16 * 4
