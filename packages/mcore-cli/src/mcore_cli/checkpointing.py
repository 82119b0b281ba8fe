"""Between the training objects and mcore-ckpt: which arrays and which JSON a checkpoint of a run holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

from mcore_ckpt.comm import Communicator, DistributedCommunicator, SingleCommunicator
from mcore_ckpt.layout import LocalArray, flat_range_arrays, parameter_arrays
from mcore_ckpt.load import load_checkpoint
from mcore_ckpt.manifest import CheckpointInfo
from mcore_ckpt.save import save_checkpoint
from mcore_ckpt.stores import checkpoint_root, store_registry
from mcore_cli.build import Parts
from mcore_models.build import distinct_parameters
from mcore_models.stage_model import StageModel
from mcore_parallel.optim.lr_schedule import ScheduleState
from mcore_parallel.optim.optimizer import ShardedOptimizer
from mcore_parallel.placement import placement_of
from mcore_parallel.plugins import PluginManager

Choice = TypeVar("Choice")


@dataclass(frozen=True)
class Position:
    """How far a run is: finished iterations, and what they consumed (masked tokens included)."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0


@dataclass(frozen=True)
class Resumed:
    """What a checkpoint says of the run that wrote it."""

    position: Position
    schedule: ScheduleState
    seed: int
    data: Mapping[str, Any]


def run_communicator() -> Communicator:
    """All ranks of the run."""
    return DistributedCommunicator() if dist.is_initialized() else SingleCommunicator()


def model_arrays(chunks: Sequence[StageModel]) -> list[LocalArray]:
    """The boxes of logical weights that this rank holds."""
    return [
        array
        for parameter in distinct_parameters(chunks)
        for array in parameter_arrays("model", parameter, placement_of(parameter))
    ]


def optimizer_arrays(optimizer: ShardedOptimizer) -> list[LocalArray]:
    """The boxes of logical optimizer state (moments, and master weights of 16-bit models) that this rank holds."""
    return [
        array
        for shard in optimizer.state_arrays()
        for slot, flat in shard.tensors.items()
        for array in flat_range_arrays(
            f"optimizer/{slot}", flat, shard.placement, local_shape=shard.local_shape, begin=shard.begin
        )
    ]


def save_run(
    parts: Parts, root: str | Path, *, position: Position, schedule: ScheduleState, data: Mapping[str, Any]
) -> Path:
    """Save weights, optimizer, schedule, seed and data position; collective. Returns the checkpoint's folder."""
    parts.optimizer.complete_weights()
    with_optimizer = not parts.config.checkpoint.no_save_optim
    arrays = model_arrays(parts.chunks) + (optimizer_arrays(parts.optimizer) if with_optimizer else [])
    state = {
        "position": asdict(position),
        "schedule": schedule.to_dict(),
        "seed": parts.config.train.seed,
        "optimizer": {"saved": with_optimizer, "step": parts.optimizer.step_count},
        "data": dict(data),
        "config": parts.config.model_dump(mode="json"),
        "mesh": parts.layout.mesh.sizes,
    }
    return save_checkpoint(root, position.iteration, arrays, state=state, communicator=run_communicator())


def load_run(parts: Parts, info: CheckpointInfo) -> Resumed:
    """Load a checkpoint into the parts, under whatever layout they have; collective.

    ``--finetune`` and ``--no-load-optim`` leave the optimizer as it is.

    Raises:
        ValueError: the checkpoint has no optimizer state but one is asked for, or its arrays are not this model's.
    """
    parts.optimizer.complete_weights()
    wanted = parts.config.checkpoint
    with_optimizer = not (wanted.finetune or wanted.no_load_optim)
    saved = info.state["optimizer"]
    if with_optimizer and not saved["saved"]:
        raise ValueError(f"{info.path} holds no optimizer state; give --no-load-optim (or --finetune) to start it anew")
    arrays = model_arrays(parts.chunks) + (optimizer_arrays(parts.optimizer) if with_optimizer else [])
    load_checkpoint(
        info.path,
        arrays,
        communicator=run_communicator(),
        allow_unexpected=() if with_optimizer else ("optimizer/*",),
        cast=not with_optimizer,
    )
    if with_optimizer:
        parts.optimizer.step_count = saved["step"]
        parts.optimizer.refresh_weights()
    else:
        parts.optimizer.refresh_masters()
    return resumed_state(info)


def resumed_state(info: CheckpointInfo) -> Resumed:
    """The JSON side of a checkpoint."""
    state = info.state
    return Resumed(
        Position(**{field.name: state["position"][field.name] for field in fields(Position)}),
        ScheduleState.from_dict(state["schedule"]),
        state["seed"],
        state["data"],
    )


def load_weights(chunks: Sequence[StageModel], info: CheckpointInfo) -> None:
    """Load weights alone, into the dtype that the model has; collective."""
    load_checkpoint(
        info.path,
        model_arrays(chunks),
        communicator=run_communicator(),
        allow_unexpected=("optimizer/*",),
        cast=True,
    )


def checkpoint_folder(url: str, manager: PluginManager) -> Path:
    """The folder that a ``--save`` or ``--load`` value names, through the store of its scheme."""
    return checkpoint_root(url, store_registry(manager))


def chosen_by_first(choose: Callable[[], Choice]) -> Choice:
    """What ``choose`` returns on the first rank, on every rank: folders may not look the same from all of them yet.

    Raises:
        ValueError: whatever ``choose`` raised there, as its text.
    """
    communicator = run_communicator()
    value: Choice | None = None
    problem: str | None = None
    if communicator.rank == 0:
        try:
            value = choose()
        except ValueError as error:
            problem = str(error)
    value, problem = communicator.all_gather_object((value, problem))[0]
    if problem is not None:
        raise ValueError(problem)
    return cast(Choice, value)
