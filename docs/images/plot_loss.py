"""Draw the loss of a run from its metrics.jsonl: ``python docs/images/plot_loss.py runs/quickstart/metrics.jsonl``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

COLOURS = ("#2563eb", "#dc2626", "#059669", "#7c3aed")


def read(path: Path, key: str) -> tuple[list[int], list[float]]:
    """Iterations and values of ``key`` in the lines of kind ``step``; a step that was run again counts as it was last.

    Raises:
        ValueError: no step has the key.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    steps = {line["iteration"]: line for line in lines if line.get("kind") == "step" and line.get(key) is not None}
    points = [(int(iteration), float(steps[iteration][key])) for iteration in sorted(steps)]
    if not points:
        raise ValueError(f"{path} has no step with {key!r}")
    iterations, values = zip(*points, strict=True)
    return list(iterations), list(values)


def draw(runs: dict[str, tuple[list[int], list[float]]], *, key: str, output: Path) -> None:
    """One line per run over its iterations."""
    figure, axes = plt.subplots(figsize=(8, 3.6), dpi=120, layout="constrained")
    for (name, (iterations, values)), colour in zip(runs.items(), COLOURS * len(runs), strict=False):
        axes.plot(iterations, values, color=colour, linewidth=1.6, label=name)
        axes.annotate(f"{values[-1]:.2f}", (iterations[-1], values[-1]), textcoords="offset points", xytext=(4, 4))
    axes.set_xlabel("step")
    axes.set_ylabel(key)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(output)
    plt.close(figure)


def main() -> None:
    """Read the runs named on the command line and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("metrics", type=Path, nargs="+", help="metrics.jsonl of one or more runs")
    parser.add_argument("--key", default="loss", help="which number of each line to draw (default: loss)")
    parser.add_argument("--label", action="append", help="name of a run, once per file; default its folder")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("quickstart-loss.png"))
    arguments = parser.parse_args()
    labels = arguments.label or [path.resolve().parent.name for path in arguments.metrics]
    if len(labels) != len(arguments.metrics):
        parser.error(f"{len(arguments.metrics)} files but {len(labels)} labels")
    runs = {label: read(path, arguments.key) for label, path in zip(labels, arguments.metrics, strict=True)}
    draw(runs, key=arguments.key, output=arguments.output)
    print(arguments.output)


if __name__ == "__main__":
    main()
