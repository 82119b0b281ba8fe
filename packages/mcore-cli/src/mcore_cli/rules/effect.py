"""Options that count only together with another one: given without it, they are refused, not ignored. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mcore_cli.config import RunConfig
from mcore_cli.options import flag_name, sections_of
from mcore_cli.rules.engine import Context, Rule, Violation


@dataclass(frozen=True)
class Dependent:
    """``fields`` of ``section`` have an effect only if ``holds``; ``needs`` says so, ``fix`` how to get there."""

    section: str
    fields: tuple[str, ...]
    holds: Callable[[RunConfig], bool]
    needs: str
    fix: str


def _resumes(config: RunConfig) -> bool:
    return config.checkpoint.load is not None or config.checkpoint.auto_resume


def _warms_up(config: RunConfig) -> bool:
    optimizer = config.optimizer
    return bool(optimizer.lr_warmup_iters or optimizer.lr_warmup_samples or optimizer.lr_warmup_fraction)


def _decays(config: RunConfig) -> bool:
    return config.optimizer.lr_decay_style != "constant" or config.optimizer.lr_warmup_fraction is not None


DEPENDENTS = (
    Dependent(
        "model",
        ("rotary_base", "rotary_percent", "use_rope_scaling"),
        lambda c: c.model.position_embedding_type == "rope",
        "it belongs to rotary embeddings",
        "use --position-embedding-type rope",
    ),
    Dependent(
        "model",
        (
            "rope_scaling_factor",
            "rope_scaling_low_freq_factor",
            "rope_scaling_high_freq_factor",
            "rope_scaling_original_max_position_embeddings",
        ),
        lambda c: c.model.use_rope_scaling,
        "it belongs to the scaling of rotary embeddings",
        "add --use-rope-scaling",
    ),
    Dependent(
        "model",
        ("add_qkv_bias",),
        lambda c: c.model.disable_bias_linear,
        "every linear layer has biases already",
        "drop it, or add --disable-bias-linear",
    ),
    Dependent(
        "optimizer",
        ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
        lambda c: c.optimizer.lr_decay_style == "WSD",
        "it belongs to the WSD schedule",
        "use --lr-decay-style WSD",
    ),
    Dependent(
        "optimizer",
        ("min_lr",),
        lambda c: c.optimizer.lr_decay_style != "constant",
        "a constant rate has no minimum",
        "use another --lr-decay-style",
    ),
    Dependent(
        "optimizer",
        ("lr_decay_iters", "lr_decay_samples"),
        _decays,
        "a constant rate does not decay",
        "use another --lr-decay-style",
    ),
    Dependent(
        "optimizer",
        ("lr_warmup_init",),
        _warms_up,
        "there is no warm-up",
        "give --lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction",
    ),
    Dependent(
        "optimizer",
        ("adam_beta1", "adam_beta2", "adam_eps"),
        lambda c: c.optimizer.optimizer != "sgd",
        "sgd has no such number",
        "use --optimizer adam",
    ),
    Dependent(
        "optimizer",
        ("sgd_momentum",),
        lambda c: c.optimizer.optimizer != "adam",
        "adam has no such number",
        "use --optimizer sgd, or --adam-beta1",
    ),
    Dependent(
        "optimizer",
        ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"),
        lambda c: _resumes(c) and not c.checkpoint.finetune,
        "it says what to do on resume, and nothing is resumed",
        "give --load or --auto-resume, without --finetune",
    ),
    Dependent(
        "checkpoint",
        ("no_load_optim", "no_load_rng"),
        _resumes,
        "nothing is loaded",
        "give --load or --auto-resume",
    ),
    Dependent(
        "checkpoint",
        ("ckpt_step", "finetune"),
        lambda c: c.checkpoint.load is not None,
        "nothing is loaded",
        "give --load",
    ),
    Dependent(
        "train",
        ("eval_iters",),
        lambda c: c.train.eval_interval is not None,
        "nothing is evaluated",
        "give --eval-interval",
    ),
)


def has_effect(dependent: Dependent, context: Context) -> Violation | None:
    """Fields of ``dependent`` that differ from their defaults need what it needs."""
    if dependent.holds(context.config):
        return None
    section = getattr(context.config, dependent.section)
    fields = sections_of(RunConfig)[dependent.section].model_fields
    given = [
        f"{flag_name(name, fields[name])} {_shown(getattr(section, name))}".strip()
        for name in dependent.fields
        if getattr(section, name) != fields[name].get_default(call_default_factory=True)
    ]
    if not given:
        return None
    return Violation("no-effect", ", ".join(given), f"no effect here, {dependent.needs}", dependent.fix)


def _shown(value: object) -> str:
    return "" if value is True else str(value)


EFFECT_RULES = tuple(Rule("no-effect", partial(has_effect, dependent)) for dependent in DEPENDENTS)
