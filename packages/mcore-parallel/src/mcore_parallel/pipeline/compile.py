"""From a registered schedule to a proven plan, for training and for evaluation. No torch."""

from __future__ import annotations

from typing import Any

from mcore_parallel.pipeline.actions import Plan, forward_plan
from mcore_parallel.pipeline.communication import with_communication
from mcore_parallel.pipeline.verify import verify
from mcore_parallel.specs import ScheduleSpec


def compile_schedule(
    spec: ScheduleSpec, *, num_ranks: int, num_micro_batches: int, num_chunks: int | None = None, **options: Any
) -> Plan:
    """The proven plan of one training step: the schedule's actions with derived communication.

    ``num_ranks``: size of the pipeline axis. ``num_chunks``: model chunks per rank, by default the fewest that the
    schedule takes. ``options``: the schedule's own (``group_size``, ``table``); None counts as not given.

    Raises:
        ScheduleError: the schedule is wrong (rank, position, action and reason are named).
        ValueError: the schedule does not accept these numbers (the nearest that it does are named).
    """
    spec = spec.with_options(**options)
    chunks = spec.min_chunks if num_chunks is None else num_chunks
    compute = spec.actions(num_ranks, num_micro_batches, chunks)
    plan = with_communication(compute, num_micro_batches=num_micro_batches, flow=spec.flow(num_ranks, chunks))
    verify(plan)
    return plan


def compile_forward(
    spec: ScheduleSpec, *, num_ranks: int, num_micro_batches: int, num_chunks: int | None = None
) -> Plan:
    """The proven forward-only plan of one evaluation batch, with the stages where ``spec`` puts them.

    Any number of micro-batches works, also where the schedule's training plan needs more.

    Raises:
        ValueError: fewer than one rank or micro-batch, or chunks that the schedule does not take.
    """
    if num_ranks < 1 or num_micro_batches < 1:
        raise ValueError(
            f"a pipeline needs ranks and micro-batches, got {num_ranks} ranks and {num_micro_batches} micro-batches"
        )
    chunks = spec.min_chunks if num_chunks is None else num_chunks
    compute = forward_plan(num_ranks, num_micro_batches, num_chunks=chunks)
    flow = spec.flow(num_ranks, chunks)
    plan = with_communication(compute, num_micro_batches=num_micro_batches, flow=flow, backward=False)
    verify(plan)
    return plan
