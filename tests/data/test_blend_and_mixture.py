"""Blends: within one draw of the shares, never out of range, and what the list of paths means."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_data.blend import BlendedDataset, blending_index, exhaustive_index, parse_data_path
from mcore_data.gpt_dataset import GPTDataset, SampleRules
from mcore_data.indexed_dataset import IndexedDataset
from mcore_data.indexed_writer import IndexedDatasetWriter
from mcore_data.mixture import Mixture, SplitRequest

ALL = (0.0, 1.0)


@settings(max_examples=30, deadline=None)
@given(
    weights=st.lists(st.floats(1e-9, 1.0), min_size=1, max_size=12),
    size=st.sampled_from([1, 10, 300, 1001]),
)
def test_draws_follow_the_shares(weights, size):
    shares = np.array(weights) / np.sum(weights)
    member, sample = blending_index(shares.tolist(), size)
    drawn = np.cumsum(np.eye(len(shares), dtype=np.int64)[member], axis=0)
    wanted = np.arange(1, size + 1)[:, None] * shares
    error = drawn - wanted
    assert error.max() <= 1 + 1e-9, "a member is more than one sample ahead of its share"
    assert -error.min() <= sum(1 / k for k in range(1, len(weights) + 1)), "a member starves"
    # Every member gives its samples in order, none left out.
    for index in range(len(shares)):
        assert sample[member == index].tolist() == list(range(int(drawn[-1, index])))


@settings(max_examples=50, deadline=None)
@given(weights=st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=12))
def test_each_step_takes_the_member_furthest_behind(weights):
    """Few members take one path through the code, many another; both follow the rule, ties included."""
    drawn = [0] * len(weights)
    for step, member in enumerate(blending_index(weights, 60)[0].tolist()):
        behind = [weight * max(step, 1) - count for weight, count in zip(weights, drawn, strict=True)]
        assert member == behind.index(max(behind))
        drawn[member] += 1


def test_more_than_127_members():
    member, sample = blending_index([3.0 / 302, *([1.0 / 302] * 299)], 1001)
    assert member.max() == 299
    assert member.min() == 0
    counts = Counter(member.tolist())
    assert abs(counts[0] - 3 / 302 * 1001) <= 1
    assert sample.max() == counts[0] - 1


@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=6))
def test_exhaustive_uses_everything_once(sizes):
    member, sample = exhaustive_index(sizes)
    pairs = set(zip(member.tolist(), sample.tolist(), strict=True))
    assert pairs == {(index, position) for index, size in enumerate(sizes) for position in range(size)}
    assert len(member) == sum(sizes)


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [-1.0, 2.0], [float("nan")], [float("inf"), 1.0]])
def test_bad_weights(weights):
    with pytest.raises(ValueError, match="finite, not negative and not all 0"):
        blending_index(weights, 3)


@pytest.mark.parametrize(
    ("items", "prefixes", "weights"),
    [
        (["a"], ["a"], None),
        (["a", "b"], ["a", "b"], None),
        (["0.3", "a", "0.7", "b"], ["a", "b"], [0.3, 0.7]),
        (["3", "a"], ["a"], [3.0]),
        (["a", "b", "c"], ["a", "b", "c"], None),
        (["1", "a", "b"], ["1", "a", "b"], None),
        (["1e-3", "7", "0", "b"], ["7", "b"], [0.001, 0.0]),
    ],
)
def test_data_path_lists(items, prefixes, weights):
    assert parse_data_path(items) == (prefixes, weights)


@pytest.mark.parametrize(
    ("items", "match"),
    [
        ([], "--data-path is empty"),
        (["0.3", "a", "b", "c"], "mixes weighted and unweighted prefixes: 'b' stands where a weight"),
        (["-1", "a", "1", "b"], "not negative"),
        (["nan", "a"], "finite"),
    ],
)
def test_bad_data_path_lists(items, match):
    with pytest.raises(ValueError, match=match):
        parse_data_path(items)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Data sets of 1, 3, 40 and 300 documents of 7 tokens; every token names its data set and document."""
    folder = tmp_path_factory.mktemp("corpus")
    for number, count in enumerate((1, 3, 40, 300)):
        with IndexedDatasetWriter(folder / str(count), np.int32) as writer:
            for document in range(count):
                writer.add_document([1000 * number + document] * 7, [7])
    return {count: IndexedDataset(folder / str(count)) for count in (1, 3, 40, 300)}


RULES = SampleRules(seq_length=4, seed=1)


def mixture(corpus, sizes, weights):
    return Mixture([corpus[size] for size in sizes], weights, RULES)


@pytest.mark.parametrize(
    ("sizes", "weights"),
    [
        ((40,), (1.0,)),
        ((1, 40), (0.5, 0.5)),
        ((1, 300), (0.001, 0.999)),
        ((300, 1), (0.001, 0.999)),
        ((1, 40), (0.0, 1.0)),
        ((40, 1), (1e-9, 1.0)),
        ((300, *([1, 3] * 150)), (3.0, *([1.0] * 300))),
    ],
)
@pytest.mark.parametrize("num", [1, 10, 1000, 1001])
def test_every_sample_of_a_blend_can_be_read(corpus, sizes, weights, num):
    blend = mixture(corpus, sizes, weights).build(SplitRequest("train", ALL, num))
    assert isinstance(blend, BlendedDataset)
    assert len(blend) >= num
    for member, drawn in zip(blend.members, blend.drawn, strict=True):
        assert drawn <= len(member)
    step = max(1, len(blend) // 50)
    for index in [*range(0, len(blend), step), len(blend) - 1]:
        assert blend[index].tokens.shape == (4,)
    with pytest.raises(IndexError):
        blend[len(blend)]


def test_a_member_that_rounding_asks_for_too_much_gets_another_epoch(tmp_path):
    """Shares of 1.01 samples round up to 2 for 300 members, so the blend is twice as long as the first one expects.

    It is asked for 8 samples, and one document of 7 tokens at length 7 gives exactly those.
    """
    for name, count in (("small", 1), ("large", 40)):
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            for document in range(count):
                writer.add_document([document] * 7, [7])
    small, large = IndexedDataset(tmp_path / "small"), IndexedDataset(tmp_path / "large")
    rules = SampleRules(seq_length=7, seed=1)
    assert len(GPTDataset(small, (0, 1), rules, num_samples=8)) == 8
    data = Mixture([small, *[large] * 300], [6.0, *[1.0] * 300], rules)
    blend = data.build(SplitRequest("train", ALL, 310))
    assert blend.drawn[0] > 8
    assert len(blend.members[0]) >= blend.drawn[0]
    last = int(np.flatnonzero(blend.member_index == 0)[-1])
    assert blend[last].tokens.tolist() == [0] * 7


def test_weights_are_relative(corpus):
    one = mixture(corpus, (40, 300), (3.0, 1.0)).build(SplitRequest("train", ALL, 500))
    other = mixture(corpus, (40, 300), (0.75, 0.25)).build(SplitRequest("train", ALL, 500))
    assert one.member_index.tolist() == other.member_index.tolist()
    assert all((one[index].tokens == other[index].tokens).all() for index in range(0, 500, 17))


def test_unweighted_members_are_taken_by_size_and_repeated_when_too_few(corpus):
    once = mixture(corpus, (40, 300), None).build(SplitRequest("train", ALL, 500))
    assert len(once) == 500
    assert [member.num_samples for member in once.members] == [None, None]
    more = mixture(corpus, (40, 300), None).build(SplitRequest("train", ALL, 5000))
    assert len(more) >= 5000
    assert abs(more.drawn[0] / len(more) - 40 / 340) < 1e-3
    assert more[len(more) - 1].tokens.shape == (4,)


def test_a_single_prefix_is_not_a_blend(corpus):
    data = mixture(corpus, (3,), None).build(SplitRequest("train", ALL, 50))
    assert isinstance(data, GPTDataset)
    assert len(data) >= 50


@pytest.mark.parametrize(
    ("share", "match"),
    [
        (None, "--split gives the valid split no share, but 7 of its samples are needed"),
        ((0.9, 0.95), r"the valid split of .*1 \(1 documents\) is empty: it gets no document; change --split"),
    ],
)
def test_empty_split_is_named(corpus, share, match):
    with pytest.raises(ValueError, match=match):
        mixture(corpus, (1,), None).build(SplitRequest("valid", share, 7))


def test_split_of_empty_documents_is_named(tmp_path):
    with IndexedDatasetWriter(tmp_path / "d", np.uint16) as writer:
        writer.add_document([1, 2, 3], [3])
        writer.add_document([], [0])
    data = Mixture([IndexedDataset(tmp_path / "d")], None, RULES)
    with pytest.raises(ValueError, match=r"documents 1\.\.1 of it hold no tokens"):
        data.build(SplitRequest("valid", (0.5, 1.0), 7))


def test_corpus_shorter_than_a_sample(tmp_path):
    with IndexedDatasetWriter(tmp_path / "d", np.uint16) as writer:
        writer.add_document([1, 2, 3], [3])
    rules = SampleRules(seq_length=8, seed=1)
    for weights in (None, [1.0]):
        data = Mixture([IndexedDataset(tmp_path / "d")], weights, rules).build(SplitRequest("train", ALL, 2))
        assert len(data) >= 2
        # Stream samples start at token 0, 8, 16 of 1 2 3 1 2 3 ...; which comes first is the shuffle's.
        starts = [data[index].tokens[:3].tolist() for index in range(2)]
        assert starts[0] != starts[1]
        assert all(start in ([1, 2, 3], [3, 1, 2], [2, 3, 1]) for start in starts)
    two = Mixture([IndexedDataset(tmp_path / "d")] * 2, None, rules).build(SplitRequest("train", ALL, 2))
    assert len(two) >= 2
    assert two[1].tokens[:3].tolist() in ([1, 2, 3], [3, 1, 2], [2, 3, 1])
