"""ZB-V: Qi et al., "Zero Bubble Pipeline Parallelism" (2401.10241), section 6, one of the V schedules of Qi et al.,
"Pipeline Parallelism with Controllable Memory" (2405.15362).

Rank ``r`` of ``p`` holds stages ``r`` and ``2 p - 1 - r``: micro-batches go down the ranks and come back. With chunk
times ``F``, ``I``, ``W`` and ``m >= 2 p - 1`` micro-batches, the longest idle time within any rank's own span is
``2 (p - 1) (I - W)`` for ``F <= I`` and ``W <= I``, none for ``F = I = W``; every rank holds at most ``2 p`` chunk
activations and weight gradients to come together, the memory of 1F1B's first rank.
"""

from __future__ import annotations

from mcore_parallel.pipeline.actions import Action
from mcore_parallel.pipeline.schedules.order import Order, first_micro_batches


def plan(num_ranks: int, num_micro_batches: int, *, num_chunks: int) -> list[list[Action]]:
    """Each rank's compute actions; ``num_chunks`` is 2.

    Fewer than ``2 p - 1`` micro-batches do not fill the V; they run in its order with the others left out.
    """
    assert num_chunks == 2, "the spec takes two chunks alone"
    full = max(num_micro_batches, 2 * num_ranks - 1)
    return [first_micro_batches(_rank_plan(num_ranks, rank, full), num_micro_batches) for rank in range(num_ranks)]


def _rank_plan(num_ranks: int, rank: int, num_micro_batches: int) -> list[Action]:
    order, to_last = Order(2), num_ranks - rank
    # Fill the way down, until the first micro-batch is back.
    for _ in range(2 * to_last - 1):
        order.forward(0)
    for _ in range(rank):
        order.forward(1)
        order.forward(0)
    # The way back alone, until the first gradient is down at chunk 0.
    for _ in range(to_last):
        _one_each(order, 1)
    # Both ways in turn.
    while order.num_forwards(1) < num_micro_batches:
        if order.num_forwards(0) < num_micro_batches:
            order.forward(0)
        order.input_grad(0)
        order.weight_grad(0)
        _one_each(order, 1)
    # Input gradients first, since others wait for them; weight gradients fill what is left.
    for _ in range(rank):
        order.input_grad(0)
        order.input_grad(1)
    for _ in range(to_last):
        order.input_grad(0)
        order.weight_grad(0)
    for chunk in (1, 0):
        for _ in range(order.num_deferred):
            order.weight_grad(chunk)
    return order.actions


def _one_each(order: Order, chunk: int) -> None:
    order.forward(chunk)
    order.input_grad(chunk)
    order.weight_grad(chunk)
