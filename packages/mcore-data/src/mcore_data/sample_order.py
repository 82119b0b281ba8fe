"""Which tokens sample i of a data set holds: Megatron's document, sample and shuffle indices, in numpy.

Documents of the split are repeated for as many epochs as the requested samples need and shuffled; the shuffled
stream is cut every ``seq_length`` tokens; the samples are shuffled. One legacy generator serves both shuffles.
If the last epoch would be used by less than 80 %, it is shuffled apart, so that no document of an earlier epoch
is missed for the sake of one that is used in part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SEPARATE_EPOCH_SHARE = 0.80


@dataclass(frozen=True)
class SampleOrder:
    """The three indices of a data set.

    ``documents [epochs * sequences]`` sequence numbers in stream order; ``boundaries [samples + 1, 2]`` (position in
    ``documents``, token offset) where each sample starts; ``shuffle [samples]`` the stream sample behind sample i.
    """

    documents: NDArray[Any]
    boundaries: NDArray[Any]
    shuffle: NDArray[Any]
    num_epochs: int

    def __len__(self) -> int:
        return len(self.shuffle)


@dataclass(frozen=True)
class EpochPlan:
    """How many epochs a request needs, and whether the last is shuffled apart (then after ``first`` samples)."""

    num_epochs: int
    separate_last: bool
    first: int


def plan_epochs(tokens_per_epoch: int, *, seq_length: int, num_samples: int | None, extra: int) -> EpochPlan:
    """The least number of epochs that holds ``num_samples`` (None: one epoch) samples.

    Raises:
        ValueError: the split has no tokens.
    """
    if tokens_per_epoch < 1:
        raise ValueError("no tokens to cut samples from")
    epochs = 1
    if num_samples is not None:
        epochs = max(1, -(-(num_samples * seq_length + extra) // tokens_per_epoch))
    if epochs == 1 or num_samples is None:
        return EpochPlan(1, False, 0)
    without_last = ((epochs - 1) * tokens_per_epoch - extra) // seq_length
    last = num_samples - without_last
    per_epoch = (tokens_per_epoch - extra) // seq_length
    assert 0 <= last <= per_epoch + 1, (last, per_epoch)
    separate = last < int(SEPARATE_EPOCH_SHARE * per_epoch)
    return EpochPlan(epochs, separate, without_last)


def document_index(
    split: tuple[int, int], num_epochs: int, separate_last: bool, random: np.random.RandomState
) -> NDArray[Any]:
    """Sequence numbers of the split, ``num_epochs`` times, shuffled; ``[epochs * sequences]``."""
    begin, end = split
    documents = np.arange(begin, end, dtype=np.int32 if end <= np.iinfo(np.int32).max else np.int64)
    if not separate_last:
        index = np.tile(documents, num_epochs)
        random.shuffle(index)
        return index
    first = np.tile(documents, num_epochs - 1)
    random.shuffle(first)
    random.shuffle(documents)
    return np.concatenate([first, documents])


def sample_count(total_tokens: int, seq_length: int, *, keep_partial: bool) -> int:
    """Samples in a stream whose tokens less the extra one are ``total_tokens``.

    With ``keep_partial`` the quotient is rounded up in float32 as Megatron does, which from 2**24 tokens on can lose
    the partial sample: another count would change the whole shuffle.
    """
    if keep_partial:
        return math.ceil(float(np.float32(total_tokens) / np.float32(seq_length)))
    return total_tokens // seq_length


def sample_boundaries(
    lengths: NDArray[Any], documents: NDArray[Any], *, seq_length: int, extra: int = 1, keep_partial: bool = False
) -> NDArray[Any]:
    """Where each sample starts: ``[samples + 1, 2]`` of (position in ``documents``, token offset).

    Args:
        lengths: tokens of every sequence of the data set.
        documents: the document index.
        seq_length: tokens from one start to the next.
        extra: 1 if a sample reads one token past its end (for the labels), else 0.
        keep_partial: whether a last sample of fewer tokens counts.
    """
    ordered = lengths[documents]
    ends = np.cumsum(ordered, dtype=np.int64)
    total = (int(ends[-1]) if len(ends) else 0) - extra
    count = sample_count(max(total, 0), seq_length, keep_partial=keep_partial)
    starts = np.arange(count + 1, dtype=np.int64) * seq_length
    # The document of a start is the first whose end reaches the start plus the extra token.
    position = np.searchsorted(ends, starts + extra, side="left")
    offset = starts
    if len(ends):
        past = position == len(ends)
        position[past] = len(ends) - 1
        offset = starts - (ends[position] - ordered[position])
        offset[past] = int(ordered[-1]) - extra
    position[0], offset[0] = 0, 0
    longest = max(len(documents), int(lengths.max(initial=0)))
    wide = longest > np.iinfo(np.int32).max
    return np.stack([position, offset], axis=1).astype(np.int64 if wide else np.int32)


def shuffle_index(first: int, total: int, random: np.random.RandomState) -> NDArray[Any]:
    """A permutation of ``arange(total)`` whose first ``first`` entries stay among themselves; ``[total]``."""
    dtype: Any = np.int64 if total >= np.iinfo(np.uint32).max - 1 else np.uint32
    head = np.arange(first, dtype=dtype)
    random.shuffle(head)
    if first == total:
        return head
    tail = np.arange(first, total, dtype=dtype)
    random.shuffle(tail)
    return np.concatenate([head, tail])


def build_order(
    lengths: NDArray[Any],
    split: tuple[int, int],
    *,
    seq_length: int,
    num_samples: int | None,
    seed: int,
    extra: int = 1,
    keep_partial: bool = False,
) -> SampleOrder:
    """The order of one split of one data set, a pure function of its arguments.

    Args:
        lengths: tokens of every sequence of the data set, ``[sequences]``.
        split: sequences ``[begin, end)`` of the split.
        seq_length: tokens per sample.
        num_samples: samples wanted at least; None is one epoch.
        seed: of the legacy generator.
        extra: see ``sample_boundaries``.
        keep_partial: see ``sample_boundaries``.

    Raises:
        ValueError: the split has no tokens.
    """
    begin, end = split
    tokens_per_epoch = int(np.sum(lengths[begin:end], dtype=np.int64))
    plan = plan_epochs(tokens_per_epoch, seq_length=seq_length, num_samples=num_samples, extra=extra)
    random = np.random.RandomState(seed)
    documents = document_index(split, plan.num_epochs, plan.separate_last, random)
    boundaries = sample_boundaries(lengths, documents, seq_length=seq_length, extra=extra, keep_partial=keep_partial)
    total = len(boundaries) - 1
    shuffle = shuffle_index(plan.first if plan.separate_last else total, total, random)
    return SampleOrder(documents, boundaries, shuffle, plan.num_epochs)
