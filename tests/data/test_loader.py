"""Sampler and loader: the ids of a step do not depend on the layout, the thread loses nothing, resume is a position."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_data.gpt_dataset import Sample
from mcore_data.loader import Batch, GlobalBatchLoader
from mcore_data.mock_dataset import MockDataset
from mcore_data.sampler import num_micro_batches, rank_sample_ids
from mcore_data.testing import check_dataset


class Counting:
    """Sample i is i everywhere; notes the threads that read."""

    def __init__(self, samples, delay=0.0):
        self.samples = samples
        self.delay = delay
        self.threads = set()

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        self.threads.add(threading.current_thread().name)
        time.sleep(self.delay)
        if not 0 <= index < self.samples:
            raise IndexError(index)
        row = np.full(3, index, dtype=np.int64)
        return Sample(row, row + 1, np.ones(3, dtype=np.float32), np.arange(3))


@settings(max_examples=100, deadline=None)
@given(
    consumed=st.integers(0, 10_000),
    dp=st.integers(1, 6),
    mbs=st.integers(1, 4),
    micro=st.integers(1, 5),
)
def test_ranks_partition_the_global_batch(consumed, dp, mbs, micro):
    size = dp * mbs * micro
    ids = [
        rank_sample_ids(consumed, global_batch_size=size, micro_batch_size=mbs, dp_rank=rank, dp_size=dp)
        for rank in range(dp)
    ]
    assert all(rank.shape == (micro, mbs) and rank.dtype == np.int64 for rank in ids)
    # Micro-step by micro-step, rank by rank: the run of consecutive ids.
    assert np.stack(ids, axis=1).ravel().tolist() == list(range(consumed, consumed + size))


@pytest.mark.parametrize("dp", [1, 2, 4, 8])
@pytest.mark.parametrize("mbs", [1, 2, 4])
def test_same_samples_per_step_on_every_layout(dp, mbs):
    for step in range(3):
        got = []
        for rank in range(dp):
            loader = GlobalBatchLoader(
                Counting(96), global_batch_size=32, micro_batch_size=mbs, dp_rank=rank, dp_size=dp
            )
            batches = loader.micro_batches(32 * step)
            assert len(batches) == 32 // (mbs * dp) == loader.num_micro_batches
            got += [sample for batch in batches for sample in batch.sample_ids.tolist()]
            for batch in batches:
                assert batch.tokens.shape == batch.labels.shape == (mbs, 3)
                assert batch.tokens[:, 0].tolist() == batch.sample_ids.tolist()
                assert batch.labels[:, 0].tolist() == [sample + 1 for sample in batch.sample_ids]
        assert sorted(got) == list(range(32 * step, 32 * step + 32))


def ids_of(loader, consumed):
    return [batch.sample_ids.tolist() for batch in loader.micro_batches(consumed)]


@pytest.mark.parametrize("prefetch", [True, False])
def test_resume_at_every_step_gives_the_straight_run(prefetch):
    def loader():
        return GlobalBatchLoader(Counting(120), global_batch_size=4, micro_batch_size=2, prefetch=prefetch)

    straight = loader()
    run = [ids_of(straight, 4 * step) for step in range(30)]
    for start in range(1, 30):
        resumed = loader()
        assert [ids_of(resumed, 4 * step) for step in range(start, 30)] == run[start:]


@settings(max_examples=20, deadline=None)
@given(positions=st.lists(st.integers(0, 92), min_size=1, max_size=12))
def test_any_order_of_positions(positions):
    """What the background thread holds is never given for another position."""
    loader = GlobalBatchLoader(Counting(100), global_batch_size=8, micro_batch_size=4)
    for position in positions:
        assert sum(ids_of(loader, position), []) == list(range(position, position + 8))
    loader.close()
    assert sum(ids_of(loader, 0), []) == list(range(8))
    loader.close()


def test_prefetch_reads_in_the_background_and_closes():
    data = Counting(40, delay=0.001)
    loader = GlobalBatchLoader(data, global_batch_size=8, micro_batch_size=8)
    for step in range(5):
        assert sum(ids_of(loader, 8 * step), []) == list(range(8 * step, 8 * step + 8))
    assert any(name.startswith("mcore-data") for name in data.threads)
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mcore-data")]


def test_error_in_the_background_is_raised_where_it_belongs():
    class Broken(Counting):
        def __getitem__(self, index):
            if index >= 8:
                raise OSError("disk gone")
            return super().__getitem__(index)

    loader = GlobalBatchLoader(Broken(40), global_batch_size=8, micro_batch_size=8)
    assert ids_of(loader, 0) == [list(range(8))]
    with pytest.raises(OSError, match="disk gone"):
        loader.micro_batches(8)
    assert ids_of(loader, 0) == [list(range(8))]
    loader.close()


def test_end_of_the_data_is_refused():
    loader = GlobalBatchLoader(Counting(10), global_batch_size=4, micro_batch_size=2)
    assert ids_of(loader, 4) == [[4, 5], [6, 7]]
    with pytest.raises(ValueError, match=r"samples 8\.\.11 were asked for, but the data set has 10"):
        loader.micro_batches(8)


def test_last_partial_batch_of_an_evaluation():
    seen = []
    for rank in range(2):
        loader = GlobalBatchLoader(
            Counting(10), global_batch_size=8, micro_batch_size=2, dp_rank=rank, dp_size=2, pad_last=True
        )
        batches = loader.micro_batches(8)
        assert [batch.tokens.shape for batch in batches] == [(2, 3), (2, 3)]
        seen += [(batch.sample_ids.tolist(), batch.loss_mask.sum()) for batch in batches]
        with pytest.raises(ValueError, match="has 10"):
            loader.micro_batches(16)
    assert seen == [([8, 9], 6.0), ([-1, -1], 0.0), ([-1, -1], 0.0), ([-1, -1], 0.0)]


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ((10, 4, 2), "10 is not a multiple of micro-batch size 4 x data-parallel size 2 = 8; .*: 8 or 16"),
        ((4, 4, 2), "the nearest that is: 8"),
        ((0, 1, 1), "global batch size 0"),
        ((8, 0, 1), "micro-batch size 0"),
    ],
)
def test_sizes_that_do_not_fit(sizes, match):
    with pytest.raises(ValueError, match=match):
        num_micro_batches(*sizes)
    with pytest.raises(ValueError, match=match):
        GlobalBatchLoader(Counting(10), global_batch_size=sizes[0], micro_batch_size=sizes[1], dp_size=sizes[2])


def test_wrong_rank_and_position():
    with pytest.raises(ValueError, match=r"rank 2 is not in 0\.\.1"):
        GlobalBatchLoader(Counting(10), global_batch_size=2, micro_batch_size=1, dp_rank=2, dp_size=2)
    with pytest.raises(ValueError, match="-1 must not be negative"):
        rank_sample_ids(-1, global_batch_size=2, micro_batch_size=1, dp_rank=0, dp_size=1)


def test_loader_pickles_while_prefetching():
    loader = GlobalBatchLoader(MockDataset(64, 8, 100, seed=1), global_batch_size=8, micro_batch_size=4)
    first = loader.micro_batches(0)
    copied = pickle.loads(pickle.dumps(loader))
    for ours, theirs in zip(loader.micro_batches(8), copied.micro_batches(8), strict=True):
        assert isinstance(theirs, Batch)
        assert np.array_equal(ours.tokens, theirs.tokens)
    assert not np.array_equal(first[0].tokens, loader.micro_batches(8)[0].tokens)


def test_mock_samples():
    data = MockDataset(50, 16, 97, seed=3)
    check_dataset(data, seq_length=16, vocab_size=97)
    assert not np.array_equal(data[0].tokens, data[1].tokens)
    assert not np.array_equal(data[0].tokens, MockDataset(50, 16, 97, seed=4)[0].tokens)
    assert not np.array_equal(data[0].tokens, MockDataset(50, 16, 97, seed=3, stream=1)[0].tokens)
    # A longer data set starts with the same samples.
    assert np.array_equal(data[7].tokens, MockDataset(90, 16, 97, seed=3)[7].tokens)
    assert np.array_equal(data[7].tokens[1:], data[7].labels[:-1])


def test_no_torch_is_imported():
    modules = "loader", "datasets", "builtin", "hookspecs", "prepare", "testing", "tokenizers.bpe", "tokenizers.plain"
    code = ";".join(f"import mcore_data.{name}" for name in modules) + ";import sys;assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env=dict(os.environ))
