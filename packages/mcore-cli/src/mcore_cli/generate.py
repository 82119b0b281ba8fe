"""Continue a text with the model of a checkpoint, forward-only through the pipeline, on any tp x pp layout."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

import torch
from torch import Tensor

from mcore_ckpt.find import open_checkpoint
from mcore_cli.build import build_chunks, build_run_tokenizer, with_vocabulary
from mcore_cli.checkpointing import checkpoint_folder, chosen_by_first, load_weights
from mcore_cli.config import RunConfig
from mcore_cli.pipeline import pipeline_shape, schedules_of
from mcore_cli.text_request import TextRequest
from mcore_cli.world import build_run_layout, join_world
from mcore_data.specs import Tokenizer
from mcore_models.generate import Sampler, continue_tokens
from mcore_models.kv_cache import KVCache
from mcore_models.stage_model import StageModel
from mcore_parallel.axis import Axis
from mcore_parallel.collectives import broadcast
from mcore_parallel.pipeline.actions import Plan
from mcore_parallel.pipeline.compile import compile_forward
from mcore_parallel.pipeline.executor import run_forward
from mcore_parallel.pipeline.p2p import connect
from mcore_parallel.plugins import plugin_manager


@dataclass
class NextToken:
    """A rank's stage models that make the next token together with the other stages, as the executor sees them.

    The last stage's "loss" is the chosen token. Called with tokens ``[1, s]`` that no call has seen; returns ``[1]``.
    """

    chunks: Sequence[StageModel]
    caches: Sequence[KVCache]
    axis: Axis
    everyone: Axis
    source: int
    plan: Plan
    sample: Sampler
    seen: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations between stages."""
        return self.chunks[0].environment.dtype

    @property
    def device(self) -> torch.device:
        """Of the activations between stages."""
        return torch.device(self.chunks[0].environment.device)

    def receive_shape(self, micro_batch: int) -> tuple[int, ...]:
        """``[s, 1, h]`` of the tokens under way."""
        return self.chunks[0].activation_shape(*self.tokens.shape)

    def forward(self, micro_batch: int, chunk: int, received: Tensor | None) -> Tensor:
        """Hidden states ``[s, 1, h]`` to send on, or on the last stage the next token (0-d)."""
        model = self.chunks[chunk]
        positions = torch.arange(self.seen, self.seen + self.tokens.shape[1], device=self.device)
        hidden: Tensor = model(
            self.tokens if received is None else received, position_ids=positions, cache=self.caches[chunk]
        )
        return self.sample(model.logits(hidden[-1:])[0])[0] if model.stage.is_last else hidden

    def __call__(self, tokens: Tensor) -> Tensor:
        self.tokens = tokens
        chosen = run_forward(self.plan.for_rank(self.axis.rank), stage=self, axis=self.axis).losses
        self.seen += tokens.shape[1]
        following = chosen[0] if chosen else torch.zeros((), dtype=torch.int64, device=self.device)
        # Ranks that split the last stage chose too; one choice counts, should rounding ever tell theirs apart.
        return broadcast(following.reshape(1), self.everyone, source=self.source)


def run(config: RunConfig, request: TextRequest) -> None:
    """Write the prompt and its continuation to standard output as the tokens come, on the first rank.

    Raises:
        ValueError: no usable checkpoint, a prompt without a token or with unknown ones, or more tokens than the model
            has learned positions for.
    """
    with join_world(config) as world:
        manager = plugin_manager()
        tokenizer = build_run_tokenizer(config, manager)
        config = with_vocabulary(config, tokenizer)
        layout = build_run_layout(config, world, manager=manager)
        connect(layout, device=world.device)
        chunks = build_chunks(config, layout, manager=manager, device=world.device)
        assert config.checkpoint.load is not None, "mcore generate asks for --load"
        folder, step = checkpoint_folder(config.checkpoint.load, manager), config.checkpoint.ckpt_step
        load_weights(chunks, chosen_by_first(lambda: open_checkpoint(folder, step)))
        ids = prompt_ids(request, tokenizer, config)
        shape = pipeline_shape(config, schedules_of(manager))
        plan = compile_forward(shape.spec, num_ranks=shape.num_ranks, num_micro_batches=1, num_chunks=shape.num_chunks)
        capacity = len(ids) + request.max_new_tokens
        advance = NextToken(
            chunks,
            [KVCache(len(chunk.layers), capacity) for chunk in chunks],
            layout.axis("pp"),
            layout.axis("world"),
            layout.mesh.rank({**dict.fromkeys(layout.mesh.names, 0), "pp": plan.flow.places[-1].rank}),
            plan,
            Sampler(request.temperature, request.top_p, request.seed, world.device),
        )
        writer = TextWriter(tokenizer, sys.stdout if world.is_first else None, ids)
        tokens = torch.tensor([ids], device=world.device)
        for following in continue_tokens(advance, tokens, max_new_tokens=request.max_new_tokens, eod=tokenizer.eod):
            if int(following) != tokenizer.eod:
                writer.add(int(following))
        writer.end()


def prompt_ids(request: TextRequest, tokenizer: Tokenizer, config: RunConfig) -> list[int]:
    """The prompt as tokens.

    Raises:
        ValueError: none, unknown ones, or too many with those to come.
    """
    ids, vocab = tokenizer.encode(request.prompt), config.model.vocab_size or 0
    if not ids:
        raise ValueError("the prompt has no token; give at least one character")
    if max(ids) >= vocab:
        raise ValueError(f"prompt token {max(ids)} is outside the model's vocabulary of {vocab}")
    longest = config.model.max_position_embeddings
    learned = config.model.position_embedding_type == "learned_absolute"
    if learned and longest is not None and len(ids) + request.max_new_tokens > longest:
        raise ValueError(
            f"{len(ids)} prompt tokens and {request.max_new_tokens} new ones exceed max-position-embeddings {longest}; "
            "shorten the prompt or ask for fewer"
        )
    return ids


class TextWriter:
    """Writes text as soon as it is whole: a token may be part of a character. Without a stream it writes nothing."""

    def __init__(self, tokenizer: Tokenizer, stream: IO[str] | None, ids: list[int]) -> None:
        self._tokenizer, self._stream = tokenizer, stream
        self._ids = list(ids)
        self._written = 0
        self._write(tokenizer.decode(self._ids))

    def add(self, token: int) -> None:
        """One more token."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if not text.endswith("\ufffd"):
            self._write(text)

    def end(self) -> None:
        """Whatever is left, and the end of the line."""
        self._write(self._tokenizer.decode(self._ids) + "\n")

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text[self._written :])
            self._stream.flush()
        self._written = len(text)
