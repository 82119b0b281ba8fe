"""One training step of one rank: micro-batches through the pipeline, sums over all ranks, one division, one update.

The trainer, the parity oracle and the benchmarks all run this same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_cli.build import Parts
from mcore_data.loader import Batch
from mcore_models.dropout import DropoutState
from mcore_models.stage_model import StageModel
from mcore_parallel.axis import Layout
from mcore_parallel.collectives import all_reduce
from mcore_parallel.pipeline.executor import run, run_forward


@dataclass(frozen=True)
class ModelStage:
    """A rank's stage models by chunk, with the micro-batches of one step, as the pipeline executor sees them.

    ``step`` None: evaluation, nothing is dropped.
    """

    chunks: Sequence[StageModel]
    batches: Sequence[Batch]
    seed: int
    step: int | None

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations between stages."""
        return self.chunks[0].environment.dtype

    @property
    def device(self) -> torch.device:
        """Of the activations between stages."""
        return torch.device(self.chunks[0].environment.device)

    def receive_shape(self, micro_batch: int) -> tuple[int, ...]:
        """``[s, b, h]``, or ``[s/tp, b, h]`` under sequence parallelism."""
        return self.chunks[0].activation_shape(*self.batches[micro_batch].tokens.shape)

    def forward(self, micro_batch: int, chunk: int, received: Tensor | None) -> Tensor:
        """The activation ``[s, b, h]`` (``[s/tp, b, h]``) to send on, or the summed loss on the last stage."""
        model, batch = self.chunks[chunk], self.batches[micro_batch]
        last = model.stage.is_last
        inputs = self._tensor(batch.tokens) if received is None else received
        output: Tensor = model(
            inputs,
            position_ids=self._tensor(batch.position_ids),
            dropout=self._dropout(batch),
            labels=self._tensor(batch.labels) if last else None,
            loss_mask=self._tensor(batch.loss_mask) if last else None,
        )
        return output

    def _dropout(self, batch: Batch) -> DropoutState | None:
        if self.step is None:
            return None
        return DropoutState(self.seed, self.step, self._tensor(batch.sample_ids))

    def _tensor(self, array: object) -> Tensor:
        return torch.as_tensor(array, device=self.device)


@dataclass(frozen=True)
class Sums:
    """Sums over all ranks: token losses, valid tokens, and how many ranks ask to stop."""

    loss: float
    tokens: float
    stops: float

    @property
    def mean_loss(self) -> float:
        """Mean loss over the valid tokens; 0 when there is none."""
        return self.loss / self.tokens if self.tokens else 0.0


def backward_all(parts: Parts, batches: Sequence[Batch], *, step: int) -> list[Tensor]:
    """Forward and backward of every micro-batch; gradients are completed over all ranks as sums over tokens.

    ``step`` numbers the optimizer step (it keys dropout). Returns the summed losses, on the last stage only.
    """
    stage = ModelStage(parts.chunks, batches, parts.config.train.seed, step if parts.dropout else None)
    optimizer = parts.optimizer
    optimizer.begin_step(len(batches))
    result = run(
        parts.train_plan,
        stage=stage,
        axis=parts.layout.axis("pp"),
        weight_grads=parts.weight_grads,
        reduce=optimizer.reduce_chunk,
        gather=optimizer.complete_weights,
    )
    optimizer.finish_grads()
    return result.losses


def forward_all(parts: Parts, batches: Sequence[Batch]) -> list[Tensor]:
    """Summed losses of evaluation micro-batches, on the last stage only."""
    parts.optimizer.complete_weights()
    stage = ModelStage(parts.chunks, batches, parts.config.train.seed, None)
    for model in parts.chunks:
        model.eval()
    try:
        return run_forward(parts.eval_plan, stage=stage, axis=parts.layout.axis("pp")).losses
    finally:
        for model in parts.chunks:
            model.train()


def sum_over_ranks(
    layout: Layout, losses: Sequence[Tensor], batches: Sequence[Batch], *, device: torch.device, stop: bool = False
) -> Sums:
    """Sum losses and valid tokens over all samples, each counted once, and the wishes to stop over all ranks."""
    has_loss = layout.axis("tp").is_first and len(losses) > 0
    counts = layout.axis("tp").is_first and layout.axis("pp").is_first
    loss = sum(float(loss) for loss in losses) if has_loss else 0.0
    tokens = sum(float(batch.loss_mask.sum(dtype="float64")) for batch in batches) if counts else 0.0
    sums = torch.tensor([loss, tokens, float(stop)], dtype=torch.float64, device=device)
    all_reduce(sums, layout.axis("world"))
    return Sums(*sums.tolist())
