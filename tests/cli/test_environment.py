"""Who started this process: nobody, torchrun or SLURM."""

from __future__ import annotations

import pytest

from mcore_cli.environment import Environment, detect, first_host, world_size
from mcore_cli.errors import UserError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_JOB_ID": "123456",
}


def test_alone() -> None:
    found = detect({})
    assert (found, found.is_rank) == (Environment(), False)
    assert world_size(found, None) == 1
    assert world_size(found, 8) == 8


def test_torchrun() -> None:
    found = detect(TORCHRUN)
    assert found == Environment("torchrun", 5, 8, 1, 4, "node1", 1234)
    assert world_size(found, 4) == 8
    assert {name: found.variables()[name] for name in TORCHRUN} == TORCHRUN


def test_rank_and_world_alone_are_enough() -> None:
    found = detect({"RANK": "0", "WORLD_SIZE": "2"})
    assert (found.launcher, found.world_size, found.local_world_size) == ("torchrun", 2, 2)


def test_slurm() -> None:
    found = detect(SLURM)
    assert found == Environment("slurm", 9, 16, 1, 8, "gpu07", 20000 + 123456 % 20000)
    assert detect({**SLURM, "MASTER_ADDR": "other", "MASTER_PORT": "77"}).master_address == "other"


def test_all_tasks_derive_the_same_port() -> None:
    ports = {detect({**SLURM, "SLURM_PROCID": str(rank)}).master_port for rank in range(16)}
    assert len(ports) == 1


def test_torchrun_inside_slurm_is_torchrun() -> None:
    assert detect({**SLURM, **TORCHRUN}).launcher == "torchrun"


def test_a_single_task_may_start_local_ranks() -> None:
    assert not detect({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, nproc_per_node=8).is_rank


def test_a_batch_script_outside_a_step_may_start_local_ranks() -> None:
    script = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert not detect({**script, "SLURM_PROCID": "0"}, nproc_per_node=8).is_rank
    assert detect(script).is_rank


@pytest.mark.parametrize("variables", [TORCHRUN, SLURM])
def test_another_number_of_local_ranks_is_refused(variables) -> None:
    local = detect(variables).local_world_size
    assert detect(variables, nproc_per_node=local).is_rank
    with pytest.raises(UserError, match=f"--nproc-per-node 3: .* already started {local} ranks"):
        detect(variables, nproc_per_node=3)


def test_nonsense_is_named() -> None:
    with pytest.raises(UserError, match="environment variable WORLD_SIZE is 'many', which is no number"):
        detect({"RANK": "0", "WORLD_SIZE": "many"})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("login", "login"),
        ("a,b", "a"),
        ("node[03-05,09],login", "node03"),
        ("gpu-[1,4]", "gpu-1"),
        ("rack2-n[11-12].cluster", "rack2-n11.cluster"),
        ("10.0.0.1", "10.0.0.1"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host
