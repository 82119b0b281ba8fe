"""1F1B (PipeDream-Flush): Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021.

Bubble ``(p - 1) / (m + p - 1)`` of the step with ``p`` stages and ``m`` micro-batches; rank ``r`` holds at most
``min(p - r, m)`` live activations.
"""

from __future__ import annotations

from mcore_parallel.pipeline.actions import Action, Kind


def plan(num_stages: int, num_micro_batches: int) -> list[list[Action]]:
    """Each rank's compute actions: warm-up forwards, then one forward and one backward in turn, then the rest.

    Any number of micro-batches works, fewer than stages included (the bubble grows).

    Raises:
        ValueError: fewer than one stage or micro-batch.
    """
    if num_stages < 1 or num_micro_batches < 1:
        raise ValueError(
            f"1f1b needs stages and micro-batches, got {num_stages} stages and {num_micro_batches} micro-batches"
        )
    return [_rank_plan(num_stages - rank - 1, num_micro_batches) for rank in range(num_stages)]


def _rank_plan(distance_to_last: int, num_micro_batches: int) -> list[Action]:
    warmup = min(distance_to_last, num_micro_batches)
    actions = [Action(Kind.FORWARD, i) for i in range(warmup)]
    for i in range(num_micro_batches - warmup):
        actions += [Action(Kind.FORWARD, warmup + i), Action(Kind.BACKWARD, i)]
    actions += [Action(Kind.BACKWARD, i) for i in range(num_micro_batches - warmup, num_micro_batches)]
    return actions
