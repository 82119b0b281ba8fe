"""Looped breadth-first: Lamy-Poirier, "Breadth-First Pipeline Parallelism" (2211.05953).

Each chunk runs for all micro-batches before the next chunk starts, so its weights are gathered once per pass and its
gradients reduced once: the schedule for ZeRO and FSDP. With ``p`` ranks, ``v`` chunks and ``m >= p`` micro-batches, the
bubble is ``(p - 1) / (v m + p - 1)`` of the makespan; every rank holds ``v m`` live chunk activations.
"""

from __future__ import annotations

from mcore_parallel.pipeline.actions import Action, Kind


def plan(num_ranks: int, num_micro_batches: int, *, num_chunks: int) -> list[list[Action]]:
    """Each rank's compute actions: forwards chunk by chunk, then backwards chunk by chunk from the last."""
    chunks = range(num_chunks)
    forwards = [Action(Kind.FORWARD, i, chunk) for chunk in chunks for i in range(num_micro_batches)]
    backwards = [Action(Kind.BACKWARD, i, chunk) for chunk in reversed(chunks) for i in range(num_micro_batches)]
    return [forwards + backwards for _ in range(num_ranks)]
