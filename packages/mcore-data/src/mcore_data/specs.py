"""Frozen specs that plugins of mcore-data return, and the protocol of tokenizers. This module imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:  # the command line lists plugins without paying for pydantic
    from mcore_data.config import DataConfig


# Fields of DataConfig that only some data sets read.
OPTIONAL_FIELDS = ("data_path", "split", "eod_mask_loss", "data_cache_path")


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back. Must pickle; nothing is added to what the text says (no BOS, no EOS).

    Special text in a corpus is text: the id ``eod`` never comes out of ``encode``.
    """

    @property
    def name(self) -> str:
        """Its plugin name."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def eod(self) -> int | None:
        """Id that ends a document, or None if there is none."""

    @property
    def fingerprint(self) -> str:
        """Hash of everything that its ids depend on."""

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; ``eod`` and ids outside the vocabulary give nothing."""


@dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer, chosen by ``--tokenizer-type``: ``build(config)`` returns a ``Tokenizer``.

    ``fields`` are the ``DataConfig`` fields that it reads, of ``tokenizer_model``, ``vocab_file`` and ``merge_file``;
    giving another of them is refused.
    """

    name: str
    build: Callable[[DataConfig], Tokenizer]
    fields: tuple[str, ...] = ()
    summary: str = ""


@dataclass(frozen=True)
class DatasetSpec:
    """A data set, chosen by ``--dataset``.

    ``build(config, *, tokenizer, num_samples, seed)`` returns three ``SampleDataset`` for train, validation and test,
    None where ``num_samples`` is 0. ``check(config)``, if given, returns the problems that are known before any
    process starts. ``fields`` are those of ``OPTIONAL_FIELDS`` that it reads; giving another of them is refused.
    """

    name: str
    build: Callable[..., Any]
    check: Callable[..., list[str]] | None = None
    fields: tuple[str, ...] = OPTIONAL_FIELDS
    summary: str = ""
