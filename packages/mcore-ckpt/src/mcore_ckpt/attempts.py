"""Save attempts: the hidden working folder, the lock that says its writer lives, and the removal of what is left.

A killed save leaves its folder behind. The next save in the same root removes it, but only when nobody holds its
lock, so that two jobs that save into one root do not remove each other's work. No torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from mcore_ckpt.files import sync
from mcore_ckpt.find import LATEST, step_folders, step_name

PREFIX = ".tmp-"
LOCK_SUFFIX = ".lock"


def attempt_name(step: int) -> str:
    """A fresh name for the working folder of one attempt to save ``step``."""
    return f"{PREFIX}{step_name(step)}.{secrets.token_hex(4)}"


@contextlib.contextmanager
def working_folder(root: Path, name: str) -> Iterator[Path]:
    """Make ``root/name`` under a lock; what is left of it at the end (no commit renamed it) is removed."""
    root.mkdir(parents=True, exist_ok=True)
    folder, lock_path = root / name, root / (name + LOCK_SUFFIX)
    lock = _locked(lock_path)
    try:
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            lock_path.unlink()
        os.close(lock)


def remove_abandoned(root: Path) -> list[Path]:
    """Remove the working folders in ``root`` whose writers are gone; returns those removed."""
    removed = []
    for path in sorted(root.glob(PREFIX + "*")):
        folder = path.with_name(path.name.removesuffix(LOCK_SUFFIX))
        lock_path = folder.with_name(folder.name + LOCK_SUFFIX)
        if folder in removed:
            continue
        if lock_path.exists():
            lock = _try_lock(lock_path)
            if lock is None:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            lock_path.unlink(missing_ok=True)
            os.close(lock)
        else:
            shutil.rmtree(folder, ignore_errors=True)
        removed.append(folder)
    return removed


def remove_checkpoint(folder: Path) -> None:
    """Remove one checkpoint. It disappears at once (a rename), then its files go."""
    doomed = folder.with_name(f"{PREFIX}removed-{folder.name}.{secrets.token_hex(4)}")
    os.rename(folder, doomed)
    sync([folder.parent])
    shutil.rmtree(doomed)


def remove_all(root: str | Path) -> list[Path]:
    """Remove every checkpoint in ``root``, oldest first, and what interrupted saves left; returns those removed."""
    root = Path(root)
    folders = [path for _, _, path in step_folders(root)]
    for folder in folders:
        remove_checkpoint(folder)
    if root.is_dir():
        (root / LATEST).unlink(missing_ok=True)
        remove_abandoned(root)
    return folders


def _locked(path: Path) -> int:
    # A collector may remove the file between its creation and the lock; then the lock is on a file nobody sees.
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(handle, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(handle).st_ino:
                return handle
        os.close(handle)


def _try_lock(path: Path) -> int | None:
    try:
        handle = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle
