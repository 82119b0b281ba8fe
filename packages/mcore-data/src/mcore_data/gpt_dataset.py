"""Samples of ``seq_length`` tokens cut from the shuffled documents of one indexed data set."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mcore_data.index_cache import cached_order
from mcore_data.indexed_dataset import IndexedDataset
from mcore_data.sample_order import SampleOrder, build_order

_NO_PAD = -1


class Sample(NamedTuple):
    """One sample: tokens, labels and positions int64 ``[s]``, loss mask float32 ``[s]`` (1 counts, 0 does not)."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    position_ids: NDArray[np.int64]


class SampleDataset(Protocol):
    """What a loader needs: a length, and sample i as a pure function of i. Must pickle (workers may be spawned)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


@dataclass(frozen=True)
class SampleRules:
    """How samples are cut and masked.

    Attributes:
        seq_length: tokens per sample.
        seed: of the order.
        eod: end-of-document id, needed for ``eod_mask_loss``.
        eod_mask_loss: no loss where the *input* is ``eod``.
        pad_id: an id that means padding in the data: no loss on it as a label, and it becomes 0. None: no such id;
            padding that is added here is always masked.
        add_extra_token: a sample reads one token more for its last label; else the last label is padding.
    """

    seq_length: int
    seed: int
    eod: int | None = None
    eod_mask_loss: bool = False
    pad_id: int | None = None
    add_extra_token: bool = True

    def __post_init__(self) -> None:
        if self.eod_mask_loss and self.eod is None:
            raise ValueError("--eod-mask-loss needs a tokenizer with an end-of-document token; this one has none")

    @property
    def extra(self) -> int:
        """Tokens read past the end of a sample."""
        return 1 if self.add_extra_token else 0


class GPTDataset:
    """One split of one indexed data set as GPT samples, in Megatron's order.

    Its length is the number of samples that the epochs hold, at least ``num_samples``. Pickles without its indices,
    which are rebuilt (or read from ``cache_folder``) on arrival.

    Args:
        indexed: the tokens.
        split: sequences ``[begin, end)``; see ``splits.split_range``.
        rules: how samples are cut and masked.
        num_samples: samples wanted at least; None is one epoch.
        keep_partial: keep a last, padded sample of fewer tokens.
        cache_folder: where built indices are kept; None builds them in memory.

    Raises:
        ValueError: the split has no tokens.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        split: tuple[int, int],
        rules: SampleRules,
        *,
        num_samples: int | None,
        keep_partial: bool = False,
        cache_folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self.indexed = indexed
        self.split = split
        self.rules = rules
        self.num_samples = num_samples
        self.keep_partial = keep_partial
        self.cache_folder = cache_folder
        self.order = self._load_order()

    def _load_order(self) -> SampleOrder:
        options = {
            "seq_length": self.rules.seq_length,
            "num_samples": self.num_samples,
            "seed": self.rules.seed,
            "extra": self.rules.extra,
            "keep_partial": self.keep_partial,
        }

        def build() -> SampleOrder:
            lengths = np.ascontiguousarray(self.indexed.sequence_lengths)
            return build_order(lengths, self.split, **options)  # type: ignore[arg-type]

        if self.cache_folder is None:
            return build()
        return cached_order(Path(self.cache_folder), self.indexed.prefix, {**options, "split": self.split}, build)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self.indexed.prefix}")
        rules, length = self.rules, self.rules.seq_length
        text = np.full(length + 1, _NO_PAD, dtype=np.int64)
        count = self._read(int(self.order.shuffle[index]), text[: length + rules.extra])
        tokens, labels = text[:-1], text[1:].copy()
        loss_mask = np.ones(length, dtype=np.float32)
        if rules.eod_mask_loss:
            loss_mask[tokens == rules.eod] = 0.0
        if rules.pad_id is not None:
            loss_mask[labels == rules.pad_id] = 0.0
            tokens[tokens == rules.pad_id] = 0
            labels[labels == rules.pad_id] = 0
        # Padding is known by its position, so no real token can be taken for it.
        loss_mask[max(count - 1, 0) :] = 0.0
        labels[max(count - 1, 0) :] = 0
        tokens[count:] = 0
        return Sample(tokens, labels, loss_mask, np.arange(length, dtype=np.int64))

    def _read(self, sample: int, out: NDArray[np.int64]) -> int:
        """Fill ``out`` with the tokens of stream sample ``sample``; returns how many there are."""
        (first, begin), (last, end) = self.order.boundaries[sample : sample + 2].tolist()
        documents = self.order.documents
        at = 0
        for position in range(first, last + 1):
            stop = end + self.rules.extra if position == last else None
            part = self.indexed.read(int(documents[position]), begin if position == first else 0, stop)
            out[at : at + len(part)] = part
            at += len(part)
        return at

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (
            self.indexed,
            self.split,
            self.rules,
            self.num_samples,
            self.keep_partial,
            self.cache_folder,
        )


def _restore(
    indexed: IndexedDataset,
    split: tuple[int, int],
    rules: SampleRules,
    num_samples: int | None,
    keep_partial: bool,
    cache_folder: str | None,
) -> GPTDataset:
    return GPTDataset(
        indexed, split, rules, num_samples=num_samples, keep_partial=keep_partial, cache_folder=cache_folder
    )
