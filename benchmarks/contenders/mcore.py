"""mcore on one rank: the step that the trainer runs on every layout, with one micro-batch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from contenders.workload import Contender, Workload
from mcore_cli.build import build_parts
from mcore_cli.config import RunConfig
from mcore_cli.step import backward_all, sum_over_ranks
from mcore_data.loader import Batch
from mcore_parallel.axis import single_layout
from mcore_parallel.placement import placement_of
from mcore_parallel.plugins import Registry, plugin_manager


def run_config(work: Workload, family: dict[str, object]) -> RunConfig:
    """The workload in the words of a recipe; ``family`` are the fields that make a model a Llama."""
    model = {
        **family,
        "num_layers": work.layers,
        "hidden_size": work.hidden,
        "ffn_hidden_size": work.ffn,
        "num_attention_heads": work.heads,
        "vocab_size": work.vocab,
        "max_position_embeddings": work.sequence,
        "rotary_base": work.rotary_base,
        "norm_epsilon": work.norm_eps,
    }
    optimizer = {
        "lr": work.lr,
        "weight_decay": work.weight_decay,
        "adam_beta1": work.betas[0],
        "adam_beta2": work.betas[1],
        "adam_eps": work.eps,
        "clip_grad": work.clip,
    }
    batch = {"micro_batch_size": work.micro_batch, "global_batch_size": work.micro_batch, "train_iters": 1}
    return RunConfig.model_validate(
        {"model": model, "optimizer": optimizer, "data": {"seq_length": work.sequence}, "train": batch}
    )


def load(parameters: list[nn.Parameter], start: dict[str, Tensor]) -> None:
    """Copy the common starting point, piece by piece as the placements say."""
    with torch.no_grad():
        for parameter in parameters:
            for piece in placement_of(parameter).pieces:
                box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
                parameter[piece.start : piece.start + piece.shape[0]] = start[piece.name][box]


def micro_batch(tokens: Tensor) -> Batch:
    """Tokens ``[b, s + 1]`` as a micro-batch in which every token counts."""
    inputs, labels = tokens[:, :-1].numpy(), tokens[:, 1:].numpy()
    positions = np.broadcast_to(np.arange(inputs.shape[1]), inputs.shape).copy()
    return Batch(inputs, labels, np.ones(inputs.shape, np.float32), positions, np.arange(len(inputs)))


def build(work: Workload, start: dict[str, Tensor]) -> Contender:
    """mcore's training step on one rank, without any process group."""
    plugins = plugin_manager()
    config = run_config(work, Registry("model", plugins.collect("mcore_models"))["llama"].fields())
    layout, device = single_layout(), torch.device("cpu")
    parts = build_parts(config, layout, manager=plugins, device=device)
    load(parts.parameters, start)
    step_number = 0

    def step(tokens: Tensor) -> float:
        nonlocal step_number
        batches = [micro_batch(tokens)]
        losses = backward_all(parts, batches, step=step_number)
        sums = sum_over_ranks(layout, losses, batches, device=device)
        parts.optimizer.step(sums.tokens)
        step_number += 1
        return sums.mean_loss

    return Contender("mcore, one rank", step)
