"""signSGD: Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems", ICML 2018."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mcore_parallel.config import OptimizerConfig


class SignSGD(torch.optim.Optimizer):
    """``w <- w - lr * (sign(gradient) + weight_decay * w)``, element by element, without state."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient; returns what ``closure`` returns, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])
        return loss


def build_sign_sgd(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer over flat shards; ``config`` gives the rate of groups that bring none."""
    return SignSGD(groups, {"lr": config.lr, "weight_decay": config.weight_decay})
