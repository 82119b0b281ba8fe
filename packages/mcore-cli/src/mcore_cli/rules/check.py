"""Every check of a run before any rank starts. No torch."""

from __future__ import annotations

from typing import Literal

from mcore_cli.config import RunConfig
from mcore_cli.errors import UserError
from mcore_cli.rules.batch import BATCH_RULES, LENGTH_RULES
from mcore_cli.rules.checkpoint import checkpoint_rules
from mcore_cli.rules.effect import EFFECT_RULES
from mcore_cli.rules.engine import Context, Rule, violations
from mcore_cli.rules.layout import LAYOUT_RULES
from mcore_cli.rules.model import MODEL_RULES
from mcore_cli.rules.names import NAME_RULES, known_names
from mcore_cli.rules.pipeline import pipeline_rules
from mcore_cli.rules.schedule import SCHEDULE_RULES
from mcore_data.datasets import check_data
from mcore_models.rules import violations as model_violations
from mcore_parallel.optim.lr_schedule import build_schedule
from mcore_parallel.plugins import PluginManager

Purpose = Literal["train", "verify", "eval", "generate"]


def check(config: RunConfig, world_size: int, manager: PluginManager, purpose: Purpose = "train") -> None:
    """Check a completed tree for what it is going to be used for.

    Verifying uses tokens of its own. It, evaluating and generating have no length, no schedule and nothing to save.

    Raises:
        UserError: everything that is wrong, one line each.
    """
    problems = find_problems(config, world_size, manager, purpose)
    if problems:
        raise UserError(*problems)


def find_problems(config: RunConfig, world_size: int, manager: PluginManager, purpose: Purpose = "train") -> list[str]:
    """What :func:`check` raises, as a list."""
    context = Context(config, world_size, known_names(manager))
    problems = [str(violation) for violation in violations(context, _rules(manager, purpose))]
    if not problems:
        # The model's own rules have the last word; those above say the same with the nearest legal values.
        tp = config.parallel.tensor_model_parallel_size
        problems += model_violations(config.model, tp=tp, seq_length=config.data.seq_length)
    if not problems and purpose == "train":
        problems += _schedule_problems(context)
    if purpose in ("train", "eval"):
        problems += _data_problems(config, manager, purpose)
    return problems


def _schedule_problems(context: Context) -> list[str]:
    """What the learning-rate schedule itself refuses; the rules above say most of it with the nearest legal values."""
    train, step = context.config.train, context.samples_per_micro_step
    if step is None:
        return []
    try:
        build_schedule(
            context.config.optimizer,
            train_iters=train.train_iters,
            train_samples=train.train_samples,
            global_batch_size=train.global_batch_size or step,
        )
    except ValueError as error:
        return [f"[lr-schedule] {error}"]
    return []


def _rules(manager: PluginManager, purpose: Purpose) -> tuple[Rule, ...]:
    # Evaluating and generating run forward passes only, which any number of micro-batches makes under every schedule.
    pipeline = pipeline_rules(manager, backward=purpose in ("train", "verify"))
    shared = (*NAME_RULES, *LAYOUT_RULES, *pipeline, *MODEL_RULES, *BATCH_RULES)
    if purpose != "train":
        return shared
    return (*shared, *LENGTH_RULES, *SCHEDULE_RULES, *EFFECT_RULES, *checkpoint_rules(manager))


def _data_problems(config: RunConfig, manager: PluginManager, purpose: Purpose) -> list[str]:
    evaluates = purpose == "eval" or config.train.eval_interval is not None
    splits = (int(purpose == "train"), int(evaluates), 0)
    found = check_data(config.data, config.model.vocab_size, num_samples=splits, manager=manager)
    # Unknown names were already reported, with the nearest known one.
    return [
        f"[data] {problem}" for problem in found if not problem.startswith(("unknown dataset", "unknown tokenizer"))
    ]
