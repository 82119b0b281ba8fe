"""Pairwise covering arrays under constraints: every pair of values that may occur together does, in few rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Cell = dict[str, Any]
Pair = tuple[str, Any, str, Any]


def covering_array(dims: Mapping[str, Sequence[Any]], legal: Callable[[Cell], bool], *, tries: int = 400) -> list[Cell]:
    """Rows over ``dims`` that satisfy ``legal`` (a test of whole rows) and cover every pair that any legal row has.

    Greedy over random legal rows (Cohen et al., "The AETG System", 1997); the same rows on every call.
    """
    rng = random.Random(0)
    rows = [{name: rng.choice(values) for name, values in dims.items()} for _ in range(tries * 50)]
    pool = [row for row in rows if legal(row)]
    missing: set[Pair] = set().union(*(pairs(row) for row in pool))
    chosen: list[Cell] = []
    while missing:
        sample = rng.sample(pool, min(tries, len(pool)))
        best = max(sample, key=lambda row: len(pairs(row) & missing))
        if not pairs(best) & missing:
            best = next(row for row in pool if pairs(row) & missing)
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def pairs(row: Cell) -> set[Pair]:
    """All pairs of a row."""
    return {(a, row[a], b, row[b]) for a, b in combinations(row, 2)}
