"""What can be wrong with a checkpoint. Every message is one line: the thing, the value and the fix. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class CheckpointError(ValueError):
    """Base of everything below: the checkpoint, or what was asked of it, is not right."""


class CheckpointNotFound(CheckpointError):
    """There is no checkpoint at the place (or of the step) that was named."""


class IncompleteCheckpoint(CheckpointError):
    """The folder is a checkpoint that was never committed, or whose committed files changed afterwards."""


class FormatTooNew(CheckpointError):
    """The checkpoint was written by a later version whose format this one does not know."""


class MissingArray(CheckpointError):
    """An array that was asked for is not in the checkpoint."""


class UnexpectedArray(CheckpointError):
    """The checkpoint holds an array that no rank asked for."""


class ShapeMismatch(CheckpointError):
    """The global shape asked for is not that of the checkpoint (or ranks disagree about it)."""


class DtypeMismatch(CheckpointError):
    """The dtype asked for is not that of the checkpoint and no cast was allowed (or ranks disagree about it)."""


class CoverError(CheckpointError):
    """The boxes of all ranks do not make up an array exactly: some element has no holder, or two that are no copies."""


class ChunkError(CheckpointError):
    """A chunk of an array cannot be used; carries ``array``, ``chunk`` and ``file``."""

    def __init__(self, array: str, chunk: Sequence[int], file: Path, reason: str) -> None:
        self.array = array
        self.chunk = tuple(chunk)
        self.file = Path(file)
        where = f"chunk {list(self.chunk)} of array {array!r} ({file})"
        super().__init__(f"{where} {reason}; restore the file or load an earlier checkpoint")


class CorruptChunk(ChunkError):
    """A chunk file has the wrong length or fails its checksum."""


class MissingChunk(ChunkError):
    """A chunk file is gone."""


class LoadFailed(CheckpointError):
    """Another rank could not load; the message is that rank's."""


class SaveFailed(RuntimeError):
    """A rank could not save: nothing was committed and earlier checkpoints are as they were.

    Carries ``rank``, ``path`` (what it was writing) and ``cause`` (text); raised on all ranks alike.
    """

    def __init__(self, step: int, rank: int, path: str, cause: str) -> None:
        self.step = step
        self.rank = rank
        self.path = path
        self.cause = cause
        super().__init__(
            f"saving step {step} failed on rank {rank} at {path}: {cause}; nothing was committed, "
            "earlier checkpoints are untouched"
        )
