"""The pool of real ranks that the distributed tests run on."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from mcore_parallel.testing import ranks, run_ranks


def _sum(rank, world, offset):
    value = torch.tensor([float(rank + offset)])
    dist.all_reduce(value)
    return value.item()


def _fail_on_one(rank, world):
    if rank == 1:
        raise ValueError("boom")
    dist.all_reduce(torch.zeros(1))


def _die_on_one(rank, world):
    if rank == 1:
        os._exit(7)
    dist.all_reduce(torch.zeros(1))


def _sleep(rank, world):
    time.sleep(60)


def _pid(rank, world):
    return os.getpid()


def test_results_come_by_rank_and_worlds_change_size():
    assert run_ranks(_sum, 2, 1) == [3.0, 3.0]
    assert run_ranks(_sum, 4, 0) == [6.0] * 4
    assert run_ranks(_sum, 2, 0) == [1.0, 1.0]


def test_the_failing_ranks_own_traceback_is_shown():
    with pytest.raises(ranks.RankFailure, match=r"(?s)rank 1 of 2 failed.*_fail_on_one.*ValueError: boom"):
        run_ranks(_fail_on_one, 2, limit=20)
    assert run_ranks(_sum, 2, 0) == [1.0, 1.0]


def test_a_rank_that_dies_is_named():
    with pytest.raises(ranks.RankFailure, match=r"rank 1 of 2 failed:\nthe process died with exit code 7"):
        run_ranks(_die_on_one, 2, limit=20)


def test_nothing_outlives_its_time_limit():
    with pytest.raises(ranks.RankFailure, match="took longer than 0.1 s"):
        run_ranks(_sleep, 2, limit=0.1)


def test_processes_are_kept_between_jobs_unless_fresh():
    first = run_ranks(_pid, 2)
    assert run_ranks(_pid, 2) == first
    assert not set(run_ranks(_pid, 2, fresh=True)) & set(first)
