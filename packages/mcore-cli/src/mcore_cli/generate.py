"""Continue a text with the model of a checkpoint, on one process."""

from __future__ import annotations

from typing import IO

import torch

from mcore_cli.build import build_chunks, build_run_tokenizer
from mcore_cli.checkpointing import load_weights, open_run
from mcore_cli.pipeline import one_stage
from mcore_cli.resolve import run_tree
from mcore_cli.world import pick_device
from mcore_data.specs import Tokenizer
from mcore_models.generate import generate
from mcore_parallel.axis import single_layout
from mcore_parallel.plugins import plugin_manager

ONE_RANK = {
    **one_stage(),
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "sequence_parallel": False,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
}


def run(
    load: str,
    prompt: str,
    *,
    ckpt_step: int | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    stream: IO[str],
) -> None:
    """Write ``prompt`` and its continuation to ``stream`` as the tokens come; ``temperature`` 0 is greedy.

    Raises:
        ValueError: no usable checkpoint, or a prompt without a token.
    """
    manager = plugin_manager()
    info, config = open_run(load, ckpt_step, run_tree(manager), manager)
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update=ONE_RANK)})
    tokenizer = build_run_tokenizer(config, manager)
    device = pick_device("auto", 0)
    (model,) = build_chunks(config, single_layout(config.model.num_kv_heads), manager=manager, device=device)
    load_weights([model], info)
    ids = tokenizer.encode(prompt)
    if not ids:
        raise ValueError("the prompt has no token; give at least one character")
    tokens = torch.tensor([ids], device=device)
    stream.write(prompt)
    writer = _TextWriter(tokenizer, stream, ids)
    for following in generate(
        model,
        tokens,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        eod=tokenizer.eod,
        seed=seed,
    ):
        if int(following) == tokenizer.eod:
            break
        writer.add(int(following))
    stream.write("\n")


class _TextWriter:
    """Writes text as soon as it is whole: a token may be part of a character."""

    def __init__(self, tokenizer: Tokenizer, stream: IO[str], ids: list[int]) -> None:
        self._tokenizer, self._stream = tokenizer, stream
        self._ids = list(ids)
        self._written = len(tokenizer.decode(self._ids))

    def add(self, token: int) -> None:
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if not text.endswith("\ufffd"):
            self._stream.write(text[self._written :])
            self._stream.flush()
            self._written = len(text)
