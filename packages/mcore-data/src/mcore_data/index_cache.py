"""Sample orders kept on disk, shared by all ranks of a machine through the page cache.

An entry is a folder named by a hash of everything the order depends on: the data files (path, sizes, time of change)
and all options. It is built under a temporary name and renamed into place, so any number of processes may build the
same entry at once and a killed one leaves no half entry.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mcore_data.indexed_dataset import bin_path, idx_path
from mcore_data.sample_order import SampleOrder

FORMAT = 1
_ARRAYS = ("documents", "boundaries", "shuffle")


def cached_order(folder: Path, prefix: str, options: dict[str, Any], build: Callable[[], SampleOrder]) -> SampleOrder:
    """The order of ``prefix`` under ``options``, read from ``folder`` or built and stored there.

    Raises:
        ValueError: the folder cannot be written.
    """
    target = folder / f"order-{_key(prefix, options)}"
    if not target.is_dir():
        order = build()
        try:
            _store(order, target)
        except OSError as error:
            raise ValueError(f"--data-cache-path {folder}: cannot be written ({error}); name another folder") from error
    return _load(target)


def _key(prefix: str, options: dict[str, Any]) -> str:
    files = []
    for path in (bin_path(prefix), idx_path(prefix)):
        stat = path.stat()
        files.append([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
    text = json.dumps([FORMAT, files, options], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _store(order: SampleOrder, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        partial.chmod(0o755)
        for name in _ARRAYS:
            with open(partial / f"{name}.npy", "wb") as file:
                np.save(file, getattr(order, name))
                file.flush()
                os.fsync(file.fileno())
        (partial / "order.json").write_text(json.dumps({"num_epochs": order.num_epochs}))
        publish(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def publish(partial: Path, target: Path) -> None:
    """Rename a finished folder to ``target``; if another process was first, its result stays."""
    try:
        os.rename(partial, target)
    except OSError:
        if not target.is_dir():
            raise


def _load(target: Path) -> SampleOrder:
    arrays = [np.load(target / f"{name}.npy", mmap_mode="r") for name in _ARRAYS]
    epochs = json.loads((target / "order.json").read_text())["num_epochs"]
    documents, boundaries, shuffle = (np.asarray(array) for array in arrays)
    return SampleOrder(documents, boundaries, shuffle, int(epochs))
