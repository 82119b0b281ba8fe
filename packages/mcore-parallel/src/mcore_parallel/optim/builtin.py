"""torch's fused optimizers over flat shards, with their state made up front so that it can be loaded before a step."""

from __future__ import annotations

from typing import Any

import torch

from mcore_parallel.config import OptimizerConfig


def build_adam(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) with decoupled weight decay; state ``exp_avg, exp_avg_sq``."""
    optimizer = torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, fused=True
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
    return optimizer


def build_sgd(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """SGD with momentum and L2 weight decay; state ``momentum_buffer``.

    At momentum 0 the buffer stays zero, so that a run may be resumed with momentum.
    """
    optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.sgd_momentum, fused=True)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}
    return optimizer
