"""Properties of the sample order: nothing lost, epochs whole, 64 bit, and samples as a plain reading gives them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_data.gpt_dataset import GPTDataset, SampleRules
from mcore_data.index_cache import cached_order, publish
from mcore_data.indexed_dataset import IndexedDataset
from mcore_data.indexed_writer import IndexedDatasetWriter
from mcore_data.sample_order import (
    SampleOrder,
    build_order,
    document_index,
    plan_epochs,
    sample_boundaries,
    sample_count,
)
from mcore_data.splits import parse_split, split_range, split_shares

lengths_strategy = st.lists(st.integers(0, 12), min_size=1, max_size=20).filter(lambda lengths: sum(lengths) > 0)


@settings(max_examples=60, deadline=None)
@given(lengths=lengths_strategy, seq=st.integers(1, 9), num=st.integers(0, 60), extra=st.integers(0, 1))
def test_order_covers_the_stream_once(lengths, seq, num, extra):
    sizes = np.array(lengths, dtype=np.int32)
    order = build_order(sizes, (0, len(sizes)), seq_length=seq, num_samples=num, seed=3, extra=extra)
    assert len(order) >= num
    counts = np.bincount(order.documents, minlength=len(sizes))
    assert (counts == order.num_epochs).all(), "a document is missing from an epoch"
    assert sorted(order.shuffle.tolist()) == list(range(len(order))), "a sample is lost or doubled"
    # Boundaries, read as positions of one long stream, are seq apart.
    before = np.concatenate([[0], np.cumsum(sizes[order.documents], dtype=np.int64)])
    starts = before[order.boundaries[:, 0]] + order.boundaries[:, 1]
    assert starts.tolist() == [seq * index for index in range(len(order) + 1)]
    # One epoch less would not have been enough.
    total = int(sizes.sum())
    assert order.num_epochs == 1 or (order.num_epochs - 1) * total < num * seq + extra


@settings(max_examples=60, deadline=None)
@given(lengths=lengths_strategy, seq=st.integers(1, 9), num=st.integers(1, 60))
def test_a_separate_last_epoch_stays_behind(lengths, seq, num):
    sizes = np.array(lengths, dtype=np.int32)
    plan = plan_epochs(int(sizes.sum()), seq_length=seq, num_samples=num, extra=1)
    if not plan.separate_last:
        return
    order = build_order(sizes, (0, len(sizes)), seq_length=seq, num_samples=num, seed=3)
    assert sorted(order.documents[-len(sizes) :].tolist()) == list(range(len(sizes)))
    assert sorted(order.shuffle[: plan.first].tolist()) == list(range(plan.first))


@settings(max_examples=25, deadline=None)
@given(
    documents=st.lists(st.integers(0, 12), min_size=1, max_size=15).filter(lambda lengths: sum(lengths) > 1),
    seq=st.integers(1, 9),
    num=st.integers(1, 40),
)
def test_samples_equal_a_plain_reading(tmp_path_factory, documents, seq, num):
    prefix = tmp_path_factory.mktemp("plain") / "d"
    stream = np.arange(1000, 1000 + sum(documents))
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_document(stream, documents)
    indexed = IndexedDataset(prefix)
    data = GPTDataset(indexed, (0, len(indexed)), SampleRules(seq_length=seq, seed=5), num_samples=num)
    text = np.concatenate([indexed[document] for document in data.order.documents])
    for index in range(len(data)):
        start = int(data.order.shuffle[index]) * seq
        sample = data[index]
        assert sample.tokens.tolist() == text[start : start + seq].tolist()
        assert sample.labels.tolist() == text[start + 1 : start + seq + 1].tolist()
        assert sample.loss_mask.tolist() == [1.0] * seq


@pytest.mark.parametrize(
    ("tokens", "seq", "num", "epochs", "samples"),
    [(48, 8, 10, 2, 11), (48, 8, 5, 1, 5), (10, 8, 3, 3, 3), (3, 8, 2, 6, 2)],
)
def test_tiny_data_many_epochs(tokens, seq, num, epochs, samples):
    order = build_order(np.array([tokens], dtype=np.int32), (0, 1), seq_length=seq, num_samples=num, seed=1)
    assert (order.num_epochs, len(order)) == (epochs, samples)


@pytest.mark.parametrize(("num", "separate"), [(100, False), (101, True), (179, True), (180, False), (200, False)])
def test_last_epoch_is_apart_below_80_percent(num, separate):
    """1001 tokens at length 10 are 100 samples per epoch; the second epoch is used for num - 100 of them."""
    plan = plan_epochs(1001, seq_length=10, num_samples=num, extra=1)
    assert (plan.num_epochs, plan.separate_last) == (1 if num == 100 else 2, separate)


def test_more_than_two_billion_tokens():
    count, length, seq = 2_200_000, 1000, 100_000
    sizes = np.full(count, length, dtype=np.int32)
    boundaries = sample_boundaries(sizes, np.arange(count, dtype=np.int32), seq_length=seq)
    samples = (count * length - 1) // seq
    assert len(boundaries) == samples + 1 == 22_000
    # The document that holds the token after the start is the first whose end reaches it.
    assert boundaries[-1].tolist() == [samples * seq // length, 0]
    assert boundaries[1].tolist() == [100, 0]
    assert boundaries[:, 0].min() >= 0
    sizes[:] = 999
    last = sample_boundaries(sizes, np.arange(count, dtype=np.int32), seq_length=seq)[-1]
    start = (count * 999 - 1) // seq * seq
    assert last.tolist() == [start // 999, start % 999]


def test_document_index_is_wide_when_documents_need_it():
    random = np.random.RandomState(1)
    index = document_index((2**31 - 3, 2**31 + 2), 2, False, random)
    assert index.dtype == np.int64
    assert sorted(set(index.tolist())) == list(range(2**31 - 3, 2**31 + 2))
    assert document_index((2**31 - 3, 2**31 - 1), 1, False, random).dtype == np.int32


def test_boundaries_are_wide_when_a_sequence_needs_it():
    sizes = np.array([2**31 + 10], dtype=np.int64)
    boundaries = sample_boundaries(sizes, np.zeros(1, dtype=np.int32), seq_length=2**30)
    assert boundaries.dtype == np.int64
    assert boundaries.tolist() == [[0, 0], [0, 2**30], [0, 2**31]]


def test_kept_partial_sample_is_counted_in_float32_as_megatron_does():
    assert sample_count(33_554_434, 1024, keep_partial=True) == 32_768  # exact arithmetic gives 32,769
    assert sample_count(2050, 1024, keep_partial=True) == 3
    assert sample_count(2050, 1024, keep_partial=False) == 2


def test_no_tokens():
    with pytest.raises(ValueError, match="no tokens"):
        build_order(np.zeros(3, dtype=np.int32), (0, 3), seq_length=4, num_samples=1, seed=1)


def test_eod_mask_loss_masks_inputs(tmp_path):
    with IndexedDatasetWriter(tmp_path / "d", np.uint16) as writer:
        writer.add_document([5, 6, 0, 7, 8, 0, 9], [7])
    rules = SampleRules(seq_length=6, seed=1, eod=0, eod_mask_loss=True)
    sample = GPTDataset(IndexedDataset(tmp_path / "d"), (0, 1), rules, num_samples=1)[0]
    assert sample.tokens.tolist() == [5, 6, 0, 7, 8, 0]
    assert sample.loss_mask.tolist() == [1, 1, 0, 1, 1, 0]
    with pytest.raises(ValueError, match="--eod-mask-loss needs"):
        SampleRules(seq_length=6, seed=1, eod_mask_loss=True)


def test_cached_order_follows_the_file(tmp_path):
    """Data prepared again under the same name must not meet the old order."""

    def write(sizes):
        with IndexedDatasetWriter(tmp_path / "d", np.uint16) as writer:
            for document, size in enumerate(sizes):
                writer.add_document([document] * size, [size])

    def boundaries():
        indexed = IndexedDataset(tmp_path / "d")
        rules = SampleRules(seq_length=2, seed=1)
        fields = {"num_samples": None}
        cached = GPTDataset(indexed, (0, len(indexed)), rules, **fields, cache_folder=tmp_path / "cache")
        assert np.array_equal(
            cached.order.boundaries, GPTDataset(indexed, (0, len(indexed)), rules, **fields).order.boundaries
        )
        return len(cached)

    write([3] * 10)
    assert [boundaries(), boundaries()] == [14, 14]
    assert len(list((tmp_path / "cache").iterdir())) == 1
    # As many documents with other lengths: more tokens, then as many tokens (only the time of change tells).
    write([4] * 10)
    assert boundaries() == 19
    write([1, 7] * 5)
    assert boundaries() == 19
    assert len(list((tmp_path / "cache").iterdir())) == 3
    assert all(path.name.startswith("order-") for path in (tmp_path / "cache").iterdir())


def test_cache_that_cannot_be_written(tmp_path):
    with IndexedDatasetWriter(tmp_path / "d", np.uint16) as writer:
        writer.add_document([1, 2, 3], [3])
    (tmp_path / "file").touch()
    rules = SampleRules(seq_length=2, seed=1)
    with pytest.raises(ValueError, match="--data-cache-path .*cannot be written"):
        GPTDataset(IndexedDataset(tmp_path / "d"), (0, 1), rules, num_samples=1, cache_folder=tmp_path / "file" / "x")


@pytest.mark.parametrize("text", ["", "abc", "0,0,0", "1,2,3,4", "1.2.3", "-"])
def test_bad_splits(text):
    with pytest.raises(ValueError, match="--split"):
        parse_split(text)


@given(weights=st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any), count=st.integers(0, 10_000))
def test_splits_partition_the_sequences(weights, count):
    ranges = [split_range(share, count) for share in split_shares(",".join(map(str, weights))) if share]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == count
    assert all(left[1] == right[0] for left, right in zip(ranges[:-1], ranges[1:], strict=True))


def test_two_builders_of_one_cache_entry(tmp_path):
    """Another process finishes the same entry while this one builds: its entry stays, and both read the same."""
    with IndexedDatasetWriter(tmp_path / "d", np.uint16) as writer:
        writer.add_document(list(range(40)), [10, 10, 10, 10])
    sizes = np.full(4, 10, dtype=np.int32)

    def build():
        return build_order(sizes, (0, 4), seq_length=3, num_samples=20, seed=1)

    def build_late():
        first.append(cached_order(tmp_path / "cache", str(tmp_path / "d"), {"seed": 1}, build))
        return build()

    first: list[SampleOrder] = []
    second = cached_order(tmp_path / "cache", str(tmp_path / "d"), {"seed": 1}, build_late)
    assert np.array_equal(first[0].shuffle, second.shuffle)
    assert second.num_epochs == build().num_epochs == 2
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_publishing_into_nowhere_is_an_error(tmp_path):
    (tmp_path / "made").mkdir()
    with pytest.raises(OSError, match="made"):
        publish(tmp_path / "made", tmp_path / "missing" / "target")
