"""From the value of ``--save`` or ``--load`` to a folder. No torch."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.specs import StoreSpec
from mcore_parallel.plugins import PluginManager, Registry

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def store_registry(manager: PluginManager) -> Registry[StoreSpec]:
    """All stores that the installed plugins offer, by URL scheme."""
    return Registry("checkpoint store", manager.collect("mcore_checkpoint_stores"))


def checkpoint_root(url: str, stores: Registry[StoreSpec]) -> Path:
    """The folder that ``url`` names: a plain path, or ``scheme://...`` of a registered store.

    Raises:
        ValueError: no store has that scheme; the text lists those there are.
    """
    match = SCHEME.match(url)
    return stores[match[1].lower()].build(url) if match else Path(url).expanduser()


def file_folder(url: str) -> Path:
    """The folder of a ``file:///absolute/path`` URL.

    Raises:
        CheckpointError: it names another host, or no path.
    """
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.strip("/"):
        raise CheckpointError(f"{url!r} is not a folder on this machine; write file:///absolute/path or a plain path")
    return Path(unquote(parts.path))
