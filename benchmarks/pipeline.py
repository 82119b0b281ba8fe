"""The real pipeline executor beside the simulator, for every schedule: ranks over gloo whose stages sleep.

A stage sleeps its pass times instead of computing, so that two cores carry any number of ranks and what is left is what
the executor adds: its own work, the messages, and waits that the simulator does not know of. Stages of schedules with v
chunks per rank sleep 1/v of the time, so all schedules do the same work.

    python benchmarks/pipeline.py                          # all schedules at pp 4, 8 micro-batches, f = i = w
    python benchmarks/pipeline.py --times 1,1.2,0.8 --schedules zbv,1f1b
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_parallel.axis import build_layout
from mcore_parallel.mesh import build_mesh
from mcore_parallel.pipeline.actions import Plan
from mcore_parallel.pipeline.compile import compile_schedule
from mcore_parallel.pipeline.executor import PipelineResult, run
from mcore_parallel.pipeline.p2p import connect
from mcore_parallel.pipeline.simulate import Costs, Timeline, simulate
from mcore_parallel.plugins import Registry, plugin_manager
from mcore_parallel.specs import ScheduleSpec
from mcore_parallel.testing.ranks import run_ranks
from mcore_parallel.weight_grad import WeightGradQueue

SHAPE = (8, 1, 16)


class _Pause:
    """A weight gradient that takes its time."""

    num_bytes = 0

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def start(self) -> None:
        """Nothing to communicate."""

    def finish(self) -> None:
        time.sleep(self.seconds)


class _Sleep(torch.autograd.Function):
    """Sleeps in forward and backward as a stage would compute, ``times`` = (forward, input gradient, weight gradient).

    Tensors ``[s, b, h]`` pass unchanged.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: tuple[float, float, float], queue: WeightGradQueue) -> Tensor:
        ctx.times, ctx.queue = times, queue
        time.sleep(times[0])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        _, input_grad, weight_grad = ctx.times
        if ctx.queue.is_deferring:
            ctx.queue.put(_Pause(weight_grad))
            time.sleep(input_grad)
        else:
            time.sleep(input_grad + weight_grad)
        return grad, None, None


@dataclass(frozen=True)
class SleepingStage:
    """One rank of ``plan``: every chunk sleeps ``times``."""

    plan: Plan
    rank: int
    times: tuple[float, float, float]
    queue: WeightGradQueue
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")

    def receive_shape(self, micro_batch: int) -> tuple[int, ...]:
        """``[s, b, h]``, the same for all micro-batches."""
        return SHAPE

    def forward(self, micro_batch: int, chunk: int, received: Tensor | None) -> Tensor:
        """``[s, b, h]``, or the loss on the last stage."""
        x = torch.zeros(SHAPE, requires_grad=True) if received is None else received
        out: Tensor = _Sleep.apply(x, self.times, self.queue)
        return out if self.plan.flow.downstream(self.rank, chunk) is not None else out.sum()


@dataclass(frozen=True)
class Measured:
    """``seconds`` of each round, first start to last end over all ranks; per rank, peaks as the executor counted."""

    seconds: list[float]
    peak_live: tuple[int, ...]
    peak_deferred: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One schedule: simulated and measured."""

    name: str
    simulated: Timeline
    measured: Measured

    @property
    def seconds(self) -> float:
        """The fastest step: whatever disturbs a stage that sleeps only ever adds."""
        return min(self.measured.seconds)

    @property
    def ratio(self) -> float:
        """Measured over simulated step time."""
        return self.seconds / self.simulated.makespan


def play(
    rank: int, world_size: int, plan: Plan, times: tuple[float, float, float], rounds: int
) -> list[tuple[float, float, PipelineResult]]:
    """Start, end and result of each round on this rank (one process each; the clock is the machine's)."""
    layout = build_layout(build_mesh(world_size, pp=world_size), rank)
    connect(layout, device=torch.device("cpu"))
    found = []
    for _ in range(rounds):
        queue = WeightGradQueue()
        stage = SleepingStage(plan, rank, times, queue)
        if world_size > 1:
            dist.barrier()
        began = time.monotonic()
        result = run(plan.for_rank(rank), stage=stage, axis=layout.axis("pp"), weight_grads=queue)
        found.append((began, time.monotonic(), result))
    return found


def measure(plan: Plan, times: tuple[float, float, float], *, rounds: int) -> Measured:
    """Run ``plan`` on real ranks, one round more than ``rounds`` to warm up."""
    ranks = run_ranks(play, plan.flow.num_ranks, plan, times, rounds + 1, limit=300, fresh=True)
    seconds = [
        max(end for _, end, _ in one_round) - min(began for began, _, _ in one_round)
        for one_round in zip(*ranks, strict=True)
    ]
    results = [found[-1][2] for found in ranks]
    live, deferred = tuple(r.peak_live for r in results), tuple(r.peak_deferred for r in results)
    return Measured(seconds[1:], live, deferred)


def compare(
    spec: ScheduleSpec, *, pp: int, micro_batches: int, vpp: int, times: Sequence[float], rounds: int
) -> Row | str:
    """Simulate and run one schedule; a text where it cannot run these sizes. ``times`` in seconds, of a whole rank."""
    chunks = spec.min_chunks if spec.max_chunks == spec.min_chunks else vpp
    reason = spec.why_illegal(pp, micro_batches, chunks)
    if reason is not None:
        return reason
    plan = compile_schedule(spec, num_ranks=pp, num_micro_batches=micro_batches, num_chunks=chunks)
    forward, input_grad, weight_grad = (seconds / chunks for seconds in times)
    simulated = simulate(plan, Costs(forward, input_grad, weight_grad))
    name = f"{spec.name} (v={chunks})" if chunks > 1 else spec.name
    return Row(name, simulated, measure(plan, (forward, input_grad, weight_grad), rounds=rounds))


def report(rows: Sequence[Row], unit: float) -> str:
    """The table, fastest schedule first, in units of time."""
    lines = [f"{'schedule':<20}{'simulated':>10}{'executor':>10}{'ratio':>8}{'bubble':>8}   live (deferred) per rank"]
    for row in sorted(rows, key=lambda row: row.seconds):
        held = ", ".join(
            f"{live} ({deferred})" if deferred else str(live)
            for live, deferred in zip(row.measured.peak_live, row.measured.peak_deferred, strict=True)
        )
        lines.append(
            f"{row.name:<20}{row.simulated.makespan / unit:>10.2f}{row.seconds / unit:>10.2f}{row.ratio:>8.3f}"
            f"{row.simulated.bubble_makespan:>8.1%}   {held}"
        )
    return "\n".join(lines)


def miscounts(rows: Sequence[Row]) -> list[str]:
    """Rows whose peaks at run time are not the simulator's."""
    return [
        f"{row.name}: {row.measured.peak_live} live, {row.measured.peak_deferred} deferred at run time; the simulator "
        f"says {row.simulated.peak_live} and {row.simulated.peak_deferred}"
        for row in rows
        if (row.measured.peak_live, row.measured.peak_deferred)
        != (row.simulated.peak_live, row.simulated.peak_deferred)
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=4, help="pipeline ranks [4]")
    parser.add_argument("--micro-batches", type=int, default=8, help="micro-batches of a step [8]")
    parser.add_argument("--vpp", type=int, default=2, help="chunks per rank where the schedule leaves it open [2]")
    parser.add_argument("--times", default="1,1,1", help="forward, input gradient, weight gradient [1,1,1]")
    parser.add_argument("--unit-ms", type=float, default=60.0, help="milliseconds of one unit of --times [60]")
    parser.add_argument("--rounds", type=int, default=3, help="measured steps of each schedule; the fastest counts [3]")
    parser.add_argument("--schedules", default=None, help="names, comma separated [all that run from sizes alone]")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; 1 if a schedule holds other than the simulator says."""
    options = parse(arguments)
    unit = options.unit_ms / 1000
    times = [float(part) * unit for part in options.times.split(",")]
    registry = Registry("pipeline schedule", plugin_manager().collect("mcore_pipeline_schedules"))
    specs = [registry[name] for name in options.schedules.split(",")] if options.schedules else list(registry)
    rows: list[Row] = []
    for spec in specs:
        row = compare(
            spec,
            pp=options.pp,
            micro_batches=options.micro_batches,
            vpp=1 if spec.name == "table" else options.vpp if spec.max_chunks is None else spec.min_chunks,
            times=times,
            rounds=options.rounds,
        )
        if isinstance(row, str):
            print(f"left out: {row}")
        else:
            rows.append(row)
    print(f"pp {options.pp}, {options.micro_batches} micro-batches, times {options.times}, unit {options.unit_ms:g} ms")
    print(report(rows, unit))
    wrong = miscounts(rows)
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
