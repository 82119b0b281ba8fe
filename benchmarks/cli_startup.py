"""What ``mcore --help`` costs, against importing pydantic and click alone. Target: at most 1.5 times.

Both are fresh processes of this Python, taken in turns so that a busy machine slows both; processor time is compared
as well as wall time, because it does not depend on what else runs.

    python benchmarks/cli_startup.py [REPEATS]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field

if sys.platform != "win32":
    import resource

BASELINE = "import pydantic, click"
HELP = "from mcore_cli.main import main; main(['--help'])"
TARGET = 1.5


@dataclass
class Timings:
    """Seconds of each run."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    def run(self, code: str) -> None:
        """Run ``code`` once in a process of its own."""
        before, start = children_seconds(), time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
        self.wall.append(time.perf_counter() - start)
        self.processor.append(children_seconds() - before)


def children_seconds() -> float:
    """Processor seconds of all child processes so far; 0 where the system does not say."""
    if sys.platform == "win32":
        return 0.0
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Measure and print both, and their ratios."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    baseline, command = Timings(), Timings()
    for timings, code in ((baseline, BASELINE), (command, HELP)):
        timings.run(code)  # writes the bytecode
        timings.wall.clear()
        timings.processor.clear()
    for _ in range(repeats):
        baseline.run(BASELINE)
        command.run(HELP)
    for name in ("wall", "processor"):
        ours, theirs = statistics.median(getattr(command, name)), statistics.median(getattr(baseline, name))
        if theirs:
            print(
                f"{name:>9}: mcore --help {1000 * ours:.0f} ms, pydantic and click {1000 * theirs:.0f} ms, "
                f"ratio {ours / theirs:.2f} (target at most {TARGET})"
            )


if __name__ == "__main__":
    main()
