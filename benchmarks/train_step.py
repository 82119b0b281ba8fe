"""One training step of mcore on one rank beside a hand-written PyTorch loop and Hugging Face transformers.

All contenders live in one process, start from the same weights, see the same tokens, and take turns; the ratio of two
contenders is the median over rounds of the ratio within a round, so a slow moment of the machine hits both. Their
losses must agree step by step: a contender that computes something else is not compared, it is an error.

    python benchmarks/train_step.py --rounds 5
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import torch

from contenders.workload import TINY, Contender, Workload, batches, weights

NAMES = ("mcore", "plain", "hf", "gemm")
LIMIT = "gemm"
AGREEMENT = 2e-4  # relative, fp32 losses of the same step
DISTURBED = 0.2  # cores that other processes used, above which a figure deserves a second run


@dataclass
class Record:
    """What one contender did: seconds and losses by round, cores used by other processes meanwhile."""

    name: str
    first_call: float
    seconds: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median seconds per step."""
        return statistics.median(self.seconds)


def machine_cpu_seconds() -> float:
    """CPU seconds that all processes have used since boot."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def own_cpu_seconds() -> float:
    """CPU seconds that this process has used."""
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)


def timed_step(contender: Contender, tokens: torch.Tensor, record: Record) -> None:
    """Run one step and note its time, loss and the load beside it."""
    everybody, own = machine_cpu_seconds(), own_cpu_seconds()
    began = time.perf_counter()
    loss = contender.step(tokens)
    seconds = time.perf_counter() - began
    foreign = (machine_cpu_seconds() - everybody) - (own_cpu_seconds() - own)
    record.seconds.append(seconds)
    record.losses.append(loss)
    record.others.append(max(0.0, foreign / seconds))


def run(work: Workload, names: list[str], rounds: int) -> dict[str, Record]:
    """Build all contenders, warm each up with one step, then let them take turns; each round starts with another."""
    start = weights(work)
    data = batches(work, rounds + 1)
    contenders, records = {}, {}
    for name in names:
        contender = importlib.import_module(f"contenders.{name}").build(work, start)
        began = time.perf_counter()
        loss = contender.step(data[0])
        contenders[name] = contender
        records[name] = Record(contender.name, time.perf_counter() - began, losses=[loss])
    for index in range(rounds):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            timed_step(contenders[name], data[index + 1], records[name])
    return records


def disagreement(records: dict[str, Record]) -> float:
    """Largest relative difference between the losses of two contenders in the same step."""
    curves = [[loss for loss in record.losses if loss is not None] for record in records.values()]
    steps = list(zip(*[curve for curve in curves if curve], strict=True))
    if any(math.isnan(loss) for losses in steps for loss in losses):
        return math.nan
    return max((max(losses) / min(losses) - 1 for losses in steps), default=0.0)


def paired_ratio(slower: Record, faster: Record) -> float:
    """How many times faster ``faster`` is: median over rounds of the ratio of times within a round."""
    return statistics.median(a / b for a, b in zip(slower.seconds, faster.seconds, strict=True))


def report(records: dict[str, Record], work: Workload) -> list[str]:
    """The table, one line per contender."""
    width = max(len(record.name) for record in records.values())
    lines = [f"{'contender':{width}s}  step s   tok/s  GFLOP/s  of limit  x plain     x hf  others"]
    for record in records.values():
        limit = f"{1 / paired_ratio(record, records[LIMIT]):8.1%}" if LIMIT in records else f"{'-':>8s}"
        ratios = [
            f"{paired_ratio(records[other], record):7.3f}" if other in records else f"{'-':>7s}"
            for other in ("plain", "hf")
        ]
        lines.append(
            f"{record.name:{width}s}  {record.median:6.3f}  {work.tokens / record.median:6.1f}"
            f"  {work.gemm_flops / record.median / 1e9:7.1f}  {limit}  {'  '.join(ratios)}"
            f"  {statistics.median(record.others):6.2f}"
        )
    return lines


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each contender (default 5)")
    parser.add_argument("--contenders", default=",".join(NAMES), help=f"comma-separated (default {','.join(NAMES)})")
    parser.add_argument("--threads", type=int, help="threads of torch (default: torch's choice)")
    parser.add_argument("--tiny", action="store_true", help="a toy shape: shows that it runs, says nothing about speed")
    parser.add_argument("--json", type=Path, help="also write the raw times here")
    options = parser.parse_args(arguments)
    options.contenders = [name.strip() for name in options.contenders.split(",")]
    unknown = [name for name in options.contenders if name not in NAMES]
    if unknown:
        parser.error(f"unknown contenders {', '.join(unknown)} (known: {', '.join(NAMES)})")
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1 is needed for a median")
    return options


def main(arguments: list[str]) -> int:
    """Run, print, and fail if the contenders did not compute the same thing."""
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    work = TINY if options.tiny else Workload()
    parameters = sum(weight.numel() for weight in weights(work).values())
    print(
        f"{parameters / 1e6:.1f} M parameters, {work.tokens} tokens a step, "
        f"{work.gemm_flops / 1e9:.1f} GFLOP in weight GEMMs, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    records = run(work, options.contenders, options.rounds)
    print("\n".join(report(records, work)))
    difference = disagreement(records)
    print(f"losses agree within {difference:.1e} (limit {AGREEMENT:.0e}) over {options.rounds + 1} steps")
    if options.json:
        raw = {"workload": asdict(work), "records": {name: asdict(record) for name, record in records.items()}}
        options.json.write_text(json.dumps(raw, indent=1))
    if max(statistics.median(record.others) for record in records.values()) > DISTURBED:
        print("other processes were busy meanwhile (column 'others', in cores): trust ratios more than times")
    if not difference <= AGREEMENT:
        print("error: the contenders computed different losses, so their times are not comparable", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
