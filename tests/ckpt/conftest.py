"""Ranks as threads of one process, and a small set of arrays to save."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mcore_ckpt.layout import LocalArray

WAIT_SECONDS = 60


class ThreadRanks:
    """What the threads of one simulated world share."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size)
        self.slots = [None] * size
        self.mail = {}


class ThreadCommunicator:
    """One simulated rank; meets the others at a barrier."""

    def __init__(self, ranks, rank):
        self.ranks, self.rank, self.size = ranks, rank, ranks.size
        self.messages = 0

    def all_gather_object(self, value):
        self.ranks.slots[self.rank] = value
        self.ranks.barrier.wait(WAIT_SECONDS)
        values = list(self.ranks.slots)
        self.ranks.barrier.wait(WAIT_SECONDS)
        return values

    def exchange(self, sends, receives):
        self.messages += len(sends)
        for peer, tensor in sends:
            assert tensor.dtype == torch.uint8
            assert (self.rank, peer) not in self.ranks.mail
            self.ranks.mail[self.rank, peer] = tensor.clone()
        self.ranks.barrier.wait(WAIT_SECONDS)
        for peer, tensor in receives:
            tensor.copy_(self.ranks.mail.pop((peer, self.rank)))
        self.ranks.barrier.wait(WAIT_SECONDS)
        assert not [pair for pair in self.ranks.mail if pair[1] == self.rank], "a message nobody asked for"


def _run_threads(fn, size, *args):
    ranks = ThreadRanks(size)

    def work(rank):
        try:
            return fn(ThreadCommunicator(ranks, rank), *args)
        except threading.BrokenBarrierError:
            raise
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


@pytest.fixture
def run_threads():
    """``run_threads(fn, size, *args)``: results (or exceptions) of ``fn(communicator, *args)`` by rank."""
    return _run_threads


def _whole_arrays(tensors, prefix="model"):
    return [
        LocalArray(f"{prefix}/{name}", tuple(t.shape), (0,) * t.dim(), tuple(t.shape), t, tuple(range(t.dim()))[:1])
        for name, t in tensors.items()
    ]


@pytest.fixture
def whole_arrays():
    """``whole_arrays(tensors)``: each tensor as one array that this rank holds whole."""
    return _whole_arrays


@pytest.fixture
def tensors():
    """A few tensors of different dtypes and shapes."""
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(48, 7, generator=generator),
        "vector": torch.randn(33, generator=generator, dtype=torch.float64),
        "half": torch.randn(16, 5, generator=generator).bfloat16(),
        "scalar": torch.tensor(2.5),
        "counts": torch.arange(5),
    }
