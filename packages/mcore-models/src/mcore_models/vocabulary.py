"""How the vocabulary is padded and cut over tp. Pure integers, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VocabularySplit:
    """Rows of the word embedding on tp rank ``tp_rank``: equal slices of the vocabulary padded to a multiple of
    ``divisible_by * tp``. Padding rows exist in memory only: they are zero, get no probability and are never saved."""

    vocab_size: int
    divisible_by: int
    tp: int = 1
    tp_rank: int = 0

    @property
    def padded_size(self) -> int:
        """Rows over all ranks, padding included."""
        multiple = self.divisible_by * self.tp
        return -(-self.vocab_size // multiple) * multiple

    @property
    def local_rows(self) -> int:
        """Rows of each rank."""
        return self.padded_size // self.tp

    @property
    def first_row(self) -> int:
        """Global number of this rank's first row."""
        return self.tp_rank * self.local_rows
