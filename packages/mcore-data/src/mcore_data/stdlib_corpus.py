"""The quick start's corpus: the source text of the running Python's standard library, prepared once per machine."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

from filelock import FileLock

from mcore_data.index_cache import publish
from mcore_data.indexed_writer import IndexedDatasetWriter, token_dtype
from mcore_data.sources import decode_text
from mcore_data.specs import Tokenizer

FORMAT = 1
MAX_BYTES = 12_000_000
# Tests, other people's packages, and the generated character tables, which are no text to learn from.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}
)
_BATCH = 64


def default_cache_folder() -> Path:
    """``$XDG_CACHE_HOME/mcore``, or ``~/.cache/mcore``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base) / "mcore" if base else Path.home() / ".cache" / "mcore"


def stdlib_folder() -> Path:
    """The folder of the standard library's sources."""
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_files(folder: Path, max_bytes: int = MAX_BYTES) -> list[tuple[str, int]]:
    """Relative path and size of the sources under ``folder``, at most ``max_bytes`` of them in all.

    They are in the order of a hash of their paths: always the same, and every split gets files of every kind.

    Raises:
        ValueError: the folder has no sources.
    """
    found: list[tuple[str, int]] = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        for name in names:
            path = Path(root, name)
            if name.endswith(".py") and path.is_file():
                found.append((path.relative_to(folder).as_posix(), path.stat().st_size))
    found.sort(key=lambda file: hashlib.sha256(file[0].encode()).digest())
    kept, total = [], 0
    for name, size in found:
        if total + size <= max_bytes:
            kept.append((name, size))
            total += size
    if not kept:
        raise ValueError(
            f"--dataset stdlib: no Python sources in {folder}; this Python has its library packed, so prepare a text "
            "of your own with `mcore data prepare` and give --data-path"
        )
    return kept


def stdlib_prefix(tokenizer: Tokenizer, cache_folder: str | os.PathLike[str] | None = None) -> str:
    """Prefix of the prepared corpus, which is made at the first call and found at later ones.

    Any number of processes may call it at once: one prepares, the others wait for its lock, which the system
    releases if that process dies.

    Raises:
        ValueError: no sources, no end-of-document token, or the cache folder cannot be written.
    """
    if tokenizer.eod is None:
        raise ValueError(f"--dataset stdlib needs an end-of-document token, which {tokenizer.name} does not have")
    folder, source = Path(cache_folder) if cache_folder is not None else default_cache_folder(), stdlib_folder()
    files = stdlib_files(source)
    target = folder / f"stdlib-{_key(files, tokenizer)}"
    if not target.is_dir():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / f"{target.name}.lock"):
                if not target.is_dir():
                    _prepare(source, files, tokenizer, target)
        except OSError as error:
            raise ValueError(f"{folder}: cannot be written ({error}); give another --data-cache-path") from error
    return str(target / "text_document")


def _key(files: list[tuple[str, int]], tokenizer: Tokenizer) -> str:
    text = json.dumps([FORMAT, sys.version, files, tokenizer.name, tokenizer.fingerprint])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _prepare(source: Path, files: list[tuple[str, int]], tokenizer: Tokenizer, target: Path) -> None:
    assert tokenizer.eod is not None
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        partial.chmod(0o755)
        with IndexedDatasetWriter(partial / "text_document", token_dtype(tokenizer.vocab_size)) as writer:
            for start in range(0, len(files), _BATCH):
                texts = [decode_text((source / name).read_bytes()) for name, _ in files[start : start + _BATCH]]
                for ids in tokenizer.encode_batch([text for text in texts if text]):
                    writer.add_document([*ids, tokenizer.eod], [len(ids) + 1])
        publish(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
