"""Which checkpoints a folder holds. Complete ones only, newest by number; usable without torch.

The truth is in the ``COMMIT`` files. The text file ``latest`` beside them is written for people and scripts and is
never trusted here.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from mcore_ckpt.errors import CheckpointError, CheckpointNotFound, IncompleteCheckpoint
from mcore_ckpt.manifest import COMMIT, MANIFEST, CheckpointInfo, Skipped, read_manifest

# The optional last number marks a replacement of the same step that was interrupted after its commit.
STEP_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")
LATEST = "latest"


def step_name(step: int, generation: int = 0) -> str:
    """The folder name of a step: ``step-00000012``."""
    return f"step-{step:08d}" + (f".{generation}" if generation else "")


def step_folders(root: Path) -> list[tuple[int, int, Path]]:
    """All folders named like a step, committed or not, as ``(step, generation, path)`` in numeric order."""
    if not root.exists():
        return []
    if not root.is_dir():
        raise CheckpointError(f"{root} is a file; checkpoints are kept in a folder")
    found = []
    for path in root.iterdir():
        match = STEP_NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), int(match[2] or 0), path))
    return sorted(found)


def list_checkpoints(root: str | Path) -> list[CheckpointInfo]:
    """The complete checkpoints in ``root``, one per step, in numeric order of the steps."""
    found: dict[int, CheckpointInfo] = {}
    for step, _, path in step_folders(Path(root)):
        info = _read(path)
        if isinstance(info, CheckpointInfo):
            found[step] = info
    return list(found.values())


def find_latest(root: str | Path) -> CheckpointInfo | None:
    """The newest complete checkpoint in ``root``, None when there is none.

    Incomplete newer folders are listed in its ``skipped``.

    Raises:
        FormatTooNew: the newest one needs a later version; falling back to an older one would lose work silently.
    """
    info, _ = _newest(step_folders(Path(root)))
    return info


def open_checkpoint(path: str | Path, step: int | None = None) -> CheckpointInfo:
    """The checkpoint at ``path``: a folder of checkpoints (its newest, or ``step``) or one checkpoint's folder.

    Raises:
        CheckpointNotFound: nothing there, or not that step; the text lists the steps there are.
        IncompleteCheckpoint: what is there was never committed or is damaged.
        FormatTooNew: it needs a later version.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointNotFound(f"no checkpoint at {path}: it does not exist")
    candidates = step_folders(path)
    if not candidates and _is_checkpoint(path):
        info = _info(path)
        if step is not None and info.step != step:
            raise CheckpointNotFound(f"{path} is the checkpoint of step {info.step}, not {step}")
        return info
    wanted = [candidate for candidate in candidates if step is None or candidate[0] == step]
    info_or_none, skipped = _newest(wanted)
    if info_or_none is not None:
        return info_or_none
    if skipped:
        raise IncompleteCheckpoint("; ".join(s.reason for s in skipped))
    if candidates:
        steps = ", ".join(str(s) for s in dict.fromkeys(s for s, _, _ in candidates))
        raise CheckpointNotFound(f"no checkpoint of step {step} in {path} (there are: {steps})")
    raise CheckpointNotFound(f"no checkpoint in {path}: it holds no folder named like {step_name(100)}")


def _newest(candidates: list[tuple[int, int, Path]]) -> tuple[CheckpointInfo | None, tuple[Skipped, ...]]:
    skipped: list[Skipped] = []
    for _, _, path in reversed(candidates):
        info = _read(path)
        if isinstance(info, CheckpointInfo):
            return replace(info, skipped=tuple(skipped)), tuple(skipped)
        skipped.append(info)
    return None, tuple(skipped)


def _read(path: Path) -> CheckpointInfo | Skipped:
    try:
        return _info(path)
    except IncompleteCheckpoint as error:
        return Skipped(path, str(error))


def _info(path: Path) -> CheckpointInfo:
    manifest = read_manifest(path)
    return CheckpointInfo(path, manifest.step, manifest.state)


def _is_checkpoint(path: Path) -> bool:
    return bool(STEP_NAME.fullmatch(path.name)) or (path / COMMIT).exists() or (path / MANIFEST).exists()
