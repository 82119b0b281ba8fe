"""Schedules side by side: what each costs on one case, and why it cannot run it. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from mcore_parallel.pipeline.actions import Plan
from mcore_parallel.pipeline.compile import compile_schedule
from mcore_parallel.pipeline.simulate import Costs, Timeline, simulate
from mcore_parallel.specs import ScheduleSpec


@dataclass(frozen=True)
class Case:
    """What schedules are asked to run.

    ``times``: forward, input gradient and weight gradient of one micro-batch through all layers of a rank; a chunk
    takes its share. So schedules with different numbers of chunks do the same work.
    ``num_chunks``: None for two, or what a schedule takes.
    """

    num_ranks: int
    num_micro_batches: int
    num_chunks: int | None = None
    group_size: int | None = None
    times: tuple[float, float, float] = (1.0, 1.0, 1.0)
    latency: float = 0.0

    def chunks_of(self, spec: ScheduleSpec) -> int:
        """The chunks that ``spec`` runs with."""
        if self.num_chunks is not None:
            return self.num_chunks
        return max(spec.min_chunks, 2 if spec.max_chunks is None else min(2, spec.max_chunks))

    def plan(self, spec: ScheduleSpec) -> Plan:
        """The proven plan.

        Raises:
            ValueError: the schedule cannot run this case.
        """
        return compile_schedule(
            spec,
            num_ranks=self.num_ranks,
            num_micro_batches=self.num_micro_batches,
            num_chunks=self.chunks_of(spec),
            group_size=self.group_size,
        )

    def timeline(self, spec: ScheduleSpec) -> Timeline:
        """The simulated step.

        Raises:
            ValueError: the schedule cannot run this case.
        """
        share = 1 / self.chunks_of(spec)
        forward, input_grad, weight_grad = (time * share for time in self.times)
        costs = Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad, latency=self.latency)
        return simulate(self.plan(spec), costs)


@dataclass(frozen=True)
class Row:
    """One schedule on one case.

    ``live``, ``deferred`` and ``held`` (both together): the most on any rank, as a number of micro-batches through all
    layers of a rank.
    """

    name: str
    num_chunks: int
    makespan: float
    bubble_makespan: float
    bubble_span: float
    live: float
    deferred: float
    held: float


def compare(specs: Iterable[ScheduleSpec], case: Case) -> tuple[list[Row], dict[str, str]]:
    """The schedules that can run ``case``, fastest first, and why the others cannot, by name."""
    rows, refused = [], {}
    for spec in specs:
        if spec.configure is not None:
            continue  # it is no schedule before it is configured
        own = _for(spec, case)
        bound = spec.with_options(group_size=own.group_size)
        reason = bound.why_illegal(own.num_ranks, own.num_micro_batches, own.chunks_of(spec))
        if reason is None:
            rows.append(_row(spec, own))
        else:
            refused[spec.name] = reason
    return sorted(rows, key=lambda row: (row.makespan, row.held, row.name)), refused


def _for(spec: ScheduleSpec, case: Case) -> Case:
    """``case`` for ``spec``: one chunk if it takes no more, and a group size if it has groups."""
    has_groups = "group_size" in spec.options
    return replace(
        case,
        num_chunks=1 if spec.max_chunks == 1 else case.num_chunks,
        group_size=case.group_size if has_groups else None,
    )


def _row(spec: ScheduleSpec, case: Case) -> Row:
    timeline, chunks = case.timeline(spec), case.chunks_of(spec)
    return Row(
        name=spec.name,
        num_chunks=chunks,
        makespan=timeline.makespan,
        bubble_makespan=timeline.bubble_makespan,
        bubble_span=timeline.bubble_span,
        live=max(timeline.peak_live) / chunks,
        deferred=max(timeline.peak_deferred) / chunks,
        held=max(timeline.peak_held) / chunks,
    )
