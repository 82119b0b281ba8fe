"""Random tokens: sample i is a pure function of (seed, split, i)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mcore_data.gpt_dataset import Sample


@dataclass(frozen=True)
class MockDataset:
    """``num_samples`` samples of uniform random ids below ``vocab_size``; ``stream`` tells splits apart."""

    num_samples: int
    seq_length: int
    vocab_size: int
    seed: int
    stream: int = 0

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples} mock samples")
        # The counter leaves 2**64 draws to each sample.
        bits = np.random.Philox(key=[self.seed, self.stream], counter=[0, index, 0, 0])
        text = np.random.Generator(bits).integers(0, self.vocab_size, self.seq_length + 1, dtype=np.int64)
        ones = np.ones(self.seq_length, dtype=np.float32)
        return Sample(text[:-1], text[1:].copy(), ones, np.arange(self.seq_length, dtype=np.int64))
