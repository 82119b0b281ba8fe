"""What all layers of a stage are built with: the tensor axis, the kernels, and where parameters live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from mcore_models.kernels import KernelSet
from mcore_parallel.axis import Axis
from mcore_parallel.placement import Init, place, replicated


@dataclass(frozen=True)
class Environment:
    """Axis, kernels, hidden width ``h``, dtype and device of a stage; ``sequence_parallel`` only if tp exceeds 1."""

    tp: Axis
    kernels: KernelSet
    hidden: int
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device | str

    def replicated_parameter(self, name: str, shape: tuple[int, ...], init: Init) -> nn.Parameter:
        """A parameter that every tp rank holds whole (norms, biases of row-parallel layers, positions).

        Under sequence parallelism each rank sees only its positions, so its gradient is a partial sum over tp;
        otherwise every rank already has all of it.
        """
        return cast(nn.Parameter, place(self.empty(shape), replicated(name, shape, init=init, **self.copies())))

    def copies(self) -> dict[str, tuple[str, ...]]:
        """``partial_over`` or ``copied_over`` of a parameter that every tp rank holds whole; empty at tp 1."""
        if self.tp.size == 1:
            return {}
        return {"partial_over" if self.sequence_parallel else "copied_over": ("tp",)}

    def empty(self, shape: tuple[int, ...]) -> nn.Parameter:
        """An uninitialised parameter."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device))
