"""Several model chunks per rank: checkpoints by global layer, tied copies that stay equal, weights that are whole."""

from __future__ import annotations

import pytest
import tiny
import torch

from mcore_ckpt.find import open_checkpoint
from mcore_cli.build import build_parts
from mcore_cli.checkpointing import Position, load_weights, save_run
from mcore_cli.step import backward_all, forward_all, sum_over_ranks
from mcore_cli.verify import _own_batches, logical_weights, parity_samples
from mcore_parallel.optim.lr_schedule import build_schedule
from mcore_parallel.pipeline.actions import Kind
from mcore_parallel.placement import placement_of
from mcore_parallel.testing import run_ranks

V = "num_virtual_stages_per_pipeline_rank"
LAYOUTS = {
    "pp1": (1, {}),
    "pp4": (4, {"pipeline_model_parallel_size": 4}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "pp2-vpp2": (2, {"pipeline_model_parallel_size": 2, V: 2}),
    "zbv": (2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv"}),
}
OWNED = {
    "pp2-vpp2": [[0, 1, 4, 5], [2, 3, 6, 7]],
    "zbv": [[0, 1, 6, 7], [2, 3, 4, 5]],
    "pp2": [[0, 1, 2, 3], [4, 5, 6, 7]],
}


def _parts(rank, world, fields, **more):
    config = tiny.tiny_config({**tiny.GPT, "num_layers": 8}, **fields, **more)
    layout = tiny.layout_of(config, rank, world)
    return build_parts(config, layout, manager=tiny.fresh_manager(), device=torch.device("cpu"), dtype=torch.float32)


def _layer_of(parameter):
    name = placement_of(parameter).pieces[0].name.split(".")
    return int(name[2]) if name[:2] == ["decoder", "layers"] else None


def _save_constants(rank, world, fields, folder):
    """Layer i holds i + 1 everywhere, whatever chunk it is in."""
    parts = _parts(rank, world, fields)
    layers = set()
    with torch.no_grad():
        for parameter in parts.parameters:
            layer = _layer_of(parameter)
            parameter.fill_(100.0 if layer is None else layer + 1)
            layers |= set() if layer is None else {layer}
    schedule = build_schedule(parts.config.optimizer, train_iters=4, train_samples=None, global_batch_size=8)
    save_run(parts, folder, position=Position(1, 8, 64), schedule=schedule, data={})
    return sorted(layers)


def _load_constants(rank, world, fields, folder):
    parts = _parts(rank, world, fields)
    load_weights(parts.chunks, open_checkpoint(folder, None))
    return [(_layer_of(parameter), parameter.unique().tolist()) for parameter in parts.parameters]


@pytest.mark.parametrize(("saved", "loaded"), [
    ("pp2-vpp2", "pp1"), ("pp2-vpp2", "pp4"), ("pp2-vpp2", "pp2"), ("pp2", "pp2-vpp2"), ("zbv", "pp2-vpp2"),
    ("pp4", "zbv"),
])  # fmt: skip
def test_layers_keep_their_global_numbers_in_checkpoints(saved, loaded, tmp_path):
    world, fields = LAYOUTS[saved]
    owned = run_ranks(_save_constants, world, fields, str(tmp_path))
    if saved in OWNED:
        assert owned == OWNED[saved]
    world, fields = LAYOUTS[loaded]
    seen = set()
    for parameters in run_ranks(_load_constants, world, fields, str(tmp_path)):
        for layer, values in parameters:
            assert values == [100.0 if layer is None else layer + 1]
            seen.add(layer)
    assert seen == {None, *range(8)}


def _train(rank, world, fields, steps, wait):
    """Train without waiting for the gathered weights (or waiting); tied copies, losses and weights."""
    parts = _parts(rank, world, fields, ddp_bucket_size=300)
    samples = parity_samples(parts.config, 8, ragged=True)
    batches = _own_batches(parts, samples)
    copies, losses = [], []
    for step in range(steps):
        summed = sum_over_ranks(parts.layout, backward_all(parts, batches, step=step), batches, device=parts.device)
        losses.append(summed.mean_loss)
        parts.optimizer.step(summed.tokens, wait=wait)
        if wait:
            copies.append([p.detach().clone() for p in parts.parameters if "word_embeddings" in _name(p)])
    evaluated = sum_over_ranks(parts.layout, forward_all(parts, batches), batches, device=parts.device).mean_loss
    return copies, losses, evaluated, logical_weights(parts)


def _name(parameter):
    return placement_of(parameter).pieces[0].name


ZERO = {"use_distributed_optimizer": True, "untie_embeddings_and_output_weights": False}


@pytest.mark.parametrize("fields", [LAYOUTS["pp2-vpp2"][1], LAYOUTS["zbv"][1]], ids=["vpp2", "zbv"])
def test_tied_copies_stay_equal_and_late_gathers_change_nothing(fields):
    waited = run_ranks(_train, 4, {**fields, **ZERO}, 5, True)
    late = run_ranks(_train, 4, {**fields, **ZERO}, 5, False)
    one = _train(0, 1, {"untie_embeddings_and_output_weights": False}, 5, True)
    for step in range(5):
        copies = [copy for copies, *_ in waited for copy in copies[step]]
        assert len(copies) == (2 if "pipeline_schedule" in fields else 4)
        assert all(torch.equal(copy, copies[0]) for copy in copies)
    assert waited[0][1] == late[0][1]
    assert waited[0][2] == late[0][2]
    assert waited[0][1] == pytest.approx(one[1], rel=1e-5)
    assert all(torch.equal(late[0][3][name], values) for name, values in waited[0][3].items())


def _plan(rank, world, fields):
    parts = _parts(rank, world, fields)
    return [str(action) for action in parts.train_plan.actions if action.kind not in _MESSAGES], [
        bucket.chunk for bucket in parts.optimizer.buffers.buckets if not bucket.late
    ]


_MESSAGES = {Kind.SEND_FORWARD, Kind.RECV_FORWARD, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD}


@pytest.mark.parametrize("layout", ["pp2-vpp2", "zbv"])
def test_plans_gather_before_the_first_forward_and_reduce_after_the_last_pass(layout):
    world, fields = LAYOUTS[layout]
    for actions, bucket_chunks in run_ranks(_plan, world, fields):
        for chunk, end in enumerate(("", ".1")):
            own = [a for a in actions if a.removeprefix("G").removeprefix("R").endswith(".1") == (chunk == 1)]
            assert own[0] == f"G{end}"
            assert own[-1] == f"R{end}"
            assert own[1].startswith("F0")
        reduced = [1 if a.endswith(".1") else 0 for a in actions if a.startswith("R")]
        assert sorted(reduced) == [0, 1]
        assert bucket_chunks == sorted(bucket_chunks, key=reduced.index)
