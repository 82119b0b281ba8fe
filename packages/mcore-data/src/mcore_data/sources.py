"""Where documents come from: JSON lines (also gzipped), text files, and folders of text files.

A source is cut into small work items in a fixed order; an item says where its text is and is read by whoever
tokenises it, so that folders are read in parallel. Memory is bounded by the items in flight.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LINES_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
JSON_SUFFIXES = (".json", ".json.gz")
ITEM_BYTES = 1 << 20
TEXT_KEY = "text"


@dataclass(frozen=True)
class JsonLines:
    """Lines of a JSON-lines file, the first of them number ``first_line``; ``source_bytes`` as on disk."""

    path: Path
    first_line: int
    lines: tuple[bytes, ...]
    source_bytes: int

    @property
    def place(self) -> str:
        """File and lines, for messages."""
        return f"{self.path}:{self.first_line}-{self.first_line + len(self.lines) - 1}"


@dataclass(frozen=True)
class TextFiles:
    """Files that are one document each; ``listed`` are those named by the user, which must be text."""

    paths: tuple[Path, ...]
    source_bytes: int
    listed: bool

    @property
    def place(self) -> str:
        """First and last file, for messages."""
        return f"{self.paths[0]} .. {self.paths[-1]}" if len(self.paths) > 1 else str(self.paths[0])


WorkItem = JsonLines | TextFiles


@dataclass(frozen=True)
class Documents:
    """Texts of one work item, ``texts[key][document]``, and what was passed over in it."""

    texts: dict[str, list[str]]
    skipped_files: int = 0
    blank_lines: int = 0


def is_json_lines(path: Path, listed: bool) -> bool:
    """Whether a file holds JSON lines, by its name; ``.json`` does if the user named it, in a folder it is text."""
    return path.name.lower().endswith(LINES_SUFFIXES + JSON_SUFFIXES if listed else LINES_SUFFIXES)


def expand_inputs(inputs: Sequence[str | os.PathLike[str]]) -> list[tuple[Path, bool]]:
    """The files of ``inputs`` in the order given, and whether each was named itself.

    A folder stands for all its files, sorted by path; hidden files and folders in it are passed over, links to
    folders are not followed.

    Raises:
        ValueError: an input does not exist, or there are none.
    """
    files: list[tuple[Path, bool]] = []
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            files += [(file, False) for file in _walk(path)]
        elif path.is_file():
            files.append((path, True))
        else:
            raise ValueError(f"--input {path}: no such file or folder")
    if not files:
        raise ValueError(f"--input {', '.join(map(str, inputs)) or '(nothing)'}: no files found")
    return files


def _walk(folder: Path) -> list[Path]:
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(root, name) for name in names if not name.startswith(".")]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(folder).parts)


def work_items(files: Iterable[tuple[Path, bool]]) -> Iterator[WorkItem]:
    """Cut files into items of about a megabyte, in order."""
    group: list[Path] = []
    size = 0
    group_listed = False
    for path, listed in files:
        if group and (size >= ITEM_BYTES or is_json_lines(path, listed) or listed != group_listed):
            yield TextFiles(tuple(group), size, group_listed)
            group, size = [], 0
        if is_json_lines(path, listed):
            yield from _json_items(path)
        else:
            group.append(path)
            size += path.stat().st_size
            group_listed = listed
    if group:
        yield TextFiles(tuple(group), size, group_listed)


def _json_items(path: Path) -> Iterator[JsonLines]:
    with open(path, "rb") as raw:
        packed = path.suffix.lower() == ".gz"
        stream: Any = gzip.GzipFile(fileobj=raw) if packed else raw
        number, position = 1, 0
        try:
            while lines := stream.readlines(ITEM_BYTES):
                # Of a gzipped file the progress is that of the packed bytes, as its full size is not known.
                now = raw.tell() if packed else position + sum(map(len, lines))
                yield JsonLines(path, number, tuple(lines), now - position)
                number, position = number + len(lines), now
        except (EOFError, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: damaged gzip file after line {number - 1}: {error}") from None


def read_documents(item: WorkItem, keys: Sequence[str]) -> Documents:
    """The texts of one item.

    Raises:
        ValueError: a bad line (named as ``file:line``), or a listed file that is not UTF-8 text.
    """
    if isinstance(item, JsonLines):
        return _read_json(item, keys)
    return _read_text(item, keys)


def _read_json(item: JsonLines, keys: Sequence[str]) -> Documents:
    texts: dict[str, list[str]] = {key: [] for key in keys}
    blank = 0
    for number, line in enumerate(item.lines, start=item.first_line):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            blank += 1
            continue
        where = f"{item.path}:{number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON ({error}); every line must be one object") from None
        if not isinstance(record, dict):
            raise ValueError(f"{where}: expected an object, found {type(record).__name__}")
        for key in keys:
            text = _text_of(record, key, where)
            # An escape may be half a surrogate pair, which no tokenizer takes.
            texts[key].append(_without_surrogates(text) if b"\\u" in line else text)
    return Documents(texts, blank_lines=blank)


def _text_of(record: dict[str, Any], key: str, where: str) -> str:
    if key not in record:
        raise ValueError(
            f"{where}: no key {key!r} (the object has {', '.join(map(repr, record)) or 'none'}); see --json-keys"
        )
    text = record[key]
    if not isinstance(text, str):
        raise ValueError(f"{where}: {key!r} must be a string, found {type(text).__name__}")
    return text


def _without_surrogates(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read_text(item: TextFiles, keys: Sequence[str]) -> Documents:
    texts: list[str] = []
    skipped = 0
    for path in item.paths:
        text = decode_text(path.read_bytes())
        if text is not None:
            texts.append(text)
        elif item.listed:
            raise ValueError(f"{path}: not UTF-8 text; convert it, or name its folder to pass over such files")
        else:
            skipped += 1
    return Documents({key: texts for key in keys}, skipped_files=skipped)


def decode_text(raw: bytes) -> str | None:
    """UTF-8 text, without a byte-order mark, or None for binary data (bytes that are not UTF-8, or a zero byte)."""
    if b"\0" in raw:
        return None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
