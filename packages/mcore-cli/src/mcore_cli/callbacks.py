"""What watches a run: metrics file, terminal, TensorBoard. Callbacks are called on rank 0 only, between steps."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import IO, Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mcore_cli.results import EvalResult, RunInfo, SaveResult, StepResult


class Callback(Protocol):
    """What the trainer calls. Every method may do nothing; none may change the run."""

    def on_start(self, run: RunInfo) -> None:
        """Before the first step."""

    def on_step(self, result: StepResult) -> None:
        """After every optimizer step."""

    def on_eval(self, result: EvalResult) -> None:
        """After every evaluation."""

    def on_save(self, result: SaveResult) -> None:
        """After a checkpoint was committed."""

    def on_notice(self, text: str) -> None:
        """Something the user should know, in one line."""

    def on_end(self, reason: str) -> None:
        """After the last step, with why it was the last; not when the run failed."""

    def close(self) -> None:
        """At the very end, also of a run that failed: let go of files and terminals."""


class MetricsFile:
    """Appends one JSON line per step, evaluation and save to ``metrics.jsonl`` in the run's folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "metrics.jsonl"
        self._file: IO[str] | None = None

    def on_start(self, run: RunInfo) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a", encoding="utf-8", buffering=1)
        self._write({"kind": "start", "time": time.time(), **_plain(run)})

    def on_step(self, result: StepResult) -> None:
        self._write(result.as_record())

    def on_eval(self, result: EvalResult) -> None:
        self._write(result.as_record())

    def on_save(self, result: SaveResult) -> None:
        self._write(result.as_record())

    def on_notice(self, text: str) -> None:
        self._write({"kind": "notice", "text": text})

    def on_end(self, reason: str) -> None:
        self._write({"kind": "end", "reason": reason, "time": time.time()})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")


def _plain(run: RunInfo) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(run).items()}


class _Averages:
    """Means over the steps since the last line, so that a line shows the interval and not one step."""

    def __init__(self) -> None:
        self.results: list[StepResult] = []

    def add(self, result: StepResult) -> None:
        self.results.append(result)

    def line(self, train_iters: int) -> str:
        last, count = self.results[-1], len(self.results)
        tokens = sum(r.valid_tokens for r in self.results)
        loss = sum(r.loss * r.valid_tokens for r in self.results) / max(tokens, 1)
        seconds = sum(r.seconds for r in self.results)
        speed = sum(r.tokens_per_second * r.seconds for r in self.results) / seconds
        share = sum(r.mfu * r.seconds for r in self.results) / seconds
        tflops = sum(r.tflops_per_rank * r.seconds for r in self.results) / seconds
        per_rank = speed * last.tokens_per_second_per_rank / last.tokens_per_second
        left = _clock(seconds / count * (train_iters - last.iteration))
        self.results.clear()
        return (
            f"iteration {last.iteration}/{train_iters} | loss {loss:.4f} | lr {last.lr:.3e} | "
            f"grad norm {last.grad_norm:.3f} | {1000 * seconds / count:.0f} ms | {speed:,.0f} tok/s | "
            f"{per_rank:,.0f} tok/s/rank | {tflops:.3f} TFLOP/s/rank | MFU {100 * share:.1f}% | "
            f"{last.memory_gib:.2f} GiB | ETA {left}"
        )


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _headline(run: RunInfo) -> str:
    resumed = f", from iteration {run.first_iteration}" if run.first_iteration else ""
    return (
        f"{run.name}: {run.num_parameters:,} parameters on {run.world_size} rank(s) [{run.layout}], "
        f"{run.global_batch_size} x {run.seq_length} tokens a step, {run.train_iters} steps{resumed}; "
        f"peak {run.peak}; folder {run.folder}"
    )


class PlainLines:
    """One line per log interval on standard output, for files and pipes."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stdout
        self._averages = _Averages()
        self._run: RunInfo | None = None

    def on_start(self, run: RunInfo) -> None:
        self._run = run
        self._print(_headline(run))

    def on_step(self, result: StepResult) -> None:
        assert self._run is not None
        self._averages.add(result)
        if result.iteration % self._run.log_interval == 0 or result.iteration == self._run.train_iters:
            self._print(self._averages.line(self._run.train_iters))

    def on_eval(self, result: EvalResult) -> None:
        self._print(
            f"evaluation at {result.iteration} | loss {result.loss:.4f} | perplexity {result.perplexity:.2f} | "
            f"{result.valid_tokens:,} tokens | {result.seconds:.1f} s"
        )

    def on_save(self, result: SaveResult) -> None:
        self._print(f"saved {result.path} in {result.seconds:.1f} s")

    def on_notice(self, text: str) -> None:
        self._print(f"note: {text}")

    def on_end(self, reason: str) -> None:
        self._print(f"done: {reason}")
        if self._run is not None:
            self._print(f"next: mcore generate --load {self._run.folder} --prompt TEXT, or mcore eval --load the same")

    def close(self) -> None:
        """Standard output stays open."""

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class LiveProgress(PlainLines):
    """The same lines above a progress bar with the time left, on a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self._console = console or Console()
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )

    def on_start(self, run: RunInfo) -> None:
        self._progress.start()
        self._task = self._progress.add_task(
            run.name, total=run.train_iters, completed=run.first_iteration, loss="loss -"
        )
        super().on_start(run)

    def on_step(self, result: StepResult) -> None:
        self._progress.update(self._task, completed=result.iteration, loss=f"loss {result.loss:.4f}")
        super().on_step(result)

    def close(self) -> None:
        self._progress.stop()

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class TensorBoard:
    """Scalars of every step and evaluation as TensorBoard events."""

    def __init__(self, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter  # loads TensorBoard, so only when asked for

        self._writer = SummaryWriter(folder)

    def on_start(self, run: RunInfo) -> None:
        self._writer.add_text("run", _headline(run), run.first_iteration)

    def on_step(self, result: StepResult) -> None:
        for name, value in result.as_record().items():
            if isinstance(value, float):
                self._scalar(f"train/{name}", value, result.iteration)

    def on_eval(self, result: EvalResult) -> None:
        self._scalar("validation/loss", result.loss, result.iteration)
        self._scalar("validation/perplexity", result.perplexity, result.iteration)

    def on_save(self, result: SaveResult) -> None:
        self._scalar("checkpoint/seconds", result.seconds, result.iteration)

    def on_notice(self, text: str) -> None:
        """Notices are for people; the terminal has them."""

    def on_end(self, reason: str) -> None:
        """The reason is for people; the terminal has it."""

    def close(self) -> None:
        self._writer.close()

    def _scalar(self, name: str, value: float, iteration: int) -> None:
        self._writer.add_scalar(name, value, iteration)


def builtin_callbacks(run: RunInfo) -> list[Callback]:
    """The callbacks of every run: metrics file, terminal (live or plain lines), TensorBoard when asked for."""
    live = sys.stdout.isatty()
    callbacks: list[Callback] = [MetricsFile(run.folder), LiveProgress() if live else PlainLines()]
    if run.tensorboard_dir is not None:
        callbacks.append(TensorBoard(run.tensorboard_dir))
    return callbacks
