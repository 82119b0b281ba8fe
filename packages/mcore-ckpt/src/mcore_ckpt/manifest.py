"""The two small files that make a folder a checkpoint, and what they say. JSON only; no torch, no numpy.

``MANIFEST.json`` describes the checkpoint and holds the digests of its metadata; ``COMMIT`` holds the digest of the
manifest and is written last. A folder without a matching ``COMMIT`` is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.errors import CheckpointError, FormatTooNew, IncompleteCheckpoint

FORMAT = 1
MANIFEST = "MANIFEST.json"
COMMIT = "COMMIT"
PARTS = "parts"


@dataclass(frozen=True)
class Skipped:
    """A folder that looks like a checkpoint but was not used, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint: its folder, its step, and the ``state`` given to ``save_checkpoint``.

    ``skipped``: newer folders that were passed over because they are not complete.
    """

    path: Path
    step: int
    state: Mapping[str, Any]
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """What ``MANIFEST.json`` says. ``files``: sha256 of each metadata file by path relative to the folder."""

    step: int
    attempt: str
    world_size: int
    num_cells: int
    num_bytes: int
    files: Mapping[str, str]
    state: Mapping[str, Any]
    format: int = FORMAT


def digest(content: bytes) -> str:
    """Hexadecimal sha256."""
    return hashlib.sha256(content).hexdigest()


def encode(document: Any) -> bytes:
    """``document`` as JSON text that reads back equal.

    Raises:
        CheckpointError: it would not (a key that is no string, NaN, infinity, an object that is not JSON).
    """
    check_plain(document, "document")
    return json.dumps(document, indent=1, allow_nan=False).encode() + b"\n"


def check_plain(value: Any, where: str) -> None:
    """Check that ``value`` survives JSON; ``where`` names it in the error.

    Raises:
        CheckpointError: names the place inside ``value`` and the fix.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where} has the key {key!r}, which JSON would turn into text; use a string key")
            check_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            check_plain(item, f"{where}[{i}]")
    elif isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        raise CheckpointError(f"{where} is {value}, which JSON does not have; leave it out or store it as text")
    elif value is not None and not isinstance(value, str | bool | int | float):
        raise CheckpointError(f"{where} is a {type(value).__name__}; only JSON values can be stored")


def encode_manifest(manifest: Manifest) -> bytes:
    """The text of ``MANIFEST.json``."""
    return encode(dict(vars(manifest)))


def encode_commit(manifest: Manifest, text: bytes) -> bytes:
    """The text of ``COMMIT`` for the manifest whose file content is ``text``."""
    return encode({"step": manifest.step, "attempt": manifest.attempt, "manifest": digest(text)})


def read_manifest(folder: Path) -> Manifest:
    """Read and check a checkpoint's small files; the chunks are checked when they are read.

    Raises:
        IncompleteCheckpoint: not committed, or the manifest or the array metadata changed afterwards.
        FormatTooNew: written by a later version of the format.
    """
    commit = _json(folder / COMMIT, "the save did not finish")
    text = _bytes(folder / MANIFEST, "the save did not finish")
    if commit.get("manifest") != digest(text):
        raise IncompleteCheckpoint(_not_complete(folder, f"{MANIFEST} does not match {COMMIT}"))
    document = json.loads(text)
    if document["format"] > FORMAT:
        raise FormatTooNew(
            f"checkpoint {folder} has format {document['format']}, this version reads up to {FORMAT}; update mcore-ckpt"
        )
    known = {name: document[name] for name in Manifest.__dataclass_fields__}
    manifest = Manifest(**known)
    for name, expected in manifest.files.items():
        if "/" not in name and digest(_bytes(folder / name, "a file was removed")) != expected:
            raise IncompleteCheckpoint(_not_complete(folder, f"{name} does not match {MANIFEST}"))
    return manifest


def _not_complete(folder: Path, reason: str) -> str:
    return f"{folder} is not a complete checkpoint: {reason}; load another step or remove it"


def _bytes(path: Path, reason: str) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise IncompleteCheckpoint(_not_complete(path.parent, f"{path.name} is missing ({reason})")) from None


def _json(path: Path, reason: str) -> dict[str, Any]:
    try:
        document = json.loads(_bytes(path, reason))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise IncompleteCheckpoint(_not_complete(path.parent, f"{path.name} is damaged")) from None
    if not isinstance(document, dict):
        raise IncompleteCheckpoint(_not_complete(path.parent, f"{path.name} is damaged"))
    return document
