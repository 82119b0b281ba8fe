"""Writer of Megatron's ``PREFIX.bin``/``PREFIX.idx``, and the merge of several such files into one.

A writer streams tokens into hidden temporary files beside the target and renames them only when everything is on
disk, ``.bin`` before ``.idx``; a killed writer leaves nothing under the final names that could be mistaken for data.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mcore_data.indexed_dataset import (
    DTYPES,
    HEADER,
    MAGIC,
    VERSION,
    IndexedDataset,
    bin_path,
    byte_offsets,
    idx_path,
)

SMALL_VOCAB = 65_500
MAX_SEQUENCE = 2**31 - 1


def token_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """uint16 for a known vocabulary below 65,500, else int32 (Megatron's rule)."""
    return np.dtype("<u2") if vocab_size is not None and vocab_size < SMALL_VOCAB else np.dtype("<i4")


def dtype_code(dtype: np.dtype[Any]) -> int:
    """The code that ``.idx`` stores for ``dtype``.

    Raises:
        ValueError: the format has no code for it.
    """
    for code, known in DTYPES.items():
        if known == dtype:
            return code
    raise ValueError(f"dtype {dtype} has no code in .idx files; use one of {[str(d) for d in DTYPES.values()]}")


class IndexedDatasetWriter:
    """Writes one data set; use as a context manager: a clean exit commits, an exception discards.

    Args:
        prefix: target without ``.bin``/``.idx``; its folder is made if needed.
        dtype: stored token type, see ``token_dtype``.
        modes: the file has one int8 mode per sequence (multimodal).
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: np.dtype[Any] | type, *, modes: bool = False) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<") if np.dtype(dtype).itemsize > 1 else np.dtype(dtype)
        self._code = dtype_code(self.dtype)
        # 4 and 8 bytes per entry: a list of Python integers would need ten times that.
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._modes = array("b") if modes else None
        self._bin = _PartialFile(bin_path(self.prefix))
        self.num_tokens = 0

    @property
    def num_documents(self) -> int:
        """Documents ended so far."""
        return len(self._documents) - 1

    def add_sequence(self, tokens: ArrayLike, *, mode: int = 0) -> None:
        """Append one sequence of the current document.

        Raises:
            ValueError: a token does not fit the stored type, or the sequence is longer than int32 can say.
        """
        values = np.asarray(tokens)
        if values.size == 0:
            values = values.astype(self.dtype)
        self._check_range(values)
        self._check_length(values.size)
        self._bin.stream.write(np.ascontiguousarray(values, dtype=self.dtype).data)
        self._append(values.size, mode)

    def end_document(self) -> None:
        """End the current document; without sequences since the last end it is an empty document."""
        self._documents.append(len(self._lengths))

    def add_document(self, tokens: ArrayLike, lengths: Sequence[int], modes: Sequence[int] | None = None) -> None:
        """Append a document of ``len(lengths)`` sequences whose tokens stand back to back in ``tokens``.

        Raises:
            ValueError: the lengths do not add up to the tokens, or as ``add_sequence``.
        """
        values = np.asarray(tokens)
        if sum(lengths) != values.size:
            raise ValueError(f"sequence lengths add up to {sum(lengths)}, but the document has {values.size} tokens")
        start = 0
        for position, length in enumerate(lengths):
            mode = modes[position] if modes is not None else 0
            self.add_sequence(values[start : start + length], mode=mode)
            start += length
        self.end_document()

    def add_documents(self, tokens: NDArray[Any], lengths: NDArray[Any]) -> None:
        """Append many documents at once, one sequence each; a length of 0 is an empty document without sequence.

        Raises:
            ValueError: as ``add_document``.
        """
        if int(lengths.sum(dtype=np.int64)) != tokens.size:
            raise ValueError(
                f"document lengths add up to {lengths.sum(dtype=np.int64)}, but there are {tokens.size} tokens"
            )
        self._check_range(tokens)
        self._check_length(int(lengths.max(initial=0)))
        self._bin.stream.write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        for length in lengths.tolist():
            if length:
                self._append(length, 0)
            self.end_document()

    def add_index(self, prefix: str | os.PathLike[str]) -> None:
        """Append all of another data set (its bytes are copied as they are).

        Raises:
            ValueError: its token type or its having modes differs from this writer's.
        """
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise ValueError(
                f"cannot merge {other.prefix} ({other.dtype}) into {self.prefix} ({self.dtype}); "
                "prepare both with the same tokenizer"
            )
        if (other.sequence_modes is not None) != (self._modes is not None) and len(other):
            raise ValueError(f"cannot merge {other.prefix} into {self.prefix}: only one of them has modes")
        first = len(self._lengths)
        self._lengths.frombytes(np.ascontiguousarray(other.sequence_lengths, dtype=np.intc).tobytes())
        self._documents.frombytes((other.document_indices[1:] + np.int64(first)).astype(np.int64).tobytes())
        if self._modes is not None and other.sequence_modes is not None:
            self._modes.frombytes(other.sequence_modes.tobytes())
        self._copy_tokens(bin_path(other.prefix))
        self.num_tokens += other.num_tokens

    def _copy_tokens(self, path: Path) -> None:
        with open(path, "rb") as source:
            shutil.copyfileobj(source, self._bin.stream, 16 << 20)

    def _append(self, length: int, mode: int) -> None:
        self._lengths.append(length)
        if self._modes is not None:
            self._modes.append(mode)
        elif mode:
            raise ValueError(f"mode {mode} given, but the writer was opened without modes=True")
        self.num_tokens += length

    def _check_length(self, length: int) -> None:
        if length > MAX_SEQUENCE:
            raise ValueError(f"a sequence of {length} tokens does not fit the format (at most {MAX_SEQUENCE}); cut it")

    def _check_range(self, values: NDArray[Any]) -> None:
        if values.size == 0 or self.dtype.kind == "f" or values.dtype == self.dtype:
            return
        limits = np.iinfo(self.dtype)
        low, high = int(values.min()), int(values.max())
        if low < limits.min or high > limits.max:
            raise ValueError(
                f"token {low if low < limits.min else high} does not fit {self.dtype} in {self.prefix}; "
                "the vocabulary is larger than the file's token type allows"
            )

    def commit(self) -> None:
        """Put both files under their final names: on disk first, then ``.bin``, then ``.idx``."""
        if self._documents[-1] != len(self._lengths):
            self.end_document()
        index = _PartialFile(idx_path(self.prefix))
        try:
            self._write_index(index.stream)
            self._bin.sync()
            index.sync()
            # An old index must not stay beside a new .bin, whenever we are killed.
            index.target.unlink(missing_ok=True)
            self._bin.publish()
            index.publish()
        finally:
            index.discard()
        _sync_folder(bin_path(self.prefix).parent)

    def _write_index(self, file: BinaryIO) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.intc)
        documents = np.frombuffer(self._documents, dtype=np.int64)
        file.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(documents)))
        file.write(lengths.astype("<i4").data)
        file.write(byte_offsets(lengths, self.dtype.itemsize)[:-1].astype("<i8").data)
        file.write(documents.astype("<i8").data)
        if self._modes is not None:
            file.write(self._modes.tobytes())

    def discard(self) -> None:
        """Remove the temporary files; the final names stay as they were."""
        self._bin.discard()

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.discard()


def merge(prefixes: Iterable[str | os.PathLike[str]], output_prefix: str | os.PathLike[str]) -> None:
    """Concatenate data sets in the order given into ``output_prefix``; bytes are streamed, not held.

    Raises:
        ValueError: no input, or token types differ.
        IndexedDatasetError: an input is damaged.
    """
    inputs = [os.fspath(prefix) for prefix in prefixes]
    if not inputs:
        raise ValueError("merge needs at least one data set")
    first = IndexedDataset(inputs[0])
    modes = first.sequence_modes is not None
    with IndexedDatasetWriter(output_prefix, first.dtype, modes=modes) as writer:
        for prefix in inputs:
            writer.add_index(prefix)


class _PartialFile:
    """A file under a temporary hidden name beside ``target``, until ``publish`` gives it that name."""

    def __init__(self, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # mkstemp makes private files; data sets are shared like any other file
        self.target = target
        self.path = Path(name)
        self.stream: BinaryIO = os.fdopen(handle, "wb", buffering=1 << 20)

    def sync(self) -> None:
        self.stream.flush()
        os.fsync(self.stream.fileno())
        self.stream.close()

    def publish(self) -> None:
        os.replace(self.path, self.target)

    def discard(self) -> None:
        self.stream.close()
        self.path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every system can open or sync a folder
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
