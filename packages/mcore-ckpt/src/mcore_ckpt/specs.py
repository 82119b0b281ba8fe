"""Frozen specs that plugins of mcore-ckpt return. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StoreSpec:
    """A place for checkpoints, chosen by the scheme of ``--save`` and ``--load``.

    ``name`` is the URL scheme; ``build(url)`` returns the folder, on a file system that all ranks share and on which
    a rename is atomic, that stands for the URL. It may mount something; it is called once per rank and run.
    """

    name: str
    build: Callable[[str], Path]
    summary: str = ""
