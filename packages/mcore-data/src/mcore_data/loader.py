"""Batches of one data-parallel rank, as a function of the number of consumed samples. No torch."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_data.gpt_dataset import Sample, SampleDataset
from mcore_data.sampler import num_micro_batches, rank_sample_ids

FILLER = -1


@dataclass(frozen=True)
class Batch:
    """One micro-batch: ids, labels and positions int64 ``[b, s]``, loss mask float32 ``[b, s]``, sample ids ``[b]``.

    A filler row (see ``GlobalBatchLoader``) has sample id -1 and an all-zero loss mask.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    position_ids: NDArray[np.int64]
    sample_ids: NDArray[np.int64]


class GlobalBatchLoader:
    """Micro-batches of one rank for any position of the data; it keeps no position of its own.

    The next global batch is prepared by one background thread while the caller works on this one. What the thread
    holds is a guess, used only if the caller asks for exactly that position, so nothing is lost or reordered.

    Args:
        dataset: sample i as a function of i.
        global_batch_size: samples of one step over all ranks.
        micro_batch_size: rows of a ``Batch``.
        dp_rank: this rank among the ``dp_size`` that share the step.
        dp_size: data-parallel ranks.
        pad_last: a global batch that reaches past the end of the data is filled up with rows without loss, so that
            a last partial batch of an evaluation counts as what it is; otherwise it is refused.
        prefetch: use the background thread.

    Raises:
        ValueError: the sizes do not divide, or there is no such rank.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        pad_last: bool = False,
        prefetch: bool = True,
    ) -> None:
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.pad_last = pad_last
        self.prefetch = prefetch
        self.num_micro_batches = num_micro_batches(global_batch_size, micro_batch_size, dp_size)
        self._ids(0)  # refuses a wrong rank now
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: tuple[int, Future[list[Batch]]] | None = None

    def micro_batches(self, consumed_samples: int) -> list[Batch]:
        """This rank's micro-batches of the global batch that starts at sample ``consumed_samples``.

        Raises:
            ValueError: the data ends before the batch does (with ``pad_last``: before it starts).
        """
        self._check_end(consumed_samples)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == consumed_samples:
            batches = ahead[1].result()
        else:
            batches = self._build(consumed_samples)
        following = consumed_samples + self.global_batch_size
        if self.prefetch and following < len(self.dataset):
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="mcore-data")
            self._ahead = following, self._thread.submit(self._build, following)
        return batches

    def close(self) -> None:
        """End the background thread; the loader may be used again."""
        self._ahead = None
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None

    def _ids(self, consumed_samples: int) -> NDArray[np.int64]:
        return rank_sample_ids(
            consumed_samples,
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
        )

    def _check_end(self, consumed_samples: int) -> None:
        samples, end = len(self.dataset), consumed_samples + self.global_batch_size
        if end > samples and not (self.pad_last and consumed_samples < samples):
            raise ValueError(f"samples {consumed_samples}..{end - 1} were asked for, but the data set has {samples}")

    def _build(self, consumed_samples: int) -> list[Batch]:
        return [self._assemble(ids) for ids in self._ids(consumed_samples)]

    def _assemble(self, ids: NDArray[np.int64]) -> Batch:
        end = len(self.dataset)
        known = ids < end
        rows = [self.dataset[sample] if sample < end else self._filler() for sample in ids.tolist()]
        tokens, labels, loss_mask, position_ids = (np.stack(column) for column in zip(*rows, strict=True))
        return Batch(tokens, labels, loss_mask, position_ids, np.where(known, ids, FILLER))

    def _filler(self) -> Sample:
        like = self.dataset[0]
        return Sample(
            np.zeros_like(like.tokens), np.zeros_like(like.labels), np.zeros_like(like.loss_mask), like.position_ids
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_thread": None, "_ahead": None}
