"""Mixing several data sets by weight: Megatron's greedy interleaving and its sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_data.gpt_dataset import Sample, SampleDataset

MAX_MEMBERS = 32_767
_FEW = 6


def parse_data_path(items: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Prefixes, and weights if the list has them.

    An odd number of items are prefixes; an even number are ``weight prefix`` pairs if every first of a pair is a
    number, and prefixes if none is.

    Raises:
        ValueError: no items, or some pairs have a weight and some do not, or a weight is negative or not finite.
    """
    if not items:
        raise ValueError("--data-path is empty; give the prefix of .bin/.idx files")
    if len(items) % 2:
        return list(items), None
    weights = [_number(item) for item in items[::2]]
    if all(weight is None for weight in weights):
        return list(items), None
    if None in weights:
        at = weights.index(None)
        raise ValueError(
            f"--data-path mixes weighted and unweighted prefixes: {items[2 * at]!r} stands where a weight should be; "
            "give a weight before every prefix or before none"
        )
    checked = [weight for weight in weights if weight is not None]
    normalise(checked)
    return list(items[1::2]), checked


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def normalise(weights: Sequence[float]) -> NDArray[np.float64]:
    """Weights that add up to 1.

    Raises:
        ValueError: none, a negative or not finite one, or all 0.
    """
    values = np.array(weights, dtype=np.float64)
    if values.size == 0 or not np.isfinite(values).all() or (values < 0).any() or values.sum() <= 0:
        raise ValueError(f"blend weights {list(weights)} must be finite, not negative and not all 0")
    return values / values.sum()


def blending_index(weights: Sequence[float], size: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Member and sample within the member of each of ``size`` samples.

    Step t takes the member that is furthest behind its share, ``w_i * max(t, 1) - drawn_i``, the first of equals.
    A member of weight 0 is never taken. The weights should add up to 1 and are used to the last bit as given.

    Raises:
        ValueError: bad weights, or more than 32,767 members.
    """
    normalise(weights)
    shares = np.array(weights, dtype=np.float64)
    used = np.flatnonzero(shares > 0)
    if len(shares) > MAX_MEMBERS:
        raise ValueError(f"{len(shares)} members in a blend; at most {MAX_MEMBERS}")
    draw = _draw_few if len(used) <= _FEW else _draw_many
    member = used.astype(np.int16)[draw(shares[used], size)]
    return member, _occurrence(member, len(shares))


def _draw_few(shares: NDArray[np.float64], size: int) -> NDArray[np.int64]:
    weights, drawn = shares.tolist(), [0] * len(shares)
    order = np.empty(size, dtype=np.int64)
    for step in range(size):
        at = max(step, 1)
        best, most = 0, weights[0] * at - drawn[0]
        for member in range(1, len(weights)):
            behind = weights[member] * at - drawn[member]
            if behind > most:
                best, most = member, behind
        drawn[best] += 1
        order[step] = best
    return order


def _draw_many(shares: NDArray[np.float64], size: int) -> NDArray[np.int64]:
    drawn = np.zeros(len(shares), dtype=np.float64)
    behind = np.empty_like(shares)
    order = np.empty(size, dtype=np.int64)
    for step in range(size):
        np.multiply(shares, max(step, 1), out=behind)
        behind -= drawn
        best = int(behind.argmax())
        drawn[best] += 1
        order[step] = best
    return order


def exhaustive_index(sizes: Sequence[int]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """As ``blending_index`` with the sizes as weights, until every member is used up; ``sum(sizes)`` long."""
    total = sum(sizes)
    shares = np.array(sizes, dtype=np.float64) / max(total, 1)
    drawn = np.zeros(len(sizes), dtype=np.int64)
    left = np.array(sizes, dtype=np.int64)
    member = np.empty(total, dtype=np.int16)
    for step in range(total):
        behind = np.where(left > 0, shares * max(step, 1) - drawn, -np.inf)
        best = int(behind.argmax())
        drawn[best] += 1
        left[best] -= 1
        member[step] = best
    return member, _occurrence(member, len(sizes))


def _occurrence(member: NDArray[np.int16], members: int) -> NDArray[np.int64]:
    """How often the same member came before: ``[size]``."""
    result = np.empty(len(member), dtype=np.int64)
    order = np.argsort(member, kind="stable")
    starts = np.zeros(members, dtype=np.int64)
    counts = np.bincount(member, minlength=members)
    np.cumsum(counts[:-1], out=starts[1:])
    result[order] = np.arange(len(member), dtype=np.int64) - np.repeat(starts, counts)
    return result


class BlendedDataset:
    """Samples of several data sets in a fixed interleaving.

    Args:
        members: the data sets.
        weights: their shares of samples; None uses every sample of every member once.
        size: samples; needed with ``weights``.
    """

    def __init__(self, members: Sequence[SampleDataset], weights: Sequence[float] | None, size: int | None) -> None:
        self.members = list(members)
        self.weights = None if weights is None else list(weights)
        self.size = size
        if self.weights is None:
            index = exhaustive_index([len(member) for member in self.members])
        else:
            assert size is not None
            index = blending_index(normalise(self.weights).tolist(), size)
        self.member_index, self.sample_index = index

    @property
    def drawn(self) -> list[int]:
        """Samples taken from each member."""
        counts: list[int] = np.bincount(self.member_index, minlength=len(self.members)).tolist()
        return counts

    def __len__(self) -> int:
        return len(self.member_index)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in a blend")
        return self.members[int(self.member_index[index])][int(self.sample_index[index])]

    def __reduce__(self) -> tuple[Any, ...]:
        return BlendedDataset, (self.members, self.weights, self.size)
