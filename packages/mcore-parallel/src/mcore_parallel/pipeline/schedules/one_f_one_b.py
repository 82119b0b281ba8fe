"""1F1B (PipeDream-Flush): Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (2006.09503).

Bubble ``(p - 1) / (m + p - 1)`` of the makespan with ``p`` ranks and ``m`` micro-batches; rank ``r`` holds at most
``min(p - r, m)`` live activations.
"""

from __future__ import annotations

from mcore_parallel.pipeline.actions import Action, Kind


def plan(num_ranks: int, num_micro_batches: int) -> list[list[Action]]:
    """Each rank's compute actions: warm-up forwards, then one forward and one backward in turn, then the rest.

    Any number of micro-batches works, fewer than ranks included (the bubble grows).
    """
    return [_rank_plan(num_ranks - rank - 1, num_micro_batches) for rank in range(num_ranks)]


def _rank_plan(distance_to_last: int, num_micro_batches: int) -> list[Action]:
    warmup = min(distance_to_last, num_micro_batches)
    actions = [Action(Kind.FORWARD, i) for i in range(warmup)]
    for i in range(num_micro_batches - warmup):
        actions += [Action(Kind.FORWARD, warmup + i), Action(Kind.BACKWARD, i)]
    actions += [Action(Kind.BACKWARD, i) for i in range(num_micro_batches - warmup, num_micro_batches)]
    return actions
