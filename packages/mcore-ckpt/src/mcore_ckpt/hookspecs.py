"""Hooks that mcore-ckpt owns. No torch."""

from __future__ import annotations

from mcore_ckpt.specs import StoreSpec
from mcore_parallel.plugins import hookspec


@hookspec
def mcore_checkpoint_stores() -> list[StoreSpec]:  # type: ignore[empty-body]
    """Places that ``--save`` and ``--load`` can name by URL scheme."""
