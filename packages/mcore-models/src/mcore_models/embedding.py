"""The input side of the first stage: word embedding, learned positions, dropout."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from mcore_models.dropout import DropoutState, HiddenDropout
from mcore_parallel.axis import Axis
from mcore_parallel.embedding import VocabParallelEmbedding


class Embedding(nn.Module):
    """Word embedding plus, if ``positions`` ``[p, h]`` is given, learned position embeddings."""

    def __init__(
        self,
        words: VocabParallelEmbedding,
        positions: nn.Parameter | None,
        *,
        dropout: HiddenDropout,
        tp: Axis,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        self.word_embeddings = words
        self.position_embeddings = positions
        self.dropout = dropout
        self.tp, self.sequence_parallel = tp, sequence_parallel

    def forward(self, tokens: Tensor, positions: Tensor, dropout: DropoutState | None) -> Tensor:
        """Tokens ``[b, s]`` at positions ``[s]`` or ``[b, s]`` -> ``[s, b, h]`` (``[s/tp, b, h]`` under sequence
        parallelism).

        Raises:
            ValueError: the sequence is longer than the table of learned positions.
        """
        out: Tensor = self.word_embeddings(tokens)
        if self.position_embeddings is not None:
            out = out + self._positions(positions, self.position_embeddings)
        return self.dropout(out, dropout)

    def _positions(self, positions: Tensor, table: Tensor) -> Tensor:
        positions = positions.unsqueeze(0) if positions.dim() == 1 else positions
        length = positions.shape[1]
        if length > table.shape[0]:
            raise ValueError(
                f"a sequence of {length} tokens is longer than max-position-embeddings {table.shape[0]}; "
                "shorten it or train with more positions"
            )
        if self.sequence_parallel:
            extent = length // self.tp.size
            positions = positions[:, self.tp.rank * extent : (self.tp.rank + 1) * extent]
        return functional.embedding(positions.t(), table)
