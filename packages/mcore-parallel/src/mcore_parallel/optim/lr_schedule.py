"""Learning rate and weight decay as pure functions of consumed samples. Nothing is stored but the schedule's own terms.

The formulas are Megatron's; ``consumed`` counts the samples before the step. WSD: Hu et al. (arXiv:2404.06395); its
``minus_sqrt`` annealing: Haegele et al. (arXiv:2405.18392). No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from mcore_parallel.config import OptimizerConfig


@dataclass(frozen=True)
class ScheduleState:
    """The terms of a run's schedules, lengths in samples: what a resumed run must share with its checkpoint.

    ``iteration_samples``: the global batch size when lengths were given in iterations, 1 when in samples.
    ``decay_follows_training`` / ``warmup_fraction``: how decay length and warm-up came about, if not given outright.
    """

    max_lr: float
    min_lr: float
    lr_decay_style: str
    lr_decay_samples: int
    lr_warmup_samples: float
    lr_warmup_init: float
    lr_wsd_decay_style: str
    lr_wsd_decay_samples: int | None
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_incr_style: str
    weight_decay_incr_samples: int
    iteration_samples: int
    decay_follows_training: bool
    warmup_fraction: float | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ScheduleState:
        """The inverse of :meth:`to_dict`.

        Raises:
            ValueError: unknown or missing fields.
        """
        known = {field.name for field in fields(cls)}
        wrong = [f"unknown {name}" for name in sorted(set(values) - known)]
        wrong += [f"missing {name}" for name in sorted(known - set(values))]
        if wrong:
            raise ValueError(f"stored schedule is not readable: {', '.join(wrong)}")
        return cls(**values)


def learning_rate(state: ScheduleState, consumed: int) -> float:
    """The learning rate of the step that begins after ``consumed`` samples."""
    if state.lr_warmup_samples > 0 and consumed <= state.lr_warmup_samples:
        ramp = (state.max_lr - state.lr_warmup_init) * consumed / state.lr_warmup_samples
        return state.lr_warmup_init + ramp
    if state.lr_decay_style == "constant":
        return state.max_lr
    if consumed > state.lr_decay_samples:
        return state.min_lr
    if state.lr_decay_style == "inverse-square-root":
        scale = math.sqrt(max(state.lr_warmup_samples, 1)) / math.sqrt(max(consumed, 1))
        return max(state.min_lr, state.max_lr * scale)
    return state.min_lr + _decay_share(state, consumed) * (state.max_lr - state.min_lr)


def _decay_share(state: ScheduleState, consumed: int) -> float:
    """How much of ``max_lr - min_lr`` is left between warm-up and the end of the decay."""
    if state.lr_decay_style == "WSD":
        assert state.lr_wsd_decay_samples is not None
        into = consumed - (state.lr_decay_samples - state.lr_wsd_decay_samples)
        if into <= 0:
            return 1.0
        return _WSD_SHAPES[state.lr_wsd_decay_style](into / state.lr_wsd_decay_samples)
    progress = (consumed - state.lr_warmup_samples) / (state.lr_decay_samples - state.lr_warmup_samples)
    return _DECAY_SHAPES[state.lr_decay_style](progress)


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (math.cos(math.pi * progress) + 1.0)


def _exponential(progress: float) -> float:
    return 2.0 * 0.5**progress - 1.0


def _minus_sqrt(progress: float) -> float:
    return 1.0 - math.sqrt(progress)


_DECAY_SHAPES: Mapping[str, Callable[[float], float]] = {"linear": _linear, "cosine": _cosine}
_WSD_SHAPES: Mapping[str, Callable[[float], float]] = {
    "linear": _linear,
    "cosine": _cosine,
    "exponential": _exponential,
    "minus_sqrt": _minus_sqrt,
}


def weight_decay(state: ScheduleState, consumed: int) -> float:
    """The weight decay of the step that begins after ``consumed`` samples."""
    start, end = state.start_weight_decay, state.end_weight_decay
    if state.weight_decay_incr_style == "constant" or consumed > state.weight_decay_incr_samples:
        return end
    progress = consumed / state.weight_decay_incr_samples
    share = progress if state.weight_decay_incr_style == "linear" else _cosine(1.0 - progress)
    return start + share * (end - start)


def build_schedule(
    config: OptimizerConfig, *, train_iters: int | None, train_samples: int | None, global_batch_size: int
) -> ScheduleState:
    """The schedule of a run of ``train_iters`` iterations or ``train_samples`` samples.

    Raises:
        ValueError: every rule that the flags break, in one message.
    """
    if (train_iters is None) == (train_samples is None):
        raise ValueError(
            f"give exactly one of --train-iters and --train-samples (got {train_iters} and {train_samples})"
        )
    by_iteration = train_iters is not None
    unit = global_batch_size if by_iteration else 1
    length = train_iters if train_iters is not None else train_samples
    assert length is not None
    problems = _mixed_units(config, by_iteration)
    decay = config.lr_decay_iters if by_iteration else config.lr_decay_samples
    warmup = config.lr_warmup_iters if by_iteration else config.lr_warmup_samples
    wsd = config.lr_wsd_decay_iters if by_iteration else config.lr_wsd_decay_samples
    decay_samples = (decay if decay is not None else length) * unit
    fraction = config.lr_warmup_fraction
    start, end = _decay_ends(config, problems)
    state = ScheduleState(
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_decay_style=config.lr_decay_style,
        lr_decay_samples=decay_samples,
        lr_warmup_samples=fraction * decay_samples if fraction is not None else warmup * unit,
        lr_warmup_init=config.lr_warmup_init,
        lr_wsd_decay_style=config.lr_wsd_decay_style,
        lr_wsd_decay_samples=wsd * unit if wsd is not None else None,
        start_weight_decay=start,
        end_weight_decay=end,
        weight_decay_incr_style=config.weight_decay_incr_style,
        weight_decay_incr_samples=length * unit,
        iteration_samples=unit,
        decay_follows_training=decay is None,
        warmup_fraction=fraction,
    )
    problems += _broken_rules(state)
    if problems:
        raise ValueError("; ".join(problems))
    return state


def _mixed_units(config: OptimizerConfig, by_iteration: bool) -> list[str]:
    wrong, right = ("samples", "iters") if by_iteration else ("iters", "samples")
    problems = []
    for stem in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        value = getattr(config, f"{stem}_{wrong}")
        if value:
            flag = f"--{stem}_".replace("_", "-")
            problems.append(f"{flag}{wrong} {value} does not go with --train-{right}; give {flag}{right}")
    if config.lr_warmup_fraction is not None and (config.lr_warmup_iters or config.lr_warmup_samples):
        given = config.lr_warmup_iters or config.lr_warmup_samples
        problems.append(
            f"--lr-warmup-fraction {config.lr_warmup_fraction} and a warm-up length of {given} exclude each other; "
            "give one of them"
        )
    return problems


def _decay_ends(config: OptimizerConfig, problems: list[str]) -> tuple[float, float]:
    start, end = config.start_weight_decay, config.end_weight_decay
    if config.weight_decay_incr_style == "constant":
        if start is not None or end is not None:
            problems.append(
                f"--start-weight-decay {start} and --end-weight-decay {end} have no effect with "
                "--weight-decay-incr-style constant; use --weight-decay, or the style linear or cosine"
            )
        return config.weight_decay, config.weight_decay
    if start is None or end is None:
        problems.append(
            f"--weight-decay-incr-style {config.weight_decay_incr_style} needs both --start-weight-decay and "
            f"--end-weight-decay (got {start} and {end})"
        )
        return config.weight_decay, config.weight_decay
    if start > end:
        problems.append(f"--start-weight-decay {start} must not exceed --end-weight-decay {end}")
    return start, end


def _broken_rules(state: ScheduleState) -> list[str]:
    problems = []
    if state.min_lr > state.max_lr:
        problems.append(f"--min-lr {state.min_lr} must not exceed --lr {state.max_lr}")
    if state.lr_warmup_init > state.max_lr:
        problems.append(f"--lr-warmup-init {state.lr_warmup_init} must not exceed --lr {state.max_lr}")
    if state.lr_decay_samples < 1:
        problems.append(f"the learning-rate decay takes {state.lr_decay_samples} samples; it needs at least one")
    elif state.lr_warmup_samples >= state.lr_decay_samples:
        unit = state.iteration_samples
        problems.append(
            f"warm-up ({state.lr_warmup_samples / unit:g}) must be shorter than the whole decay "
            f"({state.lr_decay_samples / unit:g}), both in {'iterations' if unit > 1 else 'samples or iterations'}; "
            "lower the warm-up or train longer"
        )
    if state.lr_decay_style == "WSD":
        if state.lr_wsd_decay_samples is None:
            problems.append("--lr-decay-style WSD needs --lr-wsd-decay-iters (or --lr-wsd-decay-samples)")
        elif state.lr_wsd_decay_samples > state.lr_decay_samples - state.lr_warmup_samples:
            problems.append(
                f"the final annealing of WSD ({state.lr_wsd_decay_samples} samples) is longer than what follows the "
                f"warm-up ({state.lr_decay_samples - state.lr_warmup_samples:g} samples)"
            )
    elif state.lr_wsd_decay_samples is not None:
        problems.append(f"a WSD annealing length has no effect with --lr-decay-style {state.lr_decay_style}")
    return problems


def reconcile(
    config: ScheduleState, checkpoint: ScheduleState, *, override: bool = False, use_checkpoint: bool = False
) -> tuple[ScheduleState, str | None]:
    """The schedule of a resumed run, and a one-line notice when it is not the one of both.

    Without an escape only a decay horizon that follows from a changed training length may differ.

    Raises:
        ValueError: both escapes at once, or terms that differ (all of them are listed).
    """
    if override and use_checkpoint:
        raise ValueError(
            "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other; give one"
        )
    differing = [f.name for f in fields(ScheduleState) if getattr(config, f.name) != getattr(checkpoint, f.name)]
    if not differing:
        return config, None
    if override:
        return config, f"schedule from the flags, not the checkpoint's: {_differences(differing, config, checkpoint)}"
    if use_checkpoint:
        return checkpoint, f"schedule from the checkpoint, not the flags: {_differences(differing, config, checkpoint)}"
    refused = [name for name in differing if name not in _follow_training_length(config, checkpoint)]
    if refused:
        raise ValueError(
            f"the schedule differs from the checkpoint's: {_differences(refused, config, checkpoint)}; give "
            "--override-opt_param-scheduler to take the flags', or --use-checkpoint-opt_param-scheduler to keep the "
            "checkpoint's"
        )
    return config, _horizon_notice(config, checkpoint)


def _follow_training_length(config: ScheduleState, checkpoint: ScheduleState) -> set[str]:
    """Terms that may change because the training length did."""
    if config.iteration_samples != checkpoint.iteration_samples:
        return set()
    allowed = {"weight_decay_incr_samples"}
    if config.decay_follows_training and checkpoint.decay_follows_training:
        allowed.add("lr_decay_samples")
        if config.warmup_fraction is not None and config.warmup_fraction == checkpoint.warmup_fraction:
            allowed.add("lr_warmup_samples")
    return allowed


def _differences(names: list[str], config: ScheduleState, checkpoint: ScheduleState) -> str:
    return ", ".join(
        f"{name} is {getattr(config, name)} here and {getattr(checkpoint, name)} in the checkpoint" for name in names
    )


def _horizon_notice(config: ScheduleState, checkpoint: ScheduleState) -> str:
    unit, word = (config.iteration_samples, "iterations") if config.iteration_samples > 1 else (1, "samples")
    length = config.weight_decay_incr_samples
    if config.lr_decay_samples == checkpoint.lr_decay_samples:
        return (
            f"training length changed to {length // unit} {word}; the learning rate still decays over "
            f"{config.lr_decay_samples // unit} {word}"
        )
    return (
        f"training length changed: the learning rate now decays over {config.lr_decay_samples // unit} {word} "
        f"(the checkpoint: {checkpoint.lr_decay_samples // unit})"
    )
