"""The training loop: a generator of step results, and the run that drives it. Imports no click."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_ckpt.attempts import remove_all
from mcore_ckpt.errors import SaveFailed
from mcore_ckpt.find import find_latest, open_checkpoint
from mcore_ckpt.manifest import CheckpointInfo
from mcore_cli.build import (
    Data,
    Parts,
    build_data,
    build_parts,
    build_run_tokenizer,
    global_batch_size,
    train_iterations,
    with_vocabulary,
)
from mcore_cli.callbacks import Callback, builtin_callbacks
from mcore_cli.checkpointing import Position, checkpoint_folder, chosen_by_first, load_run, save_run
from mcore_cli.config import RunConfig
from mcore_cli.errors import RunFailed
from mcore_cli.evaluate import perplexity, validation_loss
from mcore_cli.metrics import Peak, find_peak, memory_gib, throughput
from mcore_cli.results import EvalResult, RunInfo, SaveResult, StepResult
from mcore_cli.step import Sums, backward_all, sum_over_ranks
from mcore_cli.stop import StopRequest
from mcore_cli.world import World, build_run_layout, join_world
from mcore_models.cost import flops_per_token, parameter_count
from mcore_parallel.optim.lr_schedule import ScheduleState, build_schedule, learning_rate, reconcile, weight_decay
from mcore_parallel.plugins import PluginManager, plugin_manager


@dataclass
class Trainer:
    """One run on one rank: its parts, its data, its schedule and how far it is.

    ``stopping`` becomes True on all ranks together when any of them wants to stop.
    """

    parts: Parts
    data: Data
    schedule: ScheduleState
    peak: Peak
    train_iters: int
    stop: StopRequest
    folder: Path
    position: Position = Position()
    stopping: bool = False
    saved_iteration: int = -1

    @property
    def config(self) -> RunConfig:
        """The whole tree."""
        return self.parts.config

    @property
    def batch_size(self) -> int:
        """Samples per step."""
        return global_batch_size(self.config, self.parts.layout.axis("dp").size)

    def steps(self) -> Iterator[StepResult]:
        """Train until the last iteration or until the ranks agree to stop, yielding after every optimizer step.

        Raises:
            RunFailed: a loss or gradient that is not finite; names step, ranks and parameters.
        """
        while self.position.iteration < self.train_iters and not self.stopping:
            yield self._step()

    def _step(self) -> StepResult:
        began = time.perf_counter()
        consumed = self.position.consumed_samples
        lr = learning_rate(self.schedule, consumed)
        optimizer = self.parts.optimizer
        optimizer.set_lr(lr)
        optimizer.set_weight_decay(weight_decay(self.schedule, consumed))
        batches = self.data.train.micro_batches(consumed)
        losses = backward_all(self.parts, batches, step=self.position.iteration)
        sums = self._sum(losses, batches)
        if not math.isfinite(sums.loss):
            self._fail(sums, optimizer.grad_norm() / max(sums.tokens, 1.0))
        stats = optimizer.step(sums.tokens, wait=False)
        if not stats.applied:
            self._fail(sums, stats.grad_norm)
        self.stopping = sums.stops > 0
        tokens = self.batch_size * self.config.data.seq_length
        done = self.position
        self.position = Position(done.iteration + 1, consumed + self.batch_size, done.consumed_tokens + tokens)
        return self._result(sums, lr=lr, grad_norm=stats.grad_norm, tokens=tokens, seconds=time.perf_counter() - began)

    def _sum(self, losses: Sequence[torch.Tensor], batches: Sequence[Any]) -> Sums:
        parts = self.parts
        return sum_over_ranks(parts.layout, losses, batches, device=parts.device, stop=self.stop.wanted())

    def _result(self, sums: Sums, *, lr: float, grad_norm: float, tokens: int, seconds: float) -> StepResult:
        flops = flops_per_token(
            self.config.model, seq_length=self.config.data.seq_length, vocab_size=self.config.model.vocab_size or 0
        )
        world = self.parts.layout.mesh.world_size
        speed = throughput(tokens=tokens, seconds=seconds, flops_per_token=flops, world_size=world, peak=self.peak)
        return StepResult(
            iteration=self.position.iteration,
            consumed_samples=self.position.consumed_samples,
            consumed_tokens=self.position.consumed_tokens,
            loss=sums.mean_loss,
            lr=lr,
            grad_norm=grad_norm,
            valid_tokens=int(sums.tokens),
            seconds=seconds,
            tokens_per_second=speed.tokens_per_second,
            tokens_per_second_per_rank=speed.tokens_per_second_per_rank,
            tflops_per_rank=speed.tflops_per_rank,
            mfu=speed.mfu,
            memory_gib=memory_gib(self.parts.device),
        )

    def _fail(self, sums: Sums, grad_norm: float) -> None:
        """Name whose gradient was not finite before any reduction; weights are untouched and nothing is saved."""
        names = self.parts.optimizer.local_non_finite()
        layout = self.parts.layout
        mine = (layout.rank, layout.mesh.coordinates(layout.rank), names)
        found: list[Any] = [mine]
        if dist.is_initialized():
            found = [None] * layout.mesh.world_size
            dist.all_gather_object(found, mine)
        guilty = [f"rank {rank} {where}: {', '.join(bad[:3])}" for rank, where, bad in found if bad]
        raise RunFailed(
            f"iteration {self.position.iteration + 1}: loss {sums.mean_loss}, gradient norm {grad_norm}; weights are "
            f"unchanged and nothing was saved. Not finite on {'; '.join(guilty) or 'no rank before the reduction'}"
        )

    def evaluate(self) -> EvalResult:
        """Mean loss over ``eval_iters`` global batches, always the same ones; leaves no mark on training."""
        assert self.data.valid is not None, "there is an evaluation interval"
        began = time.perf_counter()
        loss, tokens = validation_loss(self.parts, self.data.valid, num_batches=self.config.train.eval_iters)
        mean = loss / max(tokens, 1.0)
        return EvalResult(
            self.position.iteration,
            mean,
            perplexity=perplexity(mean),
            valid_tokens=int(tokens),
            seconds=time.perf_counter() - began,
        )

    def save(self) -> SaveResult:
        """Commit a checkpoint of the current iteration; collective."""
        began = time.perf_counter()
        try:
            path = save_run(
                self.parts,
                self.folder,
                position=self.position,
                schedule=self.schedule,
                data=data_identity(self.config, self.data),
            )
        except SaveFailed as error:
            raise RunFailed(str(error)) from error
        self.saved_iteration = self.position.iteration
        return SaveResult(self.position.iteration, path, time.perf_counter() - began)

    def exit_reason(self) -> str | None:
        """Why the run must leave after this iteration although it is not the last; None to go on."""
        every = self.config.train.exit_interval
        if self.stopping:
            return self.stop.reason or "another rank was told to stop"
        if every is not None and self.position.iteration % every == 0 and self.position.iteration < self.train_iters:
            return f"--exit-interval {every}"
        return None


def data_identity(config: RunConfig, data: Data) -> dict[str, Any]:
    """What must stay the same for a position in the data to mean the same."""
    identity = config.data.model_dump(
        mode="json", include={"dataset", "data_path", "split", "seq_length", "eod_mask_loss"}
    )
    return {**identity, "tokenizer": data.tokenizer.fingerprint, "num_train_samples": len(data.train.dataset)}


def run(config: RunConfig) -> None:
    """Train as ``config`` says, on this process's share of the world."""
    stop = StopRequest(config.train.exit_duration_in_mins)
    with join_world(config) as world, stop.on_signals():
        manager = plugin_manager()
        trainer, notices = start(config, world, manager=manager, stop=stop)
        callbacks = _callbacks(trainer, world, manager)
        try:
            for notice in notices:
                _tell(callbacks, "on_notice", notice)
            _tell(callbacks, "on_end", drive(trainer, callbacks))
        finally:
            trainer.data.close()
            for callback in callbacks:
                callback.close()


def start(config: RunConfig, world: World, *, manager: PluginManager, stop: StopRequest) -> tuple[Trainer, list[str]]:
    """Build a trainer and resume it if the configuration says so; also one-line notices for the user."""
    tokenizer = build_run_tokenizer(config, manager)
    config = with_vocabulary(config, tokenizer)
    layout = build_run_layout(config, world, manager=manager)
    parts = build_parts(config, layout, manager=manager, device=world.device)
    data = build_data(config, tokenizer, layout, manager=manager)
    dp = layout.axis("dp").size
    schedule = build_schedule(
        config.optimizer,
        train_iters=config.train.train_iters,
        train_samples=config.train.train_samples,
        global_batch_size=global_batch_size(config, dp),
    )
    peak = find_peak(world.device, config.train.peak_tflops)
    assert config.checkpoint.save is not None, "the tree is complete"
    folder = checkpoint_folder(config.checkpoint.save, manager)
    trainer = Trainer(parts, data, schedule, peak, train_iterations(config, dp), stop, folder)
    notices = _resume(trainer, chosen_by_first(lambda: checkpoint_to_load(config, manager)))
    if config.checkpoint.overwrite and world.is_first:
        clear_folder(folder)
    return trainer, notices


def clear_folder(folder: Path) -> None:
    """Remove the checkpoints and the metrics of an earlier run, and nothing else."""
    remove_all(folder)
    (folder / "metrics.jsonl").unlink(missing_ok=True)


def _resume(trainer: Trainer, info: CheckpointInfo | None) -> list[str]:
    """Load what ``--load`` or ``--auto-resume`` names, and check that the run goes on as it began."""
    wanted = trainer.config.checkpoint
    if info is None:
        return [f"--auto-resume: no checkpoint in {wanted.save}, starting fresh"] if wanted.auto_resume else []
    notices = [skipped.reason for skipped in info.skipped]
    resumed = load_run(trainer.parts, info)
    if wanted.finetune:
        return [*notices, f"weights from {info.path}, everything else fresh (--finetune)"]
    trainer.position = resumed.position
    options = trainer.config.optimizer
    trainer.schedule, notice = reconcile(
        trainer.schedule,
        resumed.schedule,
        override=options.override_opt_param_scheduler,
        use_checkpoint=options.use_checkpoint_opt_param_scheduler,
    )
    notices += [notice] if notice else []
    notices += _check_seed(trainer.config, resumed.seed)
    notices += _data_changes(data_identity(trainer.config, trainer.data), resumed.data)
    trainer.saved_iteration = resumed.position.iteration
    return [f"resumed from {info.path} at iteration {resumed.position.iteration}", *notices]


def checkpoint_to_load(config: RunConfig, manager: PluginManager) -> CheckpointInfo | None:
    """The checkpoint that the run continues from, None for a fresh start.

    Raises:
        CheckpointNotFound, IncompleteCheckpoint, FormatTooNew: ``--load`` names none that can be used.
    """
    wanted = config.checkpoint
    if wanted.load is not None:
        return open_checkpoint(checkpoint_folder(wanted.load, manager), wanted.ckpt_step)
    if wanted.auto_resume and wanted.save is not None:
        return find_latest(checkpoint_folder(wanted.save, manager))
    return None


def _check_seed(config: RunConfig, saved: int) -> list[str]:
    if config.train.seed == saved:
        return []
    if not config.checkpoint.no_load_rng:
        raise ValueError(
            f"--seed {config.train.seed} differs from the checkpoint's {saved}: dropout and sample order would change; "
            f"give --seed {saved}, or --no-load-rng to go on with the new one"
        )
    return [f"seed {config.train.seed} instead of the checkpoint's {saved} (--no-load-rng)"]


def _data_changes(now: dict[str, Any], saved: Any) -> list[str]:
    changed = [f"{name} {saved.get(name)} -> {value}" for name, value in now.items() if saved.get(name) != value]
    if not changed:
        return []
    return [f"the data is not the checkpoint's ({'; '.join(changed)}): samples after its position may repeat or differ"]


def drive(trainer: Trainer, callbacks: Sequence[Callback]) -> str:
    """Run the steps, evaluate and save when due, and tell the callbacks; returns why the run ended."""
    train, every = trainer.config.train, trainer.config.checkpoint.save_interval
    reason = f"all {trainer.train_iters} iterations are done"
    if trainer.position.iteration >= trainer.train_iters:
        reason = (
            f"nothing to do: iteration {trainer.position.iteration} is reached, --train-iters is {trainer.train_iters}"
        )
    for result in trainer.steps():
        _tell(callbacks, "on_step", result)
        early = trainer.exit_reason()
        if train.eval_interval is not None and result.iteration % train.eval_interval == 0 and not trainer.stopping:
            _tell(callbacks, "on_eval", trainer.evaluate())
        if every is not None and result.iteration % every == 0 and early is None:
            _tell(callbacks, "on_save", trainer.save())
        if early is not None:
            reason = f"{early}, at iteration {result.iteration}"
            break
    if trainer.saved_iteration != trainer.position.iteration:
        _tell(callbacks, "on_save", trainer.save())
    return reason


def _callbacks(trainer: Trainer, world: World, manager: PluginManager) -> list[Callback]:
    """Built-in and plugin callbacks on rank 0, none on other ranks; told that the run starts."""
    if not world.is_first:
        return []
    config = trainer.config
    info = RunInfo(
        name=config.train.name,
        folder=trainer.folder,
        world_size=world.size,
        layout=" ".join(f"{name}{size}" for name, size in reversed(trainer.parts.layout.mesh.sizes.items())),
        num_parameters=parameter_count(config.model, vocab_size=config.model.vocab_size or 0),
        train_iters=trainer.train_iters,
        first_iteration=trainer.position.iteration,
        global_batch_size=trainer.batch_size,
        seq_length=config.data.seq_length,
        peak=f"{trainer.peak.tflops:.3g} TFLOP/s per rank ({trainer.peak.source})",
        log_interval=config.train.log_interval,
        tensorboard_dir=config.train.tensorboard_dir,
    )
    built = [spec.build(config) for spec in manager.collect("mcore_callbacks")]
    callbacks = [*builtin_callbacks(info), *(callback for callback in built if callback is not None)]
    _tell(callbacks, "on_start", info)
    return callbacks


def _tell(callbacks: Sequence[Callback], event: str, value: Any) -> None:
    for callback in callbacks:
        getattr(callback, event)(value)
