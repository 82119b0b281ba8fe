"""What a text is to be continued with. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TextRequest:
    """A prompt and how to go on from it; ``temperature`` 0 takes the likeliest token."""

    prompt: str
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
