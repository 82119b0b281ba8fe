"""GPipe: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019.

Bubble ``(p - 1) / (m + p - 1)`` of the step with ``p`` stages and ``m`` micro-batches, as 1F1B, but every rank holds
``m`` live activations.
"""

from __future__ import annotations

from mcore_parallel.pipeline.actions import Action, Kind


def plan(num_stages: int, num_micro_batches: int) -> list[list[Action]]:
    """Each rank's compute actions: every micro-batch forward, then every one backward.

    Raises:
        ValueError: fewer than one stage or micro-batch.
    """
    if num_stages < 1 or num_micro_batches < 1:
        raise ValueError(
            f"gpipe needs stages and micro-batches, got {num_stages} stages and {num_micro_batches} micro-batches"
        )
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return [[Action(kind, i) for kind in kinds for i in range(num_micro_batches)] for _ in range(num_stages)]
