"""Tokenizers that need no library: bytes, and text that is already ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_data.config import DataConfig

NUM_BYTES = 256


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes as ids 0-255, and 256 as end of document."""

    name: str = "ByteTokenizer"
    vocab_size: int = NUM_BYTES + 1
    eod: int | None = NUM_BYTES
    fingerprint: str = "bytes-257"

    def encode(self, text: str) -> list[int]:
        """The bytes of ``text``."""
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The bytes of each text."""
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the bytes; broken UTF-8 gives replacement characters."""
        return bytes(token for token in ids if 0 <= token < NUM_BYTES).decode(errors="replace")


@dataclass(frozen=True)
class NullTokenizer:
    """Text of ids separated by white space; ``num_ids`` is the end of document, as in Megatron."""

    num_ids: int
    name: str = "NullTokenizer"

    @property
    def vocab_size(self) -> int:
        """The ids of the text, and the end of document."""
        return self.num_ids + 1

    @property
    def eod(self) -> int | None:
        """The id after those of the text."""
        return self.num_ids

    @property
    def fingerprint(self) -> str:
        """Depends on the number of ids only."""
        return f"null-{self.num_ids}"

    def encode(self, text: str) -> list[int]:
        """The numbers in ``text``.

        Raises:
            ValueError: something else than a number from 0 to ``num_ids - 1``.
        """
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise ValueError(f"NullTokenizer takes numbers separated by white space: {error}") from None
        for token in ids:
            if not 0 <= token < self.num_ids:
                raise ValueError(f"NullTokenizer: id {token} is not in 0..{self.num_ids - 1}; raise --tokenizer-model")
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The numbers in each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The numbers, separated by blanks."""
        return " ".join(str(token) for token in ids if 0 <= token < self.num_ids)


def build_byte_tokenizer(config: DataConfig) -> ByteTokenizer:
    """The byte tokenizer; it reads nothing of ``config``."""
    return ByteTokenizer()


def build_null_tokenizer(config: DataConfig) -> NullTokenizer:
    """A null tokenizer of ``--tokenizer-model`` ids.

    Raises:
        ValueError: that is not a positive number.
    """
    text = config.tokenizer_model or ""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(f"NullTokenizer needs --tokenizer-model with the number of ids, such as 50000; it is {text!r}")
    return NullTokenizer(int(text))
