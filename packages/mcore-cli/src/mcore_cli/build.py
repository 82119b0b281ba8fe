"""The composition root: from the tree of configuration to model stages, their optimizer, their plan and their data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from mcore_cli.config import RunConfig
from mcore_cli.pipeline import PipelineShape, pipeline_shape, schedules_of, stage_layers_of
from mcore_data.loader import GlobalBatchLoader
from mcore_data.sampler import num_micro_batches
from mcore_data.specs import Tokenizer
from mcore_data.tokenizers.build import build_tokenizer
from mcore_models.build import build_stage_models, distinct_parameters, initialise_model
from mcore_models.specs import Recompute, StageSpec
from mcore_models.stage_model import StageModel
from mcore_parallel.axis import Layout
from mcore_parallel.optim.optimizer import ShardedOptimizer, build_optimizer
from mcore_parallel.pipeline.actions import Kind, Place, RankPlan
from mcore_parallel.pipeline.collective_actions import rank_with_collectives
from mcore_parallel.pipeline.compile import compile_forward, compile_schedule
from mcore_parallel.pipeline.p2p import connect
from mcore_parallel.plugins import PluginManager, Registry
from mcore_parallel.specs import OptimizerSpec
from mcore_parallel.weight_grad import WeightGradQueue


@dataclass(frozen=True)
class Parts:
    """What one rank trains with, plans proven. ``chunks``: its stages of the model, by chunk. ``weight_grads``: where
    they put weight gradients off. ``eval_plan`` runs a global batch forward only."""

    config: RunConfig
    layout: Layout
    device: torch.device
    chunks: tuple[StageModel, ...]
    optimizer: ShardedOptimizer
    weight_grads: WeightGradQueue
    train_plan: RankPlan
    eval_plan: RankPlan

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those of all chunks in build order, a shared one once."""
        return distinct_parameters(self.chunks)

    @property
    def dropout(self) -> bool:
        """Whether anything is dropped in training."""
        return self.config.model.hidden_dropout > 0 or self.config.model.attention_dropout > 0


def with_vocabulary(config: RunConfig, tokenizer: Tokenizer) -> RunConfig:
    """``config`` with the vocabulary size filled in from the tokenizer, if it was not given."""
    if config.model.vocab_size is not None:
        return config
    model = config.model.model_copy(update={"vocab_size": tokenizer.vocab_size})
    return config.model_copy(update={"model": model})


def global_batch_size(config: RunConfig, data_parallel_size: int) -> int:
    """Samples per step: as given, or one micro-batch per data-parallel rank."""
    train = config.train
    return train.global_batch_size or train.micro_batch_size * data_parallel_size


def train_iterations(config: RunConfig, data_parallel_size: int) -> int:
    """Steps of the whole run.

    Raises:
        ValueError: neither iterations nor samples are given, or the samples are fewer than one global batch.
    """
    train, batch = config.train, global_batch_size(config, data_parallel_size)
    if train.train_iters is not None:
        return train.train_iters
    if train.train_samples is None or train.train_samples < batch:
        raise ValueError(f"--train-samples {train.train_samples} is less than one global batch of {batch}")
    return train.train_samples // batch


def stages_of(config: RunConfig, shape: PipelineShape, rank: int) -> list[StageSpec]:
    """The stages of pipeline rank ``rank``, one per chunk.

    Raises:
        PlacementError: the layers cannot be placed as the flags say.
    """
    layers, flow = stage_layers_of(config, shape), shape.flow
    numbers = [flow.stages[Place(rank, chunk)] for chunk in range(flow.num_chunks)]
    last = flow.num_stages - 1
    return [StageSpec(layers[n].start, len(layers[n]), n == 0, n == last) for n in numbers]


def build_chunks(
    config: RunConfig, layout: Layout, *, manager: PluginManager, device: torch.device, dtype: torch.dtype | None = None
) -> tuple[StageModel, ...]:
    """This rank's stages of the model, initialised from the seed; ``dtype`` default bf16 or fp32 as the configuration
    says."""
    parallel, default = config.parallel, torch.bfloat16 if config.model.bf16 else torch.float32
    kernels = Registry("transformer implementation", manager.collect("mcore_kernels"))[config.model.transformer_impl]
    recompute = None
    if parallel.recompute_granularity is not None:
        assert parallel.recompute_method is not None, "a rule: recomputation needs its method"
        assert parallel.recompute_num_layers is not None, "and its number of layers"
        recompute = Recompute(parallel.recompute_method, parallel.recompute_num_layers)
    models = build_stage_models(
        config.model,
        layout=layout,
        stages=stages_of(config, pipeline_shape(config, schedules_of(manager)), layout.axis("pp").rank),
        kernels=kernels.build(),
        sequence_parallel=parallel.sequence_parallel,
        recompute=recompute,
        dtype=dtype or default,
        device=device,
    )
    for model in models:
        initialise_model(model, seed=config.train.seed)
    return tuple(models)


def build_parts(
    config: RunConfig, layout: Layout, *, manager: PluginManager, device: torch.device, dtype: torch.dtype | None = None
) -> Parts:
    """Everything that a training step of this rank needs but its data; collective (communicators are made here)."""
    connect(layout, device=device)
    train_plan, eval_plan = build_plans(config, layout, manager=manager)
    chunks = build_chunks(config, layout, manager=manager, device=device, dtype=dtype)
    weight_grads = WeightGradQueue()
    weight_grads.attach(distinct_parameters(chunks))
    optimizer = build_optimizer(
        distinct_parameters(chunks),
        layout,
        spec=optimizer_spec(config, manager),
        optimizer=config.optimizer,
        parallel=config.parallel,
        chunk_order=[action.chunk for action in train_plan.actions if action.kind is Kind.REDUCE],
    )
    return Parts(config, layout, device, chunks, optimizer, weight_grads, train_plan, eval_plan)


def optimizer_spec(config: RunConfig, manager: PluginManager) -> OptimizerSpec:
    """The chosen optimizer, with its own section of the configuration bound to it if it has one."""
    spec = Registry("optimizer", manager.collect("mcore_optimizers"))[config.optimizer.optimizer]
    if spec.config is None:
        return spec
    return replace(spec, build=partial(spec.build, settings=getattr(config, spec.name)))


def build_plans(config: RunConfig, layout: Layout, *, manager: PluginManager) -> tuple[RankPlan, RankPlan]:
    """This rank's proven plans of a training step and of an evaluation batch.

    Raises:
        ValueError: the schedule does not take these sizes; the nearest that it does are named.
    """
    pp, dp = layout.axis("pp"), layout.axis("dp").size
    shape = pipeline_shape(config, schedules_of(manager))
    count = num_micro_batches(global_batch_size(config, dp), config.train.micro_batch_size, dp)
    sizes = {"num_ranks": pp.size, "num_micro_batches": count, "num_chunks": shape.num_chunks}
    train = rank_with_collectives(compile_schedule(shape.spec, **sizes), pp.rank)
    return train, compile_forward(shape.spec, **sizes).for_rank(pp.rank)


@dataclass(frozen=True)
class Data:
    """Loaders of this data-parallel rank; ``valid`` is None when there is no evaluation."""

    tokenizer: Tokenizer
    train: GlobalBatchLoader
    valid: GlobalBatchLoader | None

    def close(self) -> None:
        """End the loaders' background threads."""
        for loader in (self.train, self.valid):
            if loader is not None:
                loader.close()


def build_data(config: RunConfig, tokenizer: Tokenizer, layout: Layout, *, manager: PluginManager) -> Data:
    """The train and validation loaders of this rank.

    Raises:
        ValueError: the data is missing or broken, or a split that is needed is empty.
    """
    dp = layout.axis("dp").size
    num_train = train_iterations(config, dp) * global_batch_size(config, dp)
    num_valid = num_validation_samples(config, dp) if config.train.eval_interval is not None else 0
    train, valid = _loaders(config, tokenizer, layout, num_samples=(num_train, num_valid), manager=manager)
    assert train is not None, "training asks for samples"
    return Data(tokenizer, train, valid)


def build_validation(
    config: RunConfig, tokenizer: Tokenizer, layout: Layout, *, manager: PluginManager
) -> GlobalBatchLoader:
    """The validation loader alone: of data that may have no other split.

    Raises:
        ValueError: as for :func:`build_data`.
    """
    num_valid = num_validation_samples(config, layout.axis("dp").size)
    _, valid = _loaders(config, tokenizer, layout, num_samples=(0, num_valid), manager=manager)
    assert valid is not None, "evaluation asks for samples"
    return valid


def num_validation_samples(config: RunConfig, data_parallel_size: int) -> int:
    """Samples of one evaluation."""
    return config.train.eval_iters * global_batch_size(config, data_parallel_size)


def _loaders(
    config: RunConfig, tokenizer: Tokenizer, layout: Layout, *, num_samples: tuple[int, int], manager: PluginManager
) -> tuple[GlobalBatchLoader | None, ...]:
    """Loaders of the train and validation splits, None where no sample is asked for."""
    spec = Registry("dataset", manager.collect("mcore_datasets"))[config.data.dataset]
    datasets = spec.build(config.data, tokenizer=tokenizer, num_samples=(*num_samples, 0), seed=config.train.seed)
    dp = layout.axis("dp")
    loaders = []
    for split, count, dataset in zip(("train", "validation"), num_samples, datasets, strict=False):
        if count and dataset is None:
            raise ValueError(f"the {split} split is empty; change --split {config.data.split!r} or add data")
        loader = None
        if count:
            loader = GlobalBatchLoader(
                dataset,
                global_batch_size=global_batch_size(config, dp.size),
                micro_batch_size=config.train.micro_batch_size,
                dp_rank=dp.rank,
                dp_size=dp.size,
            )
        loaders.append(loader)
    return tuple(loaders)


def build_run_tokenizer(config: RunConfig, manager: PluginManager) -> Tokenizer:
    """The tokenizer of the run."""
    return build_tokenizer(config.data, manager)
