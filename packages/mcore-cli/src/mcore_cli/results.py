"""What the trainer tells its callbacks. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunInfo:
    """The run as callbacks see it before the first step. Times are in seconds, sizes in GiB."""

    name: str
    folder: Path
    world_size: int
    layout: str
    num_parameters: int
    train_iters: int
    first_iteration: int
    global_batch_size: int
    seq_length: int
    peak: str
    log_interval: int
    tensorboard_dir: str | None


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. ``loss`` is the mean over valid tokens of the global batch; speeds are of this step."""

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    loss: float
    lr: float
    grad_norm: float
    valid_tokens: int
    seconds: float
    tokens_per_second: float
    tokens_per_second_per_rank: float
    tflops_per_rank: float
    mfu: float
    memory_gib: float

    def as_record(self) -> dict[str, Any]:
        """The line of ``metrics.jsonl``."""
        return {"kind": "step", **asdict(self)}


@dataclass(frozen=True)
class EvalResult:
    """One evaluation: mean loss over the valid tokens of ``eval_iters`` global batches of the validation split."""

    iteration: int
    loss: float
    perplexity: float
    valid_tokens: int
    seconds: float

    def as_record(self) -> dict[str, Any]:
        """The line of ``metrics.jsonl``."""
        return {"kind": "eval", **asdict(self)}


@dataclass(frozen=True)
class SaveResult:
    """One committed checkpoint."""

    iteration: int
    path: Path
    seconds: float

    def as_record(self) -> dict[str, Any]:
        """The line of ``metrics.jsonl``."""
        return {"kind": "save", "iteration": self.iteration, "path": str(self.path), "seconds": self.seconds}
