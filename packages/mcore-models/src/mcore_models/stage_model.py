"""The part of a model that one pipeline stage holds; with one stage, the whole model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mcore_models.dropout import DropoutState
from mcore_models.embedding import Embedding
from mcore_models.environment import Environment
from mcore_models.kv_cache import KVCache
from mcore_models.layer import TransformerLayer
from mcore_models.output import Output
from mcore_models.rope import RopeTables, RotaryEmbedding
from mcore_models.specs import Recompute, StageSpec
from mcore_parallel.recompute import checkpoint


class StageModel(nn.Module):
    """Embedding (first stage), layers, output (last stage).

    ``layers`` are those of ``stage`` in order; ``rotary`` None when positions are not rotary.
    """

    def __init__(
        self,
        stage: StageSpec,
        *,
        embedding: Embedding | None,
        layers: Sequence[TransformerLayer],
        output: Output | None,
        rotary: RotaryEmbedding | None,
        recompute: Recompute | None,
        environment: Environment,
    ) -> None:
        super().__init__()
        assert len(layers) == stage.num_layers, "a stage holds exactly its layers"
        assert (embedding is not None) == stage.is_first, "the first stage, and no other, embeds"
        assert (output is not None) == stage.is_last, "the last stage, and no other, has the output layer"
        self.stage, self.rotary, self.recompute, self.environment = stage, rotary, recompute, environment
        self.embedding = embedding
        self.layers = nn.ModuleList(layers)
        self.output = output

    def forward(
        self,
        inputs: Tensor,
        *,
        position_ids: Tensor | None = None,
        dropout: DropoutState | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Run the stage.

        ``inputs``: tokens ``[b, s]`` on the first stage, hidden states ``[s, b, h]`` (``[s/tp, b, h]`` under sequence
        parallelism) on others. ``position_ids`` ``[b, s]``, default 0, 1, ... after the cached positions. ``dropout``
        None: no dropout (evaluation). Returns hidden states of the same shape, after the final norm on the last stage;
        or, on the last stage with ``labels`` ``[b, s]``, the sum over tokens of ``loss_mask * loss``, a float64 scalar.
        """
        positions = self._positions(inputs, cache) if position_ids is None else position_ids
        if self.embedding is not None:
            hidden = self.embedding(inputs, positions, dropout)
        else:
            hidden = inputs
        rope = self.rotary.tables(positions, self.environment.dtype) if self.rotary is not None else None
        hidden = self._run_layers(hidden, rope, dropout, cache)
        if self.output is None:
            return hidden
        hidden = self.output(hidden)
        return hidden if labels is None else self.output.loss(hidden, labels, loss_mask)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[s, b, v]`` of what ``forward`` returned on the last stage, gathered over tp, without padding.

        Raises:
            ValueError: this is not the last stage.
        """
        if self.output is None:
            raise ValueError(f"layers from {self.stage.first_layer} on are not the last stage, which alone has logits")
        return self.output.logits(hidden)

    def activation_shape(self, micro_batch_size: int, seq_length: int) -> tuple[int, int, int]:
        """Shape of the hidden states between stages: ``[s, b, h]``, or ``[s/tp, b, h]`` under sequence parallelism."""
        cut = self.environment.tp.size if self.environment.sequence_parallel else 1
        return seq_length // cut, micro_batch_size, self.environment.hidden

    @property
    def max_positions(self) -> int | None:
        """Rows of the table of learned positions; None where positions have no such limit (or on later stages)."""
        table = self.embedding.position_embeddings if self.embedding is not None else None
        return table.shape[0] if table is not None else None

    def _positions(self, inputs: Tensor, cache: KVCache | None) -> Tensor:
        if self.embedding is not None:
            length = inputs.shape[1]
        else:
            length = inputs.shape[0] * (self.environment.tp.size if self.environment.sequence_parallel else 1)
        first = cache.length if cache is not None else 0
        return torch.arange(first, first + length, device=inputs.device)

    def _run_layers(
        self, hidden: Tensor, rope: RopeTables | None, dropout: DropoutState | None, cache: KVCache | None
    ) -> Tensor:
        if self.recompute is None or cache is not None or not torch.is_grad_enabled():
            return self._run_chunk(hidden, 0, len(self.layers), rope, dropout, cache)
        for begin, end, recomputed in self.recompute.chunks(len(self.layers)):
            if recomputed:
                hidden = checkpoint(self._run_chunk, hidden, begin, end, rope, dropout)
            else:
                hidden = self._run_chunk(hidden, begin, end, rope, dropout)
        return hidden

    def _run_chunk(
        self,
        hidden: Tensor,
        begin: int,
        end: int,
        rope: RopeTables | None,
        dropout: DropoutState | None,
        cache: KVCache | None = None,
    ) -> Tensor:
        for i in range(begin, end):
            layer_cache = cache.layers[i] if cache is not None else None
            hidden = self.layers[i](hidden, rope=rope, dropout=dropout, cache=layer_cache)
        return hidden
