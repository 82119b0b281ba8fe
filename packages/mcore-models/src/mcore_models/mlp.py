"""The feed-forward block: SwiGLU with a fused gate|up product, or GELU."""

from __future__ import annotations

from torch import Tensor, nn

from mcore_models.kernels import ActivationKernel
from mcore_parallel.axis import Axis
from mcore_parallel.linear import ColumnParallelLinear, RowParallelLinear
from mcore_parallel.placement import Init, Piece, Placement, rows


class MLP(nn.Module):
    """``fc2(activation(fc1(x)))``; a gated activation takes ``[gate | up]``, twice the width it returns."""

    def __init__(self, fc1: ColumnParallelLinear, fc2: RowParallelLinear, *, activation: ActivationKernel) -> None:
        super().__init__()
        self.linear_fc1 = fc1
        self.linear_fc2 = fc2
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, h]`` (``[s/tp, b, h]`` under sequence parallelism) -> the same."""
        out: Tensor = self.linear_fc2(self.activation(self.linear_fc1(x)))
        return out


def fc1_placements(
    prefix: str, *, hidden: int, ffn: int, gated: bool, init: Init, has_bias: bool, tp: Axis
) -> tuple[Placement, Placement | None]:
    """Placements of the first layer's weight ``[f/tp, h]`` (gated: ``[2f/tp, h]``, gate over up) and bias."""
    names = ("linear_gate", "linear_up") if gated else ("linear_fc1",)
    local = ffn // tp.size
    begin, end = tp.rank * local, (tp.rank + 1) * local

    def pieces(suffix: str, columns: tuple[int, ...], kind: Init) -> tuple[Piece, ...]:
        return tuple(
            rows(f"{prefix}.{name}.{suffix}", (ffn, *columns), begin=begin, end=end, init=kind, start=i * local)
            for i, name in enumerate(names)
        )

    bias = Placement(pieces("bias", (), Init("zeros")), decay=False) if has_bias else None
    return Placement(pieces("weight", (hidden,), init)), bias
