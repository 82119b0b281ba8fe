"""ZB-H1: Qi et al., "Zero Bubble Pipeline Parallelism" (2401.10241), section 2.

1F1B with split backward: weight gradients are put off into the gaps, more of them the later the rank. With ``p`` ranks
and pass times ``F``, ``I``, ``W``, the longest idle time within any rank's own span is ``(p - 1) (F + I - W)`` for
``W <= min(F, I)`` and ``m >= p``; every rank holds at most ``p`` activations and weight gradients to
come together, as 1F1B's first rank does.
"""

from __future__ import annotations

from mcore_parallel.pipeline.actions import Action, Kind


def plan(num_ranks: int, num_micro_batches: int) -> list[list[Action]]:
    """Each rank's compute actions: 1F1B's order of F and I, with W ``rank`` micro-batches behind."""
    return [split_one_f_one_b(num_micro_batches, num_ahead=num_ranks - rank - 1, lag=rank) for rank in range(num_ranks)]


def split_one_f_one_b(num_micro_batches: int, *, num_ahead: int, lag: int) -> list[Action]:
    """``num_ahead`` warm-up forwards, then F and I in turn, each W ``lag`` micro-batches after its I."""
    warmup = min(num_ahead, num_micro_batches)
    actions = [Action(Kind.FORWARD, i) for i in range(warmup)]
    for i in range(num_micro_batches):
        if warmup + i < num_micro_batches:
            actions.append(Action(Kind.FORWARD, warmup + i))
        actions.append(Action(Kind.INPUT_GRAD, i))
        if i >= lag:
            actions.append(Action(Kind.WEIGHT_GRAD, i - lag))
    left = range(max(0, num_micro_batches - lag), num_micro_batches)
    return actions + [Action(Kind.WEIGHT_GRAD, i) for i in left]
