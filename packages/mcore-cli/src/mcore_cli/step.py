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
    """A stage model with the micro-batches of one step, as the pipeline executor sees it.

    ``step`` None: evaluation, nothing is dropped.
    """

    model: StageModel
    batches: Sequence[Batch]
    seed: int
    step: int | None

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations between stages."""
        return self.model.environment.dtype

    @property
    def device(self) -> torch.device:
        """Of the activations between stages."""
        return torch.device(self.model.environment.device)

    def receive_shape(self, micro_batch: int) -> tuple[int, ...]:
        """``[s, b, h]``, or ``[s/tp, b, h]`` under sequence parallelism."""
        return self.model.activation_shape(*self.batches[micro_batch].tokens.shape)

    def forward(self, micro_batch: int, chunk: int, received: Tensor | None) -> Tensor:
        """The activation ``[s, b, h]`` (``[s/tp, b, h]``) to send on, or the summed loss on the last stage."""
        assert chunk == 0, "one chunk per rank"
        batch = self.batches[micro_batch]
        last = self.model.stage.is_last
        inputs = self._tensor(batch.tokens) if received is None else received
        output: Tensor = self.model(
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
    stage = ModelStage(parts.model, batches, parts.config.train.seed, step if parts.dropout else None)
    parts.optimizer.begin_step(len(batches))
    result = run(parts.train_plan, stage=stage, axis=parts.layout.axis("pp"))
    parts.optimizer.finish_grads()
    return result.losses


def forward_all(parts: Parts, batches: Sequence[Batch]) -> list[Tensor]:
    """Summed losses of evaluation micro-batches, on the last stage only."""
    stage = ModelStage(parts.model, batches, parts.config.train.seed, None)
    parts.model.eval()
    try:
        return run_forward(parts.eval_plan, stage=stage, axis=parts.layout.axis("pp")).losses
    finally:
        parts.model.train()


def sum_over_ranks(
    layout: Layout, losses: Sequence[Tensor], batches: Sequence[Batch], *, device: torch.device, stop: bool = False
) -> Sums:
    """Sum losses and valid tokens over all samples, each counted once, and the wishes to stop over all ranks."""
    counts = layout.axis("tp").is_first and layout.axis("pp").is_last
    loss = sum(float(loss) for loss in losses) if counts else 0.0
    tokens = sum(float(batch.loss_mask.sum(dtype="float64")) for batch in batches) if counts else 0.0
    sums = torch.tensor([loss, tokens, float(stop)], dtype=torch.float64, device=device)
    all_reduce(sums, layout.axis("world"))
    return Sums(*sums.tolist())
