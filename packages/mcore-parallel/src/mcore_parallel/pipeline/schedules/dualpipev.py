"""DualPipeV: the V-shaped half of DualPipe, DeepSeek-AI, "DeepSeek-V3 Technical Report" (2412.19437), section 3.2.1.

Rank ``r`` of ``p`` holds stages ``r`` and ``2 p - 1 - r``. In the steady state a forward of one chunk runs beside a
whole backward of the other, so that the communication of each hides behind the compute of the other. With chunk times
``F``, ``I``, ``W`` and ``B = I + W``, the idle time of the makespan is ``(p - 1) (F + I - W)`` for
``W <= I <= F <= B`` when the two run one after the other. As one overlapped action of time ``F&B``, the longest idle
time of a rank is ``(p - 1) (F&B + B - 3 W)`` for ``F <= I``. Every rank holds ``2 p + 1`` chunk activations.
"""

from __future__ import annotations

from mcore_parallel.pipeline.actions import Action
from mcore_parallel.pipeline.schedules.order import Order


def legal(num_ranks: int, num_micro_batches: int, *, num_chunks: int) -> str | None:
    """Why these sizes cannot run: both ways of the V must be full before the steady state."""
    if num_micro_batches >= 2 * num_ranks:
        return None
    fewer = num_micro_batches // 2
    ranks = f", or at most {fewer} rank{'s' if fewer > 1 else ''}" if fewer else ""
    return (
        f"dualpipev needs at least 2 micro-batches per pipeline rank, got {num_micro_batches} micro-batches for "
        f"{num_ranks} ranks; nearest that work: {2 * num_ranks} micro-batches{ranks}"
    )


def plan(num_ranks: int, num_micro_batches: int, *, num_chunks: int) -> list[list[Action]]:
    """Each rank's compute actions; ``num_chunks`` is 2."""
    assert num_chunks == 2, "the spec takes two chunks alone"
    return [_rank_plan(num_ranks, rank, num_micro_batches) for rank in range(num_ranks)]


def _rank_plan(num_ranks: int, rank: int, num_micro_batches: int) -> list[Action]:
    order, to_last = Order(2), num_ranks - rank - 1
    # Fill the way down, then both ways.
    for _ in range(2 * to_last):
        order.forward(0)
    for _ in range(rank + 1):
        order.forward(0)
        order.forward(1)
    # The way back alone, until the first gradient is down at chunk 0.
    for _ in range(to_last):
        order.input_grad(1)
        order.weight_grad()
        order.forward(1)
    # Steady state: a forward of each chunk, each beside a backward of the other.
    for _ in range(num_micro_batches - 2 * num_ranks + rank + 1):
        order.forward(0)
        order.backward(1)
        order.forward(1)
        order.backward(0)
    # No forwards of chunk 0 are left, then none at all.
    for _ in range(to_last):
        order.backward(1)
        order.forward(1)
        order.backward(0)
    # The second half splits, so that the other ranks get their gradients earlier.
    for i in range(2 * (rank + 1)):
        pass_ = order.backward if i <= rank else order.input_grad
        pass_(1 - i % 2)
    for _ in range(to_last):
        order.weight_grad()
        order.input_grad(0)
    for _ in range(order.num_deferred):
        order.weight_grad()
    return order.actions
