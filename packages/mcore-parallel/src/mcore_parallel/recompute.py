"""Activation recomputation. Dropout masks are pure functions of their keys, so no random state has to be replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint


def checkpoint(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """``function(*args)``, keeping only its arguments for backward and running it again there.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174).
    """
    result: Tensor = torch_checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return result
