"""From a registered schedule to a proven plan, for training and for evaluation. No torch."""

from __future__ import annotations

from mcore_parallel.pipeline.actions import Plan, forward_plan, looped_flow
from mcore_parallel.pipeline.communication import with_communication
from mcore_parallel.pipeline.verify import verify
from mcore_parallel.specs import ScheduleSpec


def compile_schedule(spec: ScheduleSpec, *, num_stages: int, num_micro_batches: int) -> Plan:
    """The proven plan of one training step: the schedule's actions with derived communication.

    ``num_stages``: ranks along the pipeline axis; each holds ``spec.num_chunks`` chunks, dealt round the ranks.

    Raises:
        ScheduleError: the schedule is wrong (rank, position, action and reason are named).
        ValueError: the schedule does not accept these numbers.
    """
    compute = spec.plan(num_stages, num_micro_batches)
    flow = looped_flow(num_stages, spec.num_chunks)
    plan = with_communication(compute, num_micro_batches=num_micro_batches, flow=flow)
    verify(plan)
    return plan


def compile_forward(spec: ScheduleSpec, *, num_stages: int, num_micro_batches: int) -> Plan:
    """The proven forward-only plan of one evaluation batch, with the stages where ``spec`` puts them.

    Raises:
        ValueError: fewer than one stage or micro-batch.
    """
    if num_stages < 1 or num_micro_batches < 1:
        raise ValueError(
            f"a pipeline needs stages and micro-batches, got {num_stages} stages and {num_micro_batches} micro-batches"
        )
    compute = forward_plan(num_stages, num_micro_batches, num_chunks=spec.num_chunks)
    flow = looped_flow(num_stages, spec.num_chunks)
    plan = with_communication(compute, num_micro_batches=num_micro_batches, flow=flow, backward=False)
    verify(plan)
    return plan
