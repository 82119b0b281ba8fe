"""Gradients and weights by chunk: buckets not shared, reductions in the order of the plan, late gathers."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from mcore_parallel.axis import build_layout, single_layout
from mcore_parallel.config import OptimizerConfig, ParallelConfig
from mcore_parallel.grad_sync import GradBuffers
from mcore_parallel.mesh import build_mesh
from mcore_parallel.optim.optimizer import build_optimizer
from mcore_parallel.pipeline.p2p import connect
from mcore_parallel.placement import Init, place, replicated
from mcore_parallel.plugins import Registry, plugin_manager
from mcore_parallel.testing import run_ranks


def parameters():
    """Two of chunk 0, one of chunk 1."""
    found = []
    for name, chunk in (("a", 0), ("b", 0), ("c", 1)):
        placement = replace(replicated(name, (4, 3), init=Init()), chunk=chunk)
        found.append(place(nn.Parameter(torch.ones(4, 3, dtype=torch.float64)), placement))
    return found


def backward(params, factor=1.0):
    for i, parameter in enumerate(params):
        (parameter * (i + 1) * factor).sum().backward()


def launched(buffers):
    return [bucket.names for bucket in buffers.buckets if bucket.launched]


def test_buckets_are_not_shared_between_chunks():
    buffers = GradBuffers(parameters(), single_layout(), bucket_size=1000)
    assert [(bucket.chunk, bucket.names) for bucket in buffers.buckets] == [(1, ["c"]), (0, ["b", "a"])]


def test_a_chunk_is_reduced_when_it_is_told_to_in_the_first_step():
    buffers = GradBuffers(parameters(), single_layout())
    buffers.begin_step(1)
    backward(buffers.parameters)
    assert launched(buffers) == []  # how often each is used is not known yet
    buffers.reduce_chunk(1)
    assert launched(buffers) == [["c"]]
    buffers.reduce_chunk(0)
    assert launched(buffers) == [["c"], ["b", "a"]]
    buffers.finish()


def test_the_order_is_that_of_the_plan():
    buffers = GradBuffers(parameters(), single_layout(), chunk_order=(0, 1))
    buffers.begin_step(1)
    backward(buffers.parameters)
    with pytest.raises(RuntimeError, match="chunk 1 is to be reduced before chunk 0"):
        buffers.reduce_chunk(1)
    buffers.reduce_chunk(0)
    buffers.reduce_chunk(1)
    assert buffers.num_launched == 2


def test_a_gradient_that_comes_after_its_reduction_is_refused():
    buffers = GradBuffers(parameters(), single_layout())
    buffers.begin_step(2)
    backward(buffers.parameters)
    buffers.reduce_chunk(1)
    with pytest.raises(RuntimeError, match="gradient of c changed after its reduction began"):
        backward(buffers.parameters)


def test_without_overlap_everything_waits_for_finish():
    buffers = GradBuffers(parameters(), single_layout(), overlap=False)
    buffers.begin_step(1)
    backward(buffers.parameters)
    buffers.reduce_chunk(1)
    assert launched(buffers) == []
    buffers.finish()
    assert len(launched(buffers)) == 2


def step_chunks(rank, world_size, wait):
    layout = build_layout(build_mesh(world_size), rank)
    connect(layout, device=torch.device("cpu"))
    assert layout.recorder.events == []
    params = parameters()
    optimizer = build_optimizer(
        params,
        layout,
        spec=Registry("optimizer", plugin_manager().collect("mcore_optimizers"))["adam"],
        optimizer=OptimizerConfig(lr=0.1),
        parallel=ParallelConfig(use_distributed_optimizer=True, ddp_bucket_size=8),
        chunk_order=(1, 0),
    )
    for _ in range(3):
        optimizer.begin_step(1)
        for chunk in (0, 1):
            optimizer.complete_weights(chunk)
        backward(params, rank + 1.0)
        for chunk in (1, 0):
            optimizer.reduce_chunk(chunk)
        optimizer.finish_grads()
        optimizer.step(5, wait=wait)
    optimizer.complete_weights()
    return [parameter.detach().clone() for parameter in params]


def test_weights_that_are_gathered_late_are_the_same():
    waited, late = run_ranks(step_chunks, 4, True), run_ranks(step_chunks, 4, False)
    for ours in (*waited, *late):
        assert all(torch.equal(mine, want) for mine, want in zip(ours, waited[0], strict=True))
    assert not torch.equal(waited[0][0], torch.ones(4, 3, dtype=torch.float64))


def test_the_queue_example_of_the_readme(capsys):
    readme = Path(__file__).parents[2] / "packages" / "mcore-parallel" / "README.md"
    (example,) = (
        code
        for code in re.findall(r"```python\n(.*?)```", readme.read_text("utf-8"), re.DOTALL)
        if "WeightGradQueue" in code
    )
    exec(compile(example, str(readme), "exec"), {})
    first, second = capsys.readouterr().out.splitlines()
    assert first == "input gradient (3, 2, 4), weight gradient None, 240 bytes wait"
    assert second == "weight gradient (6, 4), 0 bytes wait"
