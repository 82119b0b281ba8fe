"""Rules of batch size and length of a run. No torch."""

from __future__ import annotations

from mcore_cli.rules.engine import Context, Rule, Violation, nearest_multiples


def batch_divides(context: Context) -> Violation | None:
    """A global batch is a whole number of micro-batches on every replica."""
    train, step = context.config.train, context.samples_per_micro_step
    if train.global_batch_size is None or step is None or train.global_batch_size % step == 0:
        return None
    return Violation(
        "global-batch",
        f"--global-batch-size {train.global_batch_size} with --micro-batch-size {train.micro_batch_size} on "
        f"{context.data_parallel_size} data-parallel replicas",
        f"it must be a multiple of {train.micro_batch_size} x {context.data_parallel_size} = {step}",
        "change --global-batch-size or --micro-batch-size",
        f"--global-batch-size {nearest_multiples(train.global_batch_size, step)}",
    )


def length_is_given(context: Context) -> Violation | None:
    """A run has a length."""
    train = context.config.train
    if train.train_iters is not None or train.train_samples is not None:
        return None
    return Violation("length", "no --train-iters and no --train-samples", "a run needs a length", "give one of them")


def length_is_given_once(context: Context) -> Violation | None:
    """Iterations and samples exclude each other."""
    train = context.config.train
    if train.train_iters is None or train.train_samples is None:
        return None
    return Violation(
        "length-twice",
        f"--train-iters {train.train_iters} with --train-samples {train.train_samples}",
        "the length is given in iterations or in samples, not both",
        "drop one of them (--train-iters none unsets a recipe's)",
    )


def samples_make_a_step(context: Context) -> Violation | None:
    """A length in samples holds at least one global batch."""
    train = context.config.train
    if train.train_samples is None or train.global_batch_size is None or train.train_samples >= train.global_batch_size:
        return None
    return Violation(
        "length-samples",
        f"--train-samples {train.train_samples} with --global-batch-size {train.global_batch_size}",
        "not one whole step",
        "raise --train-samples",
        f"--train-samples {train.global_batch_size}",
    )


LENGTH_RULES = (
    Rule("length", length_is_given),
    Rule("length-twice", length_is_given_once),
    Rule("length-samples", samples_make_a_step),
)
BATCH_RULES = (Rule("global-batch", batch_divides),)
