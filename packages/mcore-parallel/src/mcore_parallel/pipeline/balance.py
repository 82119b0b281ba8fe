"""Layers on stages by what they cost: the contiguous partition whose dearest stage is cheapest. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class LayerCosts:
    """Work per token of each part of a model, in any one unit."""

    layers: tuple[int, ...]
    embedding: int = 0
    output: int = 0


def balanced_sizes(costs: LayerCosts, num_stages: int) -> list[int]:
    """Layers on each of ``num_stages`` stages in model order, so that the largest stage costs least.

    The first stage also pays for the embedding, the last one for the output layer. Among partitions with the same
    largest stage the one with the least sum of squares is taken, which evens out the others; then the one with fewer
    layers in front, where activations live longest. Every stage holds a layer, but the last may hold the output layer
    alone. Exact, by dynamic programming over (stages, layers), ``O(num_stages * num_layers^2)``.

    Raises:
        ValueError: there are too few layers for the stages.
    """
    num_layers = len(costs.layers)
    if num_layers < max(1, num_stages - 1):
        raise ValueError(f"{num_layers} layers cannot give each of {num_stages} stages one (the last may have none)")
    if num_stages == 1:
        return [num_layers]
    total = [0, *accumulate(costs.layers)]
    # best[n]: (largest, sum of squares, sizes) over the stages so far with n layers on them. First: one stage.
    best = {n: _extend(None, costs.embedding + total[n], n) for n in range(1, num_layers + 1)}
    for _ in range(num_stages - 2):
        best = {
            n: min(_extend(best[k], total[n] - total[k], n - k) for k in best if k < n)
            for n in range(min(best) + 1, num_layers + 1)
        }
    last = min(_extend(best[k], total[-1] - total[k] + costs.output, num_layers - k) for k in best)
    return list(last[2])


_Partition = tuple[int, int, tuple[int, ...]]


def _extend(partition: _Partition | None, cost: int, size: int) -> _Partition:
    """``partition`` with one stage more."""
    largest, squares, sizes = partition if partition is not None else (0, 0, ())
    return max(largest, cost), squares + cost * cost, (*sizes, size)
