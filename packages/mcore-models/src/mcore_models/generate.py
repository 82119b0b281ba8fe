"""Text generation: greedy or sampled tokens, one forward pass per token over a KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mcore_models.kv_cache import KVCache
from mcore_models.pointwise import at_least_fp32
from mcore_models.stage_model import StageModel


def generate(
    model: StageModel,
    tokens: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    eod: int | None = None,
    seed: int = 1234,
) -> Iterator[Tensor]:
    """Continue prompts ``[b, s]`` (all of one length): yields the next tokens ``[b]``, one step at a time.

    ``temperature`` 0 takes the likeliest token; above, tokens are drawn from the smallest set that holds ``top_p`` of
    the probability (Holtzman et al., arXiv:1904.09751), with a generator of its own seeded by ``seed``. A sequence that
    has produced ``eod`` goes on with ``eod``; generation ends when all have.

    Raises:
        ValueError: the model is not whole on this rank, a prompt is empty or holds unknown tokens, a setting is out of
            range, or prompt and new tokens exceed the learned positions.
    """
    _check(model, tokens, max_new_tokens, temperature, top_p)
    sample = Sampler(temperature, top_p, seed, tokens.device)
    cache = KVCache(len(model.layers), tokens.shape[1] + max_new_tokens)

    def advance(new: Tensor) -> Tensor:
        return sample(model.logits(model(new, cache=cache)[-1:])[0])

    return continue_tokens(advance, tokens, max_new_tokens=max_new_tokens, eod=eod)


class Sampler:
    """Chooses next tokens from logits, with a generator of its own; ``temperature`` 0 takes the likeliest."""

    def __init__(self, temperature: float, top_p: float, seed: int, device: torch.device) -> None:
        self.temperature, self.top_p = temperature, top_p
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def __call__(self, logits: Tensor) -> Tensor:
        """Next tokens ``[b]`` from logits ``[b, v]``."""
        if self.temperature == 0.0:
            return logits.argmax(-1)
        probabilities = torch.softmax(at_least_fp32(logits) / self.temperature, dim=-1)
        return torch.multinomial(nucleus(probabilities, self.top_p), 1, generator=self.generator).squeeze(1)


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """``[b, v]`` with all but the smallest set of likeliest tokens that holds ``top_p`` set to zero."""
    if top_p >= 1.0:
        return probabilities
    ordered, order = probabilities.sort(-1, descending=True)
    # a token stays if those before it do not hold top_p yet; so the likeliest always stays
    ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0)
    return torch.zeros_like(probabilities).scatter(-1, order, ordered)


def continue_tokens(
    advance: Callable[[Tensor], Tensor], tokens: Tensor, *, max_new_tokens: int, eod: int | None
) -> Iterator[Tensor]:
    """Next tokens ``[b]``, step by step, where ``advance`` makes them of the tokens ``[b, s]`` it has not seen yet.

    Runs without autograd. A sequence that has produced ``eod`` goes on with it; ends when all have.
    """
    ended = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    for _ in range(max_new_tokens):
        with torch.no_grad():  # entered per step: the consumer's own gradient mode holds while it has the token
            following = advance(tokens)
        if eod is not None:
            following = following.masked_fill(ended, eod)
            ended = ended | (following == eod)
        yield following
        if bool(ended.all()):
            return
        tokens = following.unsqueeze(1)


def _check(model: StageModel, tokens: Tensor, max_new_tokens: int, temperature: float, top_p: float) -> None:
    if not model.stage.is_whole or model.environment.tp.size > 1 or model.output is None:
        raise ValueError("generation needs the whole model on one rank; load the checkpoint with tp 1 and pp 1")
    if tokens.dim() != 2 or tokens.shape[0] == 0 or tokens.shape[1] == 0:
        raise ValueError(f"prompts must be [b, s] with at least one token each, got shape {tuple(tokens.shape)}")
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= model.output.vocab_size:
        raise ValueError(f"prompt tokens {lowest}..{highest} are outside the vocabulary of {model.output.vocab_size}")
    if max_new_tokens < 1:
        raise ValueError(f"max-new-tokens {max_new_tokens} must be at least 1")
    if temperature < 0.0 or not 0.0 < top_p <= 1.0:
        raise ValueError(f"temperature {temperature} must be at least 0, and top-p {top_p} in (0, 1]")
    longest = model.max_positions
    if longest is not None and tokens.shape[1] + max_new_tokens > longest:
        raise ValueError(
            f"{tokens.shape[1]} prompt tokens and {max_new_tokens} new ones exceed max-position-embeddings {longest}; "
            "shorten the prompt or ask for fewer"
        )
