"""The parameters one rank holds, as sizes alone, in the order in which a stage builds them. Pure integers, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mcore_models.config import ModelConfig
from mcore_models.heads import HeadSplit
from mcore_models.specs import StageSpec, holds_both_ends
from mcore_models.vocabulary import VocabularySplit


@dataclass(frozen=True)
class LocalParameter:
    """``num_elements`` as stored (padding included), whether weight decay applies, and by axis how many elements have a
    gradient that is still to be summed over it after backward; ``chunk``: the model chunk it belongs to."""

    num_elements: int
    decay: bool = True
    partial: Mapping[str, int] = field(default_factory=dict)
    chunk: int = 0


@dataclass(frozen=True)
class RankShape:
    """What decides which part of a stage a rank holds: its tp rank, and whether norms see only a slice of positions."""

    tp: int = 1
    tp_rank: int = 0
    sequence_parallel: bool = False


def local_parameters(
    config: ModelConfig, *, stages: Sequence[StageSpec], rank: RankShape, vocab_size: int
) -> list[LocalParameter]:
    """The parameters of a rank that holds ``stages``, one per model chunk, in build order, as
    :mod:`mcore_models.build` makes them.

    A tied word embedding whose two ends are on the rank is one parameter and listed once.
    """
    split = VocabularySplit(vocab_size, config.make_vocab_size_divisible_by, rank.tp, rank.tp_rank)
    parts = _Parts(config, rank, split, tied_stages=config.tied and not holds_both_ends(stages))
    return [
        replace(parameter, chunk=chunk)
        for chunk, stage in enumerate(stages)
        for parameter in parts.stage(stage, shares_embedding=config.tied and holds_both_ends(stages))
    ]


@dataclass(frozen=True)
class _Parts:
    config: ModelConfig
    rank: RankShape
    split: VocabularySplit
    tied_stages: bool

    def stage(self, stage: StageSpec, *, shares_embedding: bool) -> Iterator[LocalParameter]:
        if stage.is_first:
            yield from self.embedding()
        for _ in range(stage.num_layers):
            yield from self.layer()
        if stage.is_last:
            if not shares_embedding:
                yield self.vocabulary(tied_stages=self.tied_stages)
            yield from self.norm()

    def replicated(self, num_elements: int, *, decay: bool = False) -> LocalParameter:
        partial = {"tp": num_elements} if self.rank.sequence_parallel and self.rank.tp > 1 else {}
        return LocalParameter(num_elements, decay, partial)

    def vocabulary(self, *, tied_stages: bool) -> LocalParameter:
        split, hidden = self.split, self.config.hidden_size
        true_rows = max(0, min(split.vocab_size - split.first_row, split.local_rows))
        return LocalParameter(
            split.local_rows * hidden, partial={"embedding": true_rows * hidden} if tied_stages else {}
        )

    def embedding(self) -> Iterator[LocalParameter]:
        # a module's own parameters come before those of its sub-modules
        if self.config.position_embedding_type == "learned_absolute":
            yield self.replicated((self.config.max_position_embeddings or 0) * self.config.hidden_size, decay=True)
        yield self.vocabulary(tied_stages=self.tied_stages)

    def norm(self) -> list[LocalParameter]:
        count = 2 if self.config.normalization == "LayerNorm" else 1
        return [self.replicated(self.config.hidden_size)] * count

    def layer(self) -> Iterator[LocalParameter]:
        config, tp = self.config, self.rank.tp
        hidden, ffn = config.hidden_size, config.ffn_size // tp
        heads = HeadSplit(config.num_attention_heads, config.num_kv_heads, config.head_size, tp, self.rank.tp_rank)
        yield from self.norm()
        yield self._qkv(heads, hidden, decay=True)
        if config.has_linear_bias or config.add_qkv_bias:
            yield self._qkv(heads, 1, decay=False)
        yield LocalParameter(heads.query_rows * hidden)
        yield from self._output_bias()
        yield from self.norm()
        width = ffn * (2 if config.swiglu else 1)
        yield LocalParameter(width * hidden)
        if config.has_linear_bias:
            yield LocalParameter(width, decay=False)
        yield LocalParameter(ffn * hidden)
        yield from self._output_bias()

    def _qkv(self, heads: HeadSplit, columns: int, *, decay: bool) -> LocalParameter:
        partial = {"kv_copy": 2 * heads.kv_rows * columns} if heads.shares_kv_head else {}
        return LocalParameter(heads.qkv_rows * columns, decay, partial)

    def _output_bias(self) -> Iterator[LocalParameter]:
        if self.config.has_linear_bias:
            yield self.replicated(self.config.hidden_size)
