"""The two norms, with their parameters."""

from __future__ import annotations

from torch import Tensor, nn

from mcore_models.environment import Environment
from mcore_parallel.placement import Init


class RMSNorm(nn.Module):
    """Root-mean-square norm of ``[..., h]`` (Zhang and Sennrich, arXiv:1910.07467)."""

    def __init__(self, name: str, hidden: int, *, epsilon: float, environment: Environment) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.kernel = environment.kernels.rms_norm
        self.weight = environment.replicated_parameter(f"{name}.weight", (hidden,), Init("ones"))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., h]`` -> ``[..., h]``."""
        return self.kernel(x, self.weight, self.epsilon)


class LayerNorm(nn.Module):
    """Layer norm of ``[..., h]`` (Ba et al., arXiv:1607.06450)."""

    def __init__(self, name: str, hidden: int, *, epsilon: float, environment: Environment) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.kernel = environment.kernels.layer_norm
        self.weight = environment.replicated_parameter(f"{name}.weight", (hidden,), Init("ones"))
        self.bias = environment.replicated_parameter(f"{name}.bias", (hidden,), Init("zeros"))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., h]`` -> ``[..., h]``."""
        return self.kernel(x, self.weight, self.bias, self.epsilon)
