"""Rules of learning rate and weight decay over the run. No torch."""

from __future__ import annotations

from mcore_cli.rules.engine import Context, Rule, Violation

ITERATION_FIELDS = ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")
SAMPLE_FIELDS = ("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")


def flag(field: str) -> str:
    """The flag of an optimizer field."""
    return "--" + field.replace("_", "-")


def rates_are_ordered(context: Context) -> Violation | None:
    """The rate decays from lr to min-lr, so min-lr cannot be larger."""
    optimizer = context.config.optimizer
    if optimizer.min_lr <= optimizer.lr:
        return None
    return Violation(
        "min-lr",
        f"--min-lr {optimizer.min_lr} with --lr {optimizer.lr}",
        "the minimum must not exceed the peak",
        "lower --min-lr or raise --lr",
        f"--min-lr {optimizer.lr}",
    )


def warmup_starts_below(context: Context) -> Violation | None:
    """Warm-up rises from lr-warmup-init to lr."""
    optimizer = context.config.optimizer
    if optimizer.lr_warmup_init <= optimizer.lr:
        return None
    return Violation(
        "warmup-init",
        f"--lr-warmup-init {optimizer.lr_warmup_init} with --lr {optimizer.lr}",
        "warm-up starts at or below the peak",
        "lower --lr-warmup-init",
        f"--lr-warmup-init {optimizer.lr}",
    )


def units_agree(context: Context) -> Violation | None:
    """The schedule counts in the unit of the run's length."""
    config = context.config
    by_samples = config.train.train_samples is not None
    if by_samples and config.train.train_iters is not None:
        return None  # reported as the length being given twice
    wrong = ITERATION_FIELDS if by_samples else SAMPLE_FIELDS
    given = [name for name in wrong if getattr(config.optimizer, name)]
    if not given:
        return None
    unit, length = ("samples", "--train-samples") if by_samples else ("iterations", "--train-iters")
    instead = ", ".join(flag(SAMPLE_FIELDS[ITERATION_FIELDS.index(n)] if by_samples else _iteration(n)) for n in given)
    return Violation(
        "schedule-units",
        ", ".join(f"{flag(name)} {getattr(config.optimizer, name)}" for name in given),
        f"the length is given in {unit} ({length}), so the schedule is too",
        f"use {instead}",
    )


def _iteration(name: str) -> str:
    return ITERATION_FIELDS[SAMPLE_FIELDS.index(name)]


def warmup_is_given_once(context: Context) -> Violation | None:
    """A fraction excludes a number of iterations or samples."""
    optimizer = context.config.optimizer
    given = [name for name in ("lr_warmup_iters", "lr_warmup_samples") if getattr(optimizer, name)]
    if optimizer.lr_warmup_fraction is None or not given:
        return None
    return Violation(
        "warmup-twice",
        f"--lr-warmup-fraction {optimizer.lr_warmup_fraction} with {flag(given[0])} {getattr(optimizer, given[0])}",
        "warm-up is a share or a number, not both",
        "drop one of them",
    )


def warmup_ends_first(context: Context) -> Violation | None:
    """Warm-up is shorter than warm-up and decay together."""
    optimizer, train = context.config.optimizer, context.config.train
    if train.train_samples is not None:
        name, warmup, decay = "samples", optimizer.lr_warmup_samples, optimizer.lr_decay_samples or train.train_samples
    elif train.train_iters is not None:
        name, warmup, decay = "iters", optimizer.lr_warmup_iters, optimizer.lr_decay_iters or train.train_iters
    else:
        return None
    if warmup == 0 or warmup < decay:
        return None
    return Violation(
        "warmup",
        f"--lr-warmup-{name} {warmup} with a decay length of {decay} (--lr-decay-{name}, default --train-{name})",
        "warm-up must be shorter than the decay length, of which it is a part",
        f"lower --lr-warmup-{name} or raise --lr-decay-{name}",
        f"--lr-warmup-{name} {decay - 1}",
    )


def wsd_knows_its_end(context: Context) -> Violation | None:
    """WSD needs the length of its final annealing."""
    optimizer = context.config.optimizer
    if optimizer.lr_decay_style != "WSD" or optimizer.lr_wsd_decay_iters or optimizer.lr_wsd_decay_samples:
        return None
    name = "--lr-wsd-decay-samples" if context.config.train.train_samples is not None else "--lr-wsd-decay-iters"
    return Violation(
        "wsd", f"--lr-decay-style WSD without {name}", "WSD anneals over a length of its own", f"give {name}"
    )


def wsd_fits(context: Context) -> Violation | None:
    """The annealing of WSD lies inside the decay length."""
    optimizer, train = context.config.optimizer, context.config.train
    pairs = (
        ("--lr-wsd-decay-iters", optimizer.lr_wsd_decay_iters, optimizer.lr_decay_iters or train.train_iters),
        ("--lr-wsd-decay-samples", optimizer.lr_wsd_decay_samples, optimizer.lr_decay_samples or train.train_samples),
    )
    for name, annealing, decay in pairs:
        if annealing is not None and decay is not None and annealing > decay:
            return Violation(
                "wsd-length",
                f"{name} {annealing} with a decay length of {decay}",
                "the annealing is the last part of the decay length",
                f"lower {name}",
                f"{name} {decay}",
            )
    return None


def decay_range_has_a_style(context: Context) -> Violation | None:
    """A moving weight decay needs both ends; a constant one takes neither."""
    optimizer = context.config.optimizer
    ends = {"--start-weight-decay": optimizer.start_weight_decay, "--end-weight-decay": optimizer.end_weight_decay}
    style = optimizer.weight_decay_incr_style
    given = {name: value for name, value in ends.items() if value is not None}
    if style == "constant" and given:
        return Violation(
            "weight-decay",
            " ".join(f"{name} {value}" for name, value in given.items()),
            "it has no effect with --weight-decay-incr-style constant",
            "use --weight-decay, or --weight-decay-incr-style linear or cosine",
        )
    if style != "constant" and len(given) < len(ends):
        missing = [name for name, value in ends.items() if value is None]
        return Violation(
            "weight-decay",
            f"--weight-decay-incr-style {style} without {' and '.join(missing)}",
            "a moving weight decay needs its start and its end",
            f"give {' and '.join(missing)}",
        )
    return None


SCHEDULE_RULES = (
    Rule("min-lr", rates_are_ordered),
    Rule("warmup-init", warmup_starts_below),
    Rule("schedule-units", units_agree),
    Rule("warmup-twice", warmup_is_given_once),
    Rule("warmup", warmup_ends_first),
    Rule("wsd", wsd_knows_its_end),
    Rule("wsd-length", wsd_fits),
    Rule("weight-decay", decay_range_has_a_style),
)
