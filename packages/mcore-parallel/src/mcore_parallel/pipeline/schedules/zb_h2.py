"""ZB-H2: Qi et al., "Zero Bubble Pipeline Parallelism" (2401.10241), section 2.

More warm-up forwards than ZB-H1 fill the gap before the first backward. With ``p`` ranks and pass times ``F``, ``I``,
``W``, the longest idle time within any rank's own span is ``(p - 1) (F + I - 2 W)`` (none for ``F = I = W``) for
``W <= min(F, I)`` and ``m >= 2 p - 1``; every rank holds at most ``2 p - 1`` activations and weight gradients to come
together. The makespan keeps a ramp of ``(p - 1) F``: ranks start and end at different times.
"""

from __future__ import annotations

from mcore_parallel.pipeline.actions import Action
from mcore_parallel.pipeline.schedules.zb_h1 import split_one_f_one_b


def plan(num_ranks: int, num_micro_batches: int) -> list[list[Action]]:
    """Each rank's compute actions: twice 1F1B's warm-up, then F and I in turn, with W ``2 rank`` behind."""
    return [
        split_one_f_one_b(num_micro_batches, num_ahead=2 * (num_ranks - rank - 1), lag=2 * rank)
        for rank in range(num_ranks)
    ]
