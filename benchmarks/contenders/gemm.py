"""The floor: exactly the weight GEMMs of one step, with outputs allocated beforehand, and nothing else.

q, k, v and gate, up are one GEMM each, which is faster than separate ones. Attention's own products are left out, so no
training step can reach this time; how near it comes says how little else it does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contenders.workload import Contender, Workload

ROWS = 512  # of the logits at a time: larger blocks leave the caches


class Products:
    """One linear map ``[out, in]`` with the buffers of its three products over ``rows`` tokens."""

    def __init__(self, rows: int, size_out: int, size_in: int) -> None:
        self.weight = torch.randn(size_out, size_in) * 0.02
        self.x = torch.randn(rows, size_in)
        self.dy = torch.randn(rows, size_out)
        self.y = torch.empty(rows, size_out)
        self.dx = torch.empty(rows, size_in)
        self.gradient = torch.empty(size_out, size_in)

    def run(self, *, fresh: bool) -> None:
        """Output, input gradient, weight gradient (``fresh``: written, else accumulated)."""
        torch.mm(self.x, self.weight.t(), out=self.y)
        torch.mm(self.dy, self.weight, out=self.dx)
        torch.addmm(self.gradient, self.dy.t(), self.x, beta=0.0 if fresh else 1.0, out=self.gradient)


def build(work: Workload, start: dict[str, Tensor]) -> Contender:
    """The GEMMs alone; ``start`` is not needed, their time does not depend on the values."""
    del start
    h, f = work.hidden, work.ffn
    layer_shapes = ((3 * h, h), (h, h), (2 * f, h), (h, f))
    layers = [[Products(work.tokens, out, size) for out, size in layer_shapes] for _ in range(work.layers)]
    rows = min(ROWS, work.tokens)
    head = Products(rows, work.vocab, h)

    @torch.no_grad()
    def step(tokens: Tensor) -> None:
        for layer in layers:
            for product in layer:
                product.run(fresh=True)
        for block in range(tokens[:, 1:].numel() // rows):
            head.run(fresh=block == 0)

    return Contender("GEMMs only (limit)", step)
