"""Reader of Megatron's token files ``PREFIX.bin`` and ``PREFIX.idx`` (little endian).

``.bin`` holds the tokens of all sequences back to back. ``.idx`` holds a 34-byte header, the sequence lengths
(int32), their byte offsets (int64), the document array (int64, starts with 0 and ends with the number of
sequences) and, in multimodal files, one int8 mode per sequence. Files have no checksum, so everything that the
index says is checked when it is opened.
"""

from __future__ import annotations

import glob
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int8),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}


class IndexedDatasetError(ValueError):
    """A ``.bin``/``.idx`` file that cannot be used: names the file, the field, what was expected and what was found."""

    def __init__(self, path: Path, field: str, *, expected: object, found: object, fix: str) -> None:
        self.path, self.field, self.expected, self.found, self.fix = path, field, expected, found, fix
        super().__init__(f"{path}: {field}: expected {expected}, found {found}; {fix}")

    def __reduce__(self) -> tuple[Any, ...]:
        state = {"expected": self.expected, "found": self.found, "fix": self.fix}
        return _rebuild_error, (self.path, self.field, state)


def _rebuild_error(path: Path, field: str, state: dict[str, Any]) -> IndexedDatasetError:
    return IndexedDatasetError(path, field, **state)


_BLOCK = 1 << 22
_REMAKE = "the file is cut short or damaged: copy it again or prepare it again"


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    """``PREFIX.bin``, without treating dots of the prefix as a suffix."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    """``PREFIX.idx``, without treating dots of the prefix as a suffix."""
    return Path(f"{os.fspath(prefix)}.idx")


def resolve_prefix(prefix: str | os.PathLike[str]) -> str:
    """The prefix of a data set: ``PREFIX`` if ``PREFIX.idx`` exists, else the only ``PREFIX_*_document``.

    Raises:
        ValueError: neither exists, or several candidates do (they are listed).
    """
    prefix = os.fspath(prefix)
    if prefix.endswith((".idx", ".bin")):
        prefix = prefix[:-4]
    if idx_path(prefix).is_file():
        return prefix
    candidates = sorted(name[: -len(".idx")] for name in glob.glob(f"{glob.escape(prefix)}_*_document.idx"))
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise ValueError(f"--data-path {prefix}: several data sets start with it: {', '.join(candidates)}; name one")
    found = "PREFIX.bin exists, so a write was interrupted" if bin_path(prefix).exists() else "neither exists"
    raise ValueError(
        f"--data-path {prefix}: no {prefix}.idx and no {prefix}_*_document.idx ({found}); "
        "make them with `mcore data prepare --output-prefix`"
    )


@dataclass(frozen=True)
class _Header:
    dtype: np.dtype[Any]
    num_sequences: int
    num_document_entries: int
    has_modes: bool


def _read_header(path: Path, size: int) -> _Header:
    with open(path, "rb") as file:
        raw = file.read(HEADER.size)
    if len(raw) < HEADER.size:
        raise IndexedDatasetError(
            path, "header", expected=f"{HEADER.size} bytes", found=f"{len(raw)} bytes", fix=_REMAKE
        )
    magic, version, code, sequences, entries = HEADER.unpack(raw)
    if magic != MAGIC:
        fix = "this is not a Megatron index; give the prefix of one"
        raise IndexedDatasetError(path, "magic", expected=MAGIC, found=magic, fix=fix)
    if version != VERSION:
        fix = "this reader knows version 1 only"
        raise IndexedDatasetError(path, "version", expected=VERSION, found=version, fix=fix)
    if code not in DTYPES:
        raise IndexedDatasetError(path, "dtype code", expected=f"one of {sorted(DTYPES)}", found=code, fix=_REMAKE)
    if entries < 1:
        raise IndexedDatasetError(path, "document array", expected="at least 1 entry", found=entries, fix=_REMAKE)
    plain = HEADER.size + 12 * sequences + 8 * entries
    has_modes = size == plain + sequences and sequences > 0
    if size != plain and not has_modes:
        expected = f"{plain} bytes ({plain + sequences} with modes) for {sequences} sequences and {entries} entries"
        raise IndexedDatasetError(path, "length", expected=expected, found=f"{size} bytes", fix=_REMAKE)
    return _Header(DTYPES[code], sequences, entries, has_modes)


class IndexedDataset:
    """Token sequences of one ``PREFIX.bin``/``PREFIX.idx``, memory-mapped; element i is sequence i.

    Documents are runs of sequences: document d is ``document_indices[d]:document_indices[d + 1]``; it may be empty.
    Pickles as its prefix alone.

    Raises:
        IndexedDatasetError: a file is missing, cut short, or does not agree with the other.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        path = idx_path(self.prefix)
        for name in (path, bin_path(self.prefix)):
            if not name.is_file():
                fix = "check the prefix; both files are needed"
                raise IndexedDatasetError(name, "file", expected="a file", found="none", fix=fix)
        header = _read_header(path, path.stat().st_size)
        self.dtype = header.dtype
        self._map_index(path, header)
        self._check_index(path)
        self._tokens = _map_file(bin_path(self.prefix), self.dtype)

    def _map_index(self, path: Path, header: _Header) -> None:
        count, entries = header.num_sequences, header.num_document_entries
        raw = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        at = HEADER.size
        # The int64 arrays start at odd offsets: views of them are unaligned, which numpy handles.
        self.sequence_lengths: NDArray[np.int32] = raw[at : at + 4 * count].view("<i4")
        at += 4 * count
        self.sequence_pointers: NDArray[np.int64] = raw[at : at + 8 * count].view("<i8")
        at += 8 * count
        self.document_indices: NDArray[np.int64] = raw[at : at + 8 * entries].view("<i8")
        at += 8 * entries
        self.sequence_modes: NDArray[np.int8] | None = raw[at:].view(np.int8) if header.has_modes else None

    def _check_index(self, path: Path) -> None:
        documents, count = self.document_indices, len(self)
        if documents[0] != 0:
            raise IndexedDatasetError(path, "document array", expected="first entry 0", found=documents[0], fix=_REMAKE)
        if documents[-1] != count:
            expected = f"last entry {count} (the number of sequences)"
            raise IndexedDatasetError(path, "document array", expected=expected, found=documents[-1], fix=_REMAKE)
        falls = np.flatnonzero(documents[1:] < documents[:-1])
        if falls.size:
            at = int(falls[0]) + 1
            found = f"entry {at} = {documents[at]} after {documents[at - 1]}"
            raise IndexedDatasetError(path, "document array", expected="no decrease", found=found, fix=_REMAKE)
        if count and int(self.sequence_lengths.min()) < 0:
            at = int(self.sequence_lengths.argmin())
            found = f"{self.sequence_lengths[at]} at sequence {at}"
            raise IndexedDatasetError(path, "sequence lengths", expected="0 or more", found=found, fix=_REMAKE)
        self._check_pointers(path)

    def _check_pointers(self, path: Path) -> None:
        size = 0
        # In blocks, so that a hundred million sequences do not need a gigabyte for a moment.
        for start in range(0, len(self), _BLOCK):
            stop = start + _BLOCK
            offsets = byte_offsets(self.sequence_lengths[start:stop], self.dtype.itemsize) + size
            wrong = np.flatnonzero(self.sequence_pointers[start:stop] != offsets[:-1])
            if wrong.size:
                at = int(wrong[0])
                raise IndexedDatasetError(
                    path,
                    f"byte offset of sequence {start + at}",
                    expected=int(offsets[at]),
                    found=int(self.sequence_pointers[start + at]),
                    fix="offsets must be the running sum of the lengths; prepare the data again",
                )
            size = int(offsets[-1])
        data = bin_path(self.prefix)
        if data.stat().st_size != size:
            found = f"{data.stat().st_size} bytes"
            raise IndexedDatasetError(
                data, "length", expected=f"{size} bytes, as {path.name} says", found=found, fix=_REMAKE
            )

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    @property
    def num_documents(self) -> int:
        """Documents, empty ones included."""
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return len(self._tokens)

    def __getitem__(self, index: int) -> NDArray[Any]:
        """Sequence ``index`` as a read-only view ``[length]``."""
        return self.read(index)

    def read(self, index: int, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Tokens ``[start, stop)`` of sequence ``index`` as a read-only view; ``stop`` None is its end.

        Raises:
            IndexError: no such sequence.
        """
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"sequence {index} of {count} in {self.prefix}")
        begin = int(self.sequence_pointers[index]) // self.dtype.itemsize
        length = int(self.sequence_lengths[index])
        end = length if stop is None else min(stop, length)
        return self._tokens[begin + start : begin + max(start, end)]

    def tokens(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens ``[start, stop)`` of the whole file, across sequences, as a read-only view."""
        return self._tokens[start:stop]

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexedDataset, (self.prefix,)


def byte_offsets(lengths: NDArray[Any], itemsize: int) -> NDArray[np.int64]:
    """Byte offset of each sequence and, as last entry, the size of ``.bin``: ``[sequences + 1]`` int64."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, dtype=np.int64, out=offsets[1:])
    return offsets * itemsize


def _map_file(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype=dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
