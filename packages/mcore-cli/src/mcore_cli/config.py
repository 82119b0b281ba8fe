"""The training run: its own section, and the tree of all sections. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mcore_ckpt.config import CheckpointConfig
from mcore_data.config import DataConfig
from mcore_models.config import ModelConfig
from mcore_parallel.config import OptimizerConfig, ParallelConfig, Section


class TrainConfig(Section):
    """Batch sizes, length, evaluation, logging and exits of a run."""

    name: str = Field(
        "run", pattern=r"^[^./\\][^/\\]*$", description="Name of the run; default save folder is runs/NAME."
    )
    micro_batch_size: int = Field(1, ge=1, description="Samples per forward and backward on one data-parallel rank.")
    global_batch_size: int | None = Field(
        None, ge=1, description="Samples per step; default micro-batch-size x data-parallel size."
    )
    train_iters: int | None = Field(None, ge=1, description="Steps over all runs.")
    train_samples: int | None = Field(None, ge=1, description="Samples over all runs, instead of train-iters.")
    seed: int = Field(1234, ge=0, description="Seed of initial weights, dropout and sample order.")
    eval_interval: int | None = Field(None, ge=1, description="Steps between evaluations; default none.")
    eval_iters: int = Field(10, ge=1, description="Global batches per evaluation.")
    log_interval: int = Field(1, ge=1, description="Steps between log lines.")
    tensorboard_dir: str | None = Field(None, description="Folder for TensorBoard events; default none.")
    peak_tflops: float | None = Field(
        None, gt=0, description="Peak TFLOP/s per rank for MFU; default the GPU table, or measured once on CPU."
    )
    exit_interval: int | None = Field(None, ge=1, description="Save and leave at iterations divisible by this.")
    exit_duration_in_mins: float | None = Field(None, gt=0, description="Save and leave after this many minutes.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where to compute; auto: CUDA if there.")
    nproc_per_node: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Start this many local ranks; default one, or those that torchrun or SLURM started.",
    )


class RunConfig(Section):
    """The whole tree: one section per owner; a field name occurs in one section only."""

    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
