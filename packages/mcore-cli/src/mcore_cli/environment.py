"""Which process this is: alone, or one of the ranks that torchrun, SLURM or mcore itself started. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mcore_cli.errors import UserError

PORT_RANGE = (20000, 40000)
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE")
SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")


@dataclass(frozen=True)
class Environment:
    """This process among its peers. ``master_address`` and ``master_port`` are where ranks meet."""

    launcher: Literal["none", "torchrun", "slurm"] = "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_address: str = "127.0.0.1"
    master_port: int = 29500

    @property
    def is_rank(self) -> bool:
        """Whether a launcher started this process as one rank of a run."""
        return self.launcher != "none"

    def variables(self) -> dict[str, str]:
        """The variables by which torch finds its peers."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
        }


def detect(variables: Mapping[str, str], nproc_per_node: int | None = None) -> Environment:
    """Read the environment ``variables`` of a process that was asked for ``nproc_per_node`` local ranks.

    Raises:
        UserError: a variable is no number, or the launcher started another number of local ranks than asked for.
    """
    if all(name in variables for name in TORCHRUN_VARIABLES):
        found = _torchrun(variables)
    elif _is_slurm_step(variables, nproc_per_node):
        found = _slurm(variables)
    else:
        return Environment()
    if not 0 <= found.rank < found.world_size or not 0 <= found.local_rank < found.local_world_size:
        raise UserError(
            f"{found.launcher} says rank {found.rank} of {found.world_size} and local rank {found.local_rank} of "
            f"{found.local_world_size}: ranks count from 0; start the command through torchrun or srun again"
        )
    if nproc_per_node is not None and nproc_per_node != found.local_world_size:
        raise UserError(
            f"--nproc-per-node {nproc_per_node}: {found.launcher} already started {found.local_world_size} ranks "
            f"on this node; leave --nproc-per-node out, or start the command without {found.launcher}"
        )
    return found


def world_size(environment: Environment, nproc_per_node: int | None) -> int:
    """Ranks of the run: those that a launcher started, or the local ones asked for, or one."""
    return environment.world_size if environment.is_rank else nproc_per_node or 1


def _torchrun(variables: Mapping[str, str]) -> Environment:
    world = _number(variables, "WORLD_SIZE")
    return Environment(
        launcher="torchrun",
        rank=_number(variables, "RANK"),
        world_size=world,
        local_rank=_number(variables, "LOCAL_RANK", 0),
        local_world_size=_number(variables, "LOCAL_WORLD_SIZE", world),
        master_address=variables.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(variables, "MASTER_PORT", 29500),
    )


def _is_slurm_step(variables: Mapping[str, str], nproc_per_node: int | None) -> bool:
    if not all(name in variables for name in SLURM_VARIABLES) or variables["SLURM_NTASKS"] == "1":
        return False
    # A batch script carries these variables too, once, outside any step: there, asking for local ranks means them.
    return "SLURM_STEP_ID" in variables or "SLURM_STEPID" in variables or nproc_per_node is None


def _slurm(variables: Mapping[str, str]) -> Environment:
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    low, high = PORT_RANGE
    port = low + _number(variables, "SLURM_JOB_ID", 0) % (high - low)
    world = _number(variables, "SLURM_NTASKS")
    per_node = re.match(r"\d+", variables.get("SLURM_STEP_TASKS_PER_NODE", variables.get("SLURM_TASKS_PER_NODE", "")))
    return Environment(
        launcher="slurm",
        rank=_number(variables, "SLURM_PROCID"),
        world_size=world,
        local_rank=_number(variables, "SLURM_LOCALID"),
        local_world_size=int(per_node[0]) if per_node else world,
        master_address=variables.get("MASTER_ADDR") or first_host(nodes),
        master_port=_number(variables, "MASTER_PORT", port),
    )


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list: ``node[03-05,09],login`` gives ``node03``."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    if match is None:
        return nodes
    prefix, number, suffix = match.groups()
    return f"{prefix}{number or ''}{suffix}"


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UserError(f"environment variable {name} is {text!r}, which is no number; unset it to run alone") from None
