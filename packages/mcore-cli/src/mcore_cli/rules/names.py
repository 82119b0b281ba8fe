"""Rules of plugin names: what a flag chooses by name must be registered. No torch."""

from __future__ import annotations

from functools import partial

from mcore_cli.errors import did_you_mean
from mcore_cli.rules.engine import Context, Rule, Violation
from mcore_parallel.plugins import PluginManager, Registry

# kind, hook, section, field
CHOICES = (
    ("pipeline schedule", "mcore_pipeline_schedules", "parallel", "pipeline_schedule"),
    ("optimizer", "mcore_optimizers", "optimizer", "optimizer"),
    ("kernel set", "mcore_kernels", "model", "transformer_impl"),
    ("dataset", "mcore_datasets", "data", "dataset"),
    ("tokenizer", "mcore_tokenizers", "data", "tokenizer_type"),
)


def known_names(manager: PluginManager) -> dict[str, tuple[str, ...]]:
    """Registered names by kind, for :class:`Context`."""
    registries = {kind: Registry(kind, manager.collect(hook)) for kind, hook, _, _ in CHOICES}
    return {kind: (*registry.names(), *registry.aliases()) for kind, registry in registries.items()}


def is_known(kind: str, section: str, field: str, context: Context) -> Violation | None:
    """The value of ``section.field`` is a registered ``kind``."""
    value = getattr(getattr(context.config, section), field)
    known = context.known.get(kind)
    if value is None or known is None or value in known:
        return None
    return Violation(
        "unknown-name",
        f"--{field.replace('_', '-')} {value}",
        f"no {kind} of this name is registered{did_you_mean(value, known)}",
        f"use one of {', '.join(known)} (mcore plugins list)" if known else "install a plugin that registers one",
    )


NAME_RULES = tuple(Rule("unknown-name", partial(is_known, kind, section, field)) for kind, _, section, field in CHOICES)
