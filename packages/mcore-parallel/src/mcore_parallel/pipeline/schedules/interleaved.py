"""Interleaved 1F1B: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2104.04473).

Rank ``r`` of ``p`` holds ``v`` chunks, stages ``r, p + r, 2 p + r, ...``. Micro-batches go in groups of ``g`` (at least
``p``, and by default ``p``): a group passes one chunk, then the next. With ``m`` a multiple of ``p`` and ``g = p``, the
bubble is ``(p - 1) / (v m + p - 1)`` of the makespan; rank ``r`` holds at most ``(v - 1) g + 2 (p - r) - 1`` live chunk
activations.
"""

from __future__ import annotations

from mcore_parallel.pipeline.actions import Action, Kind
from mcore_parallel.pipeline.schedules import one_f_one_b
from mcore_parallel.pipeline.schedules.order import first_micro_batches


def legal(num_ranks: int, num_micro_batches: int, *, num_chunks: int, group_size: int | None = None) -> str | None:
    """Why these sizes cannot run: groups smaller than the pipeline wait for each other for ever."""
    if group_size is None or group_size >= num_ranks or num_chunks == 1:
        return None
    return (
        f"interleaved needs groups of at least as many micro-batches as ranks, got groups of {group_size} for "
        f"{num_ranks} ranks; nearest group size that works: {num_ranks}"
    )


def plan(
    num_ranks: int, num_micro_batches: int, *, num_chunks: int, group_size: int | None = None
) -> list[list[Action]]:
    """Each rank's compute actions: warm-up forwards, then one forward and one backward in turn, then the rest.

    Any number of micro-batches works: a last group that is not full is planned as if it were, and what would be its
    other micro-batches is left out. One chunk per rank is plain 1F1B.
    """
    if num_chunks == 1:
        return one_f_one_b.plan(num_ranks, num_micro_batches)
    # A group beyond the micro-batches there are is planned as one of them all.
    group = num_ranks if group_size is None else min(group_size, max(num_ranks, num_micro_batches))
    starts = range(0, num_micro_batches, group)
    chunks = range(num_chunks)
    forwards = [Action(Kind.FORWARD, s + i, c) for s in starts for c in chunks for i in range(group)]
    backwards = [Action(Kind.BACKWARD, s + i, c) for s in starts for c in reversed(chunks) for i in range(group)]
    plans = []
    for rank in range(num_ranks):
        # The first backward waits until the group is through all chunks and a pass has come back from the last rank.
        warmup = min(len(forwards), (num_chunks - 1) * group + 2 * (num_ranks - rank - 1))
        actions = forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            actions += [forward, backward]
        actions += backwards[len(forwards) - warmup :]
        plans.append(first_micro_batches(actions, num_micro_batches))
    return plans
