"""Train, validation and test shares as contiguous ranges of sequences (Megatron's arithmetic)."""

from __future__ import annotations

import math
import re

SPLIT_NAMES = ("train", "valid", "test")

Share = tuple[float, float] | None


def parse_split(split: str) -> list[float]:
    """Shares of train, valid and test that add up to 1, from text like ``"969,30,1"``.

    Raises:
        ValueError: no number, more than three, or all zero.
    """
    try:
        weights = [float(text) for text in re.split(r"[,/\s]+", split.strip())]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or min(weights) < 0 or sum(weights) <= 0 or not math.isfinite(sum(weights)):
        raise ValueError(f"--split {split!r}: give one to three numbers, not all zero, such as 969,30,1")
    weights += [0.0] * (3 - len(weights))
    total = sum(weights)
    return [weight / total for weight in weights]


def split_shares(split: str) -> list[Share]:
    """``(begin, end)`` of each split within [0, 1]; None for a split with no share."""
    bounds = [0.0]
    for weight in parse_split(split):
        bounds.append(bounds[-1] + weight)
    return [(low, high) if high > low else None for low, high in zip(bounds[:-1], bounds[1:], strict=True)]


def split_range(share: tuple[float, float], num_sequences: int) -> tuple[int, int]:
    """Sequences ``[begin, end)`` of a share; halves round to even, so neighbours share a boundary exactly."""
    begin, end = share
    return int(round(begin * float(num_sequences))), int(round(end * float(num_sequences)))
