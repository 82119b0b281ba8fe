"""The work that every contender does: one shape, one set of weights, one stream of random tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Workload:
    """A Llama in fp32 and how it is trained. The default has 58 M parameters, 41.7 M of them in GEMMs."""

    hidden: int = 512
    layers: int = 8
    heads: int = 8
    ffn: int = 1376
    vocab: int = 32_000
    sequence: int = 512
    micro_batch: int = 4
    lr: float = 3e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 1.0
    norm_eps: float = 1e-5
    rotary_base: float = 10_000.0
    seed: int = 1

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.sequence * self.micro_batch

    @property
    def gemm_flops(self) -> float:
        """Floating-point operations in the weight GEMMs of one step: forward, input and weight gradients."""
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.ffn
        return 6.0 * self.tokens * (self.layers * layer + self.hidden * self.vocab)


TINY = Workload(hidden=64, layers=2, heads=4, ffn=128, vocab=256, sequence=32, micro_batch=2)


@dataclass(frozen=True)
class Contender:
    """A name and a training step: ``step(tokens)`` takes ``[b, s + 1]`` int64, updates the weights, returns the loss.

    A contender that trains nothing (the GEMM limit) returns None.
    """

    name: str
    step: Callable[[Tensor], float | None]


def shapes(work: Workload) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all weights, ``[out, in]``, in mcore's names."""
    h, f = work.hidden, work.ffn
    yield "embedding.word_embeddings.weight", (work.vocab, h)
    for i in range(work.layers):
        layer = f"decoder.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (h,)
        for part in ("linear_q", "linear_k", "linear_v", "linear_proj"):
            yield f"{layer}.self_attention.{part}.weight", (h, h)
        yield f"{layer}.pre_mlp_layernorm.weight", (h,)
        yield f"{layer}.mlp.linear_gate.weight", (f, h)
        yield f"{layer}.mlp.linear_up.weight", (f, h)
        yield f"{layer}.mlp.linear_fc2.weight", (h, f)
    yield "decoder.final_layernorm.weight", (h,)
    yield "output_layer.weight", (work.vocab, h)


def weights(work: Workload) -> dict[str, Tensor]:
    """The starting point that all contenders copy: matrices from N(0, 0.02), norms 1."""
    generator = torch.Generator().manual_seed(work.seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.02 if len(shape) > 1 else torch.ones(shape)
        for name, shape in shapes(work)
    }


def batches(work: Workload, count: int) -> list[Tensor]:
    """``count`` batches of random tokens ``[b, s + 1]``."""
    generator = torch.Generator().manual_seed(work.seed + 1)
    size = (work.micro_batch, work.sequence + 1)
    return [torch.randint(0, work.vocab, size, generator=generator) for _ in range(count)]


def decay_groups(parameters: Iterator[torch.nn.Parameter], work: Workload) -> list[dict[str, object]]:
    """Optimizer groups with decay on matrices only, as everybody trains such models."""
    all_parameters = list(parameters)
    return [
        {"params": [p for p in all_parameters if p.dim() > 1], "weight_decay": work.weight_decay},
        {"params": [p for p in all_parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
