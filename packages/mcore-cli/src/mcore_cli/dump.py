"""The tree of a run as YAML that is a recipe: reading it back gives the same tree. No torch."""

from __future__ import annotations

import yaml

from mcore_cli.config import RunConfig


def to_yaml(config: RunConfig) -> str:
    """Every field of every section, in their order."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
