"""Tensor- and sequence-parallel layers against plain torch, on real ranks, forward and backward, in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mcore_parallel.axis import build_layout, single_layout
from mcore_parallel.cross_entropy import linear_cross_entropy, vocab_parallel_cross_entropy
from mcore_parallel.embedding import VocabParallelEmbedding
from mcore_parallel.linear import ColumnParallelLinear, RowParallelLinear
from mcore_parallel.mesh import build_mesh
from mcore_parallel.placement import Init, Placement, columns, replicated, rows
from mcore_parallel.rng import initialise
from mcore_parallel.testing import run_ranks

S, B, H, FFN, V = 8, 2, 6, 12, 11
D64 = torch.float64


def _data():
    g = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, V, (B, S), generator=g)
    labels = torch.randint(0, V, (B, S), generator=g)
    mask = (torch.rand(B, S, generator=g) > 0.3).to(D64)
    return tokens, labels, mask


def _full(name, shape):
    out = torch.empty(shape, dtype=D64)
    initialise(out, replicated(name, shape, init=Init(std=0.3)), seed=5)
    return out


def _reference():
    tokens, labels, mask = _data()
    w = {n: _full(n, s).requires_grad_() for n, s in _SHAPES.items()}
    x = F.embedding(tokens, w["emb"]).transpose(0, 1)
    x = F.gelu(F.linear(x, w["up"], w["up_bias"]))
    x = F.linear(x, w["down"], w["down_bias"])
    logits = F.linear(x, w["head"])
    losses = F.cross_entropy(logits.transpose(0, 1).reshape(-1, V), labels.reshape(-1), reduction="none")
    loss = (losses.view(B, S) * mask).sum()
    loss.backward()
    return loss.item(), {n: p.grad for n, p in w.items()}


_SHAPES = {
    "emb": (V, H), "up": (FFN, H), "up_bias": (FFN,), "down": (H, FFN), "down_bias": (H,), "head": (V, H),
}  # fmt: skip


def _model(tp, sp, rows_per_rank):
    first = tp.rank * rows_per_rank
    f = FFN // tp.size
    std = Init(std=0.3)
    vocab = {"begin": first, "end": first + rows_per_rank, "init": std}
    cut = {"begin": tp.rank * f, "end": (tp.rank + 1) * f, "init": std}
    partial = ("tp",) if sp else ()
    emb = VocabParallelEmbedding(
        rows_per_rank, H, tp=tp, first_row=first, sequence_parallel=sp, dtype=D64,
        weight=Placement((rows("emb", (V, H), **vocab),)),
    )  # fmt: skip
    up = ColumnParallelLinear(
        H, f, tp=tp, sequence_parallel=sp, dtype=D64,
        weight=Placement((rows("up", (FFN, H), **cut),)), bias=Placement((rows("up_bias", (FFN,), **cut),)),
    )  # fmt: skip
    down = RowParallelLinear(
        f, H, tp=tp, sequence_parallel=sp, dtype=D64,
        weight=Placement((columns("down", (H, FFN), **cut),)),
        bias=replicated("down_bias", (H,), init=std, partial_over=partial),
    )  # fmt: skip
    head = torch.nn.Parameter(torch.empty(rows_per_rank, H, dtype=D64))
    head.placement = Placement((rows("head", (V, H), **vocab),))
    parameters = [*emb.parameters(), *up.parameters(), *down.parameters(), head]
    for p in parameters:
        initialise(p, p.placement, seed=5)
    return emb, up, down, head, parameters


def _parallel(rank, world, sp, main_grad):
    tp = (build_layout(build_mesh(world, tp=world), rank) if world > 1 else single_layout()).axis("tp")
    tokens, labels, mask = _data()
    emb, up, down, head, parameters = _model(tp, sp, -(-V // world))
    if main_grad:
        for p in parameters:
            if p.dim() == 2:
                p.main_grad = torch.zeros_like(p)
    hidden = down(F.gelu(up(emb(tokens))))
    loss = linear_cross_entropy(hidden, head, labels, mask, tp=tp, vocab_size=V, sequence_parallel=sp)
    loss.backward()
    return loss.item(), [
        (p.placement.pieces, (p.main_grad if hasattr(p, "main_grad") else p.grad).detach()) for p in parameters
    ]


def _assemble(results):
    full = {n: torch.zeros(s, dtype=D64) for n, s in _SHAPES.items()}
    covered = set()
    for rank, (_, pieces) in enumerate(results):
        for (piece,), grad in pieces:
            at = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
            if piece.partial_over or piece.name not in covered or piece.cut_dims:
                full[piece.name][at] += grad[: piece.shape[0]]
            covered.add(piece.name)
            assert rank >= 0
    return full


@pytest.mark.parametrize(("world", "sp"), [(1, False), (2, False), (2, True), (4, True)])
@pytest.mark.parametrize("main_grad", [True, False])
def test_layers_equal_plain_torch(world, sp, main_grad):
    loss, grads = _reference()
    results = run_ranks(_parallel, world, sp, main_grad)
    got = _assemble(results)
    for rank_loss, _ in results:
        assert rank_loss == pytest.approx(loss, rel=1e-12)
    for name, grad in grads.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_token_losses_equal_torch_and_padding_gets_no_gradient():
    torch.manual_seed(0)
    logits = torch.randn(S, B, V + 5, dtype=D64, requires_grad=True)
    labels = _data()[1]
    tp = single_layout().axis("tp")
    losses = vocab_parallel_cross_entropy(logits, labels, tp=tp, vocab_size=V)
    want = F.cross_entropy(logits[..., :V].permute(1, 2, 0), labels, reduction="none")
    torch.testing.assert_close(losses, want)
    weights = torch.rand(B, S, dtype=D64)
    (grad,) = torch.autograd.grad((losses * weights).sum(), logits)
    (want_grad,) = torch.autograd.grad((want * weights).sum(), logits)
    torch.testing.assert_close(grad, want_grad)
    assert grad[..., V:].abs().max() == 0


def test_no_grad_loss_leaves_main_grad_alone():
    tp = single_layout().axis("tp")
    _, labels, mask = _data()
    weight = torch.nn.Parameter(_full("head", (V, H)))
    weight.main_grad = torch.zeros_like(weight)
    hidden = torch.randn(S, B, H, dtype=D64)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels, mask, tp=tp, vocab_size=V)
    assert loss > 0
    assert weight.main_grad.abs().max() == 0
