"""Files that survive: whole writes, flushes to the disk, renames. Every error names its file. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SYNC_THREADS = 8


def write_file(path: Path, *buffers: Any) -> None:
    """Write ``buffers`` (bytes-like) to a new file, making its folder. Not yet durable: see :func:`sync`.

    Raises:
        OSError: with ``filename`` set, also when the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(path, "wb", buffering=0) as file:
            for buffer in buffers:
                view = memoryview(buffer).cast("B") if memoryview(buffer).nbytes else memoryview(b"")
                while view.nbytes:
                    view = view[file.write(view) :]
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync(paths: Iterable[Path]) -> None:
    """Flush files and folders to the disk, several at a time so that the journal commits them together."""
    with ThreadPoolExecutor(SYNC_THREADS) as pool:
        for _ in pool.map(_sync_one, paths):
            pass


def _sync_one(path: Path) -> None:
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def replace_file(path: Path, content: bytes) -> None:
    """Replace a small file: readers see the old content or the new, whole and durable, never between."""
    # Always the same name, so that a killed writer leaves at most one file, which the next one uses up.
    temporary = path.with_name(f".{path.name}.tmp")
    write_file(temporary, content)
    sync([temporary])
    os.replace(temporary, path)
    sync([path.parent])


def folders_of(paths: Iterable[Path], root: Path) -> list[Path]:
    """The folders from those of ``paths`` up to ``root``, each once: their entries must be flushed too."""
    found: set[Path] = {root}
    for path in paths:
        for parent in path.parents:
            if parent in found:
                break
            found.add(parent)
    return sorted(found)
