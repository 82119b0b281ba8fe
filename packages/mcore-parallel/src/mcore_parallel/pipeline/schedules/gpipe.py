"""GPipe: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (1811.06965).

Bubble ``(p - 1) / (m + p - 1)`` of the makespan with ``p`` ranks and ``m`` micro-batches, as 1F1B; every rank holds
``m`` live activations. With several chunks per rank it is looped BFS.
"""

from __future__ import annotations

from mcore_parallel.pipeline.actions import Action, Kind


def plan(num_ranks: int, num_micro_batches: int) -> list[list[Action]]:
    """Each rank's compute actions: every micro-batch forward, then every one backward."""
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return [[Action(kind, i) for kind in kinds for i in range(num_micro_batches)] for _ in range(num_ranks)]
