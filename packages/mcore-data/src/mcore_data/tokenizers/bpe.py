"""Tokenizers on top of the ``tokenizers`` library: GPT-2's file pair and any ``tokenizer.json``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mcore_data.config import DataConfig

GPT2_EOD = "<|endoftext|>"

# End-of-text tokens of published tokenizers, in the order in which they are looked for.
KNOWN_EODS = (
    GPT2_EOD,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<｜end▁of▁sentence｜>",
    "<|im_end|>",
)


class LibraryTokenizer:
    """A ``tokenizers.Tokenizer`` with one end-of-document id.

    The text of special tokens is encoded as ordinary text, no post-processor adds anything, and the file's own
    truncation and padding are off.

    Args:
        backend: the library's tokenizer; it is changed as said above.
        name: plugin name.
        eod: end-of-document id, or None.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, name: str, eod: int | None) -> None:
        self._name = name
        self._eod = eod
        self._set_backend(backend)

    def _set_backend(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        self._vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._fingerprint = hashlib.sha256(f"{self._name}:{self._eod}:{backend.to_str()}".encode()).hexdigest()

    @property
    def name(self) -> str:
        """Its plugin name."""
        return self._name

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; a vocabulary may have holes."""
        return self._vocab_size

    @property
    def eod(self) -> int | None:
        """Id that ends a document, or None."""
        return self._eod

    @property
    def fingerprint(self) -> str:
        """Hash of the vocabulary and all rules."""
        return self._fingerprint

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, on all cores that the library was left."""
        return [item.ids for item in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; special tokens and ids outside the vocabulary give nothing."""
        known = [token for token in ids if token != self._eod and 0 <= token < self._vocab_size]
        text: str = self._backend.decode(known, skip_special_tokens=True)
        return text

    def __getstate__(self) -> dict[str, Any]:
        return {"json": self._backend.to_str(), "name": self._name, "eod": self._eod}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._name, self._eod = state["name"], state["eod"]
        self._set_backend(tokenizers.Tokenizer.from_str(state["json"]))


def build_gpt2_tokenizer(config: DataConfig) -> LibraryTokenizer:
    """GPT-2's byte-level BPE from ``--vocab-file`` and ``--merge-file``.

    Raises:
        ValueError: one of them is not given, missing or broken, or the vocabulary lacks a byte.
    """
    vocab_file = _existing(config.vocab_file, "--vocab-file", "GPT2BPETokenizer")
    merge_file = _existing(config.merge_file, "--merge-file", "GPT2BPETokenizer")
    vocab = _read_vocab(vocab_file)
    lacking = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - vocab.keys())
    if lacking:
        raise ValueError(
            f"--vocab-file {vocab_file}: {len(lacking)} of the 256 byte symbols are missing (first {lacking[0]!r}); "
            "text with those bytes would be lost, so use a byte-level vocabulary"
        )
    try:
        model = models.BPE.from_file(str(vocab_file), str(merge_file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"--merge-file {merge_file} does not fit --vocab-file {vocab_file}: {error}") from None
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return LibraryTokenizer(backend, name="GPT2BPETokenizer", eod=vocab.get(GPT2_EOD))


def _read_vocab(path: Path) -> dict[str, int]:
    try:
        vocab = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"--vocab-file {path}: not JSON ({error})") from None
    if not isinstance(vocab, dict) or not all(isinstance(number, int) for number in vocab.values()):
        raise ValueError(f"--vocab-file {path}: expected an object of token -> number")
    return vocab


def build_huggingface_tokenizer(config: DataConfig) -> LibraryTokenizer:
    """The tokenizer of the file ``--tokenizer-model`` (``tokenizer.json``, or the folder that holds it).

    The end of document is the ``eos_token`` of a ``tokenizer_config.json`` beside it, else the first of ``KNOWN_EODS``
    among the file's special tokens, else None.

    Raises:
        ValueError: the file is not given, missing or broken.
    """
    given = config.tokenizer_model
    if given is not None and Path(given).is_dir():
        given = str(Path(given) / "tokenizer.json")
    path = _existing(given, "--tokenizer-model", "HuggingFaceTokenizer")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"--tokenizer-model {path}: not a tokenizer.json of the tokenizers library: {error}") from None
    return LibraryTokenizer(backend, name="HuggingFaceTokenizer", eod=_find_eod(backend, path))


def _find_eod(backend: tokenizers.Tokenizer, path: Path) -> int | None:
    settings = path.with_name("tokenizer_config.json")
    if settings.is_file():
        declared = json.loads(settings.read_text(encoding="utf-8")).get("eos_token")
        content = declared.get("content") if isinstance(declared, dict) else declared
        if content is not None:
            token: int | None = backend.token_to_id(content)
            if token is None:
                raise ValueError(
                    f"{settings}: eos_token {content!r} is not in {path.name}; the files do not belong together"
                )
            return token
    special = {added.content: number for number, added in backend.get_added_tokens_decoder().items() if added.special}
    for content in KNOWN_EODS:
        if content in special:
            return special[content]
    return None


def _existing(path: str | None, flag: str, tokenizer: str) -> Path:
    if path is None:
        raise ValueError(f"{tokenizer} needs {flag}")
    if not Path(path).is_file():
        raise ValueError(f"{flag} {path}: no such file")
    return Path(path)
