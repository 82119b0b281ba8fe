"""From text to ``PREFIX_KEY_document.bin/.idx``, with bounded memory and the same bytes for any number of workers.

One document per JSON line or text file. Its tokens are followed by the end-of-document id if asked for; an empty
text gives an empty document without one, as in Megatron. Blank lines are passed over.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_data.indexed_writer import IndexedDatasetWriter, token_dtype
from mcore_data.sources import (
    TEXT_KEY,
    JsonLines,
    TextFiles,
    WorkItem,
    expand_inputs,
    is_json_lines,
    read_documents,
    work_items,
)
from mcore_data.specs import Tokenizer


@dataclass(frozen=True)
class Progress:
    """Where a preparation stands: bytes of input done and in total, documents and tokens so far."""

    bytes_done: int
    bytes_total: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class PrepareReport:
    """What a preparation wrote and passed over; documents and tokens are summed over all keys."""

    prefixes: tuple[str, ...]
    documents: int
    empty_documents: int
    tokens: int
    skipped_files: int
    blank_lines: int
    dtype: str


@dataclass(frozen=True)
class _Encoded:
    """Tokens of one work item by key: back to back, and the length of each document."""

    tokens: dict[str, NDArray[Any]]
    lengths: dict[str, NDArray[np.int64]]
    source_bytes: int
    skipped_files: int
    blank_lines: int


@dataclass(frozen=True)
class _Encoder:
    """Turns a work item into tokens; sent once to every worker."""

    tokenizer: Tokenizer
    keys: tuple[str, ...]
    append_eod: bool

    def __call__(self, item: WorkItem) -> _Encoded:
        documents = read_documents(item, self.keys)
        tokens, lengths = {}, {}
        for key, texts in documents.texts.items():
            try:
                tokens[key], lengths[key] = self._encode(texts)
            except ValueError as error:
                raise ValueError(f"{item.place}: {error}") from None
        return _Encoded(tokens, lengths, item.source_bytes, documents.skipped_files, documents.blank_lines)

    def _encode(self, texts: list[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        dtype = token_dtype(self.tokenizer.vocab_size)
        encoded = self.tokenizer.encode_batch(texts)
        if self.append_eod:
            for ids in encoded:
                if ids:
                    ids.append(self.tokenizer.eod)  # type: ignore[arg-type]
        lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
        parts = [np.array(ids, dtype=dtype) for ids in encoded]
        return (np.concatenate(parts) if parts else np.empty(0, dtype)), lengths


def prepare(
    inputs: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    json_keys: Sequence[str] = (TEXT_KEY,),
    append_eod: bool = False,
    workers: int = 1,
    on_progress: Callable[[Progress], None] | None = None,
) -> PrepareReport:
    """Tokenise ``inputs`` into one data set per key.

    Args:
        inputs: JSON-lines files (by suffix, also ``.gz``), text files, folders.
        output_prefix: data sets are named ``{output_prefix}_{key}_document``.
        tokenizer: must pickle if ``workers`` > 1.
        json_keys: keys of the JSON objects; text files are the key ``text``.
        append_eod: end every document that is not empty with the tokenizer's end of document.
        workers: processes that tokenise; 1 works in this process. They are spawned: a script that calls this with
            more than one needs ``if __name__ == "__main__"``.
        on_progress: called after every item of about a megabyte.

    Raises:
        ValueError: bad input (``file:line``), no documents, a tokenizer without end of document, bad arguments.
    """
    keys = tuple(json_keys)
    if not keys or len(set(keys)) != len(keys) or any("/" in key or not key for key in keys):
        raise ValueError(f"--json-keys {list(keys)}: give one or more different keys that can be part of a file name")
    if append_eod and tokenizer.eod is None:
        raise ValueError(f"--append-eod: {tokenizer.name} has no end-of-document token; drop the flag")
    if workers < 1:
        raise ValueError(f"--workers {workers} must be at least 1")
    files = expand_inputs(inputs)
    if keys != (TEXT_KEY,) and not all(is_json_lines(*file) for file in files):
        other = next(path for path, listed in files if not is_json_lines(path, listed))
        raise ValueError(f"--json-keys {', '.join(keys)}: {other} is a text file, which only has the key {TEXT_KEY!r}")
    total = sum(path.stat().st_size for path, _ in files)
    encoder = _Encoder(tokenizer, keys, append_eod)
    with ExitStack() as stack:
        writers = {
            key: stack.enter_context(
                IndexedDatasetWriter(f"{os.fspath(output_prefix)}_{key}_document", token_dtype(tokenizer.vocab_size))
            )
            for key in keys
        }
        return _write(_encode_all(work_items(files), encoder, workers), writers, total, on_progress)


def _write(
    encoded: Iterable[_Encoded],
    writers: dict[str, IndexedDatasetWriter],
    bytes_total: int,
    on_progress: Callable[[Progress], None] | None,
) -> PrepareReport:
    done = skipped = blank = empty = 0
    documents = tokens = 0
    for item in encoded:
        for key, writer in writers.items():
            writer.add_documents(item.tokens[key], item.lengths[key])
            empty += int(np.count_nonzero(item.lengths[key] == 0))
        done += item.source_bytes
        skipped += item.skipped_files
        blank += item.blank_lines
        documents = sum(writer.num_documents for writer in writers.values())
        tokens = sum(writer.num_tokens for writer in writers.values())
        if on_progress is not None:
            on_progress(Progress(done, bytes_total, documents, tokens))
    if documents == 0:
        raise ValueError(f"no documents in the input ({blank} blank lines, {skipped} files that are not text)")
    prefixes = tuple(writer.prefix for writer in writers.values())
    dtype = next(iter(writers.values())).dtype.name
    return PrepareReport(prefixes, documents, empty, tokens, skipped, blank, dtype)


def _encode_all(items: Iterable[WorkItem], encoder: _Encoder, workers: int) -> Iterator[_Encoded]:
    if workers == 1:
        yield from map(encoder, items)
        return
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pipes = deque(_start_worker(context, encoder, stack) for _ in range(workers))
        idle, busy = pipes, deque[Connection]()
        # A worker has at most one item, and results are taken in the order in which items were given: the output is
        # the same for any number of workers, and neither side can block the other with a full pipe.
        for item in items:
            if not idle:
                yield _receive(busy, idle)
            pipe = idle.popleft()
            pipe.send(item)
            busy.append(pipe)
        while busy:
            yield _receive(busy, idle)


def _receive(busy: deque[Connection], idle: deque[Connection]) -> _Encoded:
    pipe = busy.popleft()
    try:
        result = pipe.recv()
    except EOFError:
        raise RuntimeError("a worker that tokenises died; is there enough memory? try fewer --workers") from None
    if isinstance(result, BaseException):
        raise result
    idle.append(pipe)
    assert isinstance(result, _Encoded)
    return result


def _start_worker(context: Any, encoder: _Encoder, stack: ExitStack) -> Connection:
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, encoder), daemon=True)
    process.start()
    theirs.close()

    def stop() -> None:
        ours.close()
        process.join(timeout=5)
        if process.is_alive():
            process.kill()
            process.join()

    stack.callback(stop)
    connection: Connection = ours
    return connection


def _work(pipe: Connection, encoder: _Encoder) -> None:
    # The library's own threads would fight over the cores that the other workers use.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    while True:
        try:
            item: JsonLines | TextFiles = pipe.recv()
        except (EOFError, OSError, KeyboardInterrupt):
            return
        try:
            pipe.send(encoder(item))
        except (BrokenPipeError, KeyboardInterrupt):
            return
        except ValueError as error:
            pipe.send(error)
        except Exception:
            pipe.send(RuntimeError(f"a worker that tokenises failed:\n{traceback.format_exc()}"))
