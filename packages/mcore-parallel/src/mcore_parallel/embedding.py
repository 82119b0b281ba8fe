"""The word embedding with its vocabulary rows split over tp."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from mcore_parallel.axis import Axis
from mcore_parallel.collectives import reduce_from, scatter_sequence
from mcore_parallel.placement import Placement, place
from mcore_parallel.weight_grad import mark_grad_ready


class _Lookup(torch.autograd.Function):
    """Rows of ``weight`` for local ids; ids of other ranks give zeros. Gradients go straight to the main grad."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, foreign: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, ids, foreign)
        out = weight.index_select(0, ids)
        return out if foreign is None else out.masked_fill_(foreign.unsqueeze(-1), 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        weight, ids, foreign = ctx.saved_tensors
        if foreign is not None:
            grad = grad.masked_fill(foreign.unsqueeze(-1), 0)
        main_grad = getattr(weight, "main_grad", None)
        target = torch.zeros_like(weight) if main_grad is None else main_grad
        target.index_add_(0, ids, grad.to(target.dtype))
        if main_grad is None:
            return target, None, None
        mark_grad_ready(weight)
        return None, None, None


class VocabParallelEmbedding(nn.Module):
    """Tokens ``[b, s]`` -> ``[s, b, h]`` (``[s/tp, b, h]`` with sequence parallelism); this rank holds
    rows ``first_row : first_row + local_rows`` of the (padded) vocabulary."""

    def __init__(
        self,
        local_rows: int,
        hidden: int,
        *,
        tp: Axis,
        first_row: int,
        weight: Placement,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.tp, self.first_row, self.sequence_parallel = tp, first_row, sequence_parallel
        parameter = nn.Parameter(torch.empty((local_rows, hidden), dtype=dtype, device=device))
        self.weight = cast(nn.Parameter, place(parameter, weight))

    def forward(self, tokens: Tensor) -> Tensor:
        """``[b, s]`` -> ``[s, b, h]`` or ``[s/tp, b, h]``."""
        ids = tokens.t().reshape(-1)
        foreign = None
        if self.tp.size > 1:
            ids = ids - self.first_row
            foreign = (ids < 0) | (ids >= self.weight.shape[0])
            ids = ids.masked_fill(foreign, 0)
        out = cast(Tensor, _Lookup.apply(self.weight, ids, foreign)).view(*tokens.t().shape, -1)
        return scatter_sequence(out, self.tp) if self.sequence_parallel else reduce_from(out, self.tp)
