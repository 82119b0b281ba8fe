"""A chain of tanh layers cut into pipeline stages, and its gradients on one process, which executor tests share."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel.axis import Layout, build_layout, single_layout
from mcore_parallel.linear import linear
from mcore_parallel.mesh import build_mesh
from mcore_parallel.pipeline.actions import Flow, Place, looped_flow
from mcore_parallel.pipeline.stage import place_layers
from mcore_parallel.weight_grad import WeightGradQueue

NUM_LAYERS, WIDTH, ROWS = 8, 6, 3


def build_layers() -> list[nn.Linear]:
    generator = torch.Generator().manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(NUM_LAYERS)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) * 0.5)
            layer.bias.copy_(torch.randn(WIDTH, generator=generator, dtype=torch.float64))
    return layers


def batch(micro_batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + micro_batch)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


@dataclass
class LinearStage:
    """Tanh layers of one rank by chunk; the last stage sums squares."""

    flow: Flow
    rank: int
    layers: list[nn.Linear] = field(default_factory=build_layers)
    dtype: torch.dtype = torch.float64
    device: torch.device = torch.device("cpu")
    calls: list[str] = field(default_factory=list)

    def receive_shape(self, micro_batch: int) -> tuple[int, ...]:
        return (ROWS, WIDTH)

    def forward(self, micro_batch: int, chunk: int, received: Tensor | None) -> Tensor:
        self.calls.append(f"F{micro_batch}")
        stage = self.flow.stages[Place(self.rank, chunk)]
        x = batch(micro_batch) if received is None else received
        for index in place_layers(NUM_LAYERS, self.flow)[stage]:
            x = self.apply(index, x)
        return (x**2).sum() if stage == self.flow.num_stages - 1 else x

    def apply(self, index: int, x: Tensor) -> Tensor:
        return torch.tanh(self.layers[index](x))


def reference(num_micro_batches: int) -> tuple[list[Tensor], list[float]]:
    stage = LinearStage(looped_flow(1), 0)
    losses = [stage.forward(i, 0, None) for i in range(num_micro_batches)]
    torch.stack(losses).sum().backward()
    return [grad for layer in stage.layers for grad in grads_of(layer)], [float(loss.detach()) for loss in losses]


def grads_of(layer: nn.Linear) -> tuple[Tensor, Tensor]:
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    return layer.weight.grad, layer.bias.grad


def pp_layout(rank: int, world_size: int) -> Layout:
    return build_layout(build_mesh(world_size, pp=world_size), rank)


def check_gradients(stage: LinearStage, num_micro_batches: int, losses: list[Tensor]) -> None:
    expected, expected_losses = reference(num_micro_batches)
    for chunk in range(stage.flow.num_chunks):
        mine = stage.flow.stages[Place(stage.rank, chunk)]
        for index in place_layers(NUM_LAYERS, stage.flow)[mine]:
            for got, want in zip(grads_of(stage.layers[index]), expected[2 * index : 2 * index + 2], strict=True):
                torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-14)
    if stage.flow.places[-1].rank == stage.rank:
        assert [float(loss) for loss in losses] == pytest.approx(expected_losses, rel=1e-13)
    else:
        assert losses == []


@dataclass
class QueuedStage(LinearStage):
    """The same chain through mcore's linear layer, which puts its weight gradients into ``queue`` when that defers."""

    queue: WeightGradQueue = field(default_factory=WeightGradQueue)

    def __post_init__(self) -> None:
        self.queue.attach(parameter for layer in self.layers for parameter in layer.parameters())
        self.alone = single_layout().axis("tp")

    def apply(self, index: int, x: Tensor) -> Tensor:
        layer = self.layers[index]
        return torch.tanh(linear(x, layer.weight, layer.bias, axis=self.alone))
