"""Joining the world of ranks: device, backend and process group of this process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from mcore_cli.config import RunConfig
from mcore_cli.pipeline import pipeline_shape, schedules_of
from mcore_parallel.axis import Layout, build_layout
from mcore_parallel.mesh import DEFAULT_ORDER, TP_PP_DP_ORDER, build_mesh
from mcore_parallel.plugins import PluginManager


@dataclass(frozen=True)
class World:
    """This process among all ranks of the run."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    timeout: timedelta

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the one that prints and writes metrics."""
        return self.rank == 0


@contextmanager
def join_world(config: RunConfig, environment: Mapping[str, str] | None = None) -> Iterator[World]:
    """Join the ranks that the environment names (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``), and leave them at the end.

    CUDA ranks use NCCL for tensors on the device and gloo for the few on the host; CPU ranks use gloo.
    """
    environment = os.environ if environment is None else environment
    rank, size = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
    local_rank = int(environment.get("LOCAL_RANK", 0))
    device = pick_device(config.train.device, local_rank)
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size > 1:
        backend = _backend(config.parallel.distributed_backend, device)
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout)
    try:
        yield World(rank, size, local_rank, device, timeout)
    finally:
        if size > 1:
            dist.destroy_process_group()


def pick_device(choice: str, local_rank: int) -> torch.device:
    """The device of a local rank: ``auto`` is CUDA if there is one, else the CPU.

    Raises:
        ValueError: ``cuda`` was asked for and is not there, or there are fewer GPUs than local ranks.
    """
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device; use --device cpu or auto")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} has no GPU: torch sees {torch.cuda.device_count()}; lower --nproc-per-node"
        )
    return torch.device("cuda", local_rank)


def _backend(choice: str, device: torch.device) -> str:
    if device.type == "cpu":
        if choice == "nccl":
            raise ValueError("--distributed-backend nccl: there is no CUDA device here; use gloo or auto")
        return "gloo"
    return "cpu:gloo,cuda:nccl" if choice == "auto" else f"cpu:gloo,cuda:{choice}"


def build_run_layout(config: RunConfig, world: World, *, manager: PluginManager) -> Layout:
    """The mesh of the run and this rank's axes on it; the schedule says where the first and last stage live."""
    parallel = config.parallel
    mesh = build_mesh(
        world.size,
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        cp=parallel.context_parallel_size,
        order=TP_PP_DP_ORDER if parallel.use_tp_pp_dp_mapping else DEFAULT_ORDER,
    )
    places = pipeline_shape(config, schedules_of(manager)).flow.places
    return build_layout(
        mesh,
        world.rank,
        kv_heads=config.model.num_kv_heads,
        ends=(places[0].rank, places[-1].rank),
        timeout=world.timeout,
    )
