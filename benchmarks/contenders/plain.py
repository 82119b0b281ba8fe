"""The loop that a careful person writes by hand: nn.Linear, SDPA, fused AdamW, clip_grad_norm_."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contenders.workload import Contender, Workload, decay_groups


def rotary_tables(sequence: int, size: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin ``[s, d]`` of rotary embeddings."""
    inverse = base ** (-torch.arange(0, size, 2).float() / size)
    angles = torch.outer(torch.arange(sequence).float(), inverse).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``[b, n, s, d]`` by position."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Block(nn.Module):
    """One Llama layer on ``[b, s, h]``."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        h, f = work.hidden, work.ffn
        self.heads = work.heads
        self.norm1 = nn.RMSNorm(h, eps=work.norm_eps)
        self.norm2 = nn.RMSNorm(h, eps=work.norm_eps)
        self.q, self.k, self.v, self.proj = (nn.Linear(h, h, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(h, f, bias=False) for _ in range(2))
        self.down = nn.Linear(f, h, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention and MLP, each with its residual."""
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Embedding, layers, norm, output."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.embedding = nn.Embedding(work.vocab, work.hidden)
        self.blocks = nn.ModuleList(Block(work) for _ in range(work.layers))
        self.norm = nn.RMSNorm(work.hidden, eps=work.norm_eps)
        self.head = nn.Linear(work.hidden, work.vocab, bias=False)
        cos, sin = rotary_tables(work.sequence, work.hidden // work.heads, work.rotary_base)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[b, s, v]`` of tokens ``[b, s]``."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def load(model: Llama, start: dict[str, Tensor]) -> None:
    """Copy the common starting point."""
    names = {
        "input_layernorm": "norm1",
        "self_attention.linear_q": "q",
        "self_attention.linear_k": "k",
        "self_attention.linear_v": "v",
        "self_attention.linear_proj": "proj",
        "pre_mlp_layernorm": "norm2",
        "mlp.linear_gate": "gate",
        "mlp.linear_up": "up",
        "mlp.linear_fc2": "down",
    }
    own = {
        "embedding.weight": start["embedding.word_embeddings.weight"],
        "norm.weight": start["decoder.final_layernorm.weight"],
        "head.weight": start["output_layer.weight"],
    }
    for i in range(len(model.blocks)):
        for theirs, ours in names.items():
            own[f"blocks.{i}.{ours}.weight"] = start[f"decoder.layers.{i}.{theirs}.weight"]
    missing, unexpected = model.load_state_dict(own, strict=False)
    assert set(missing) <= {"cos", "sin"}
    assert not unexpected


def build(work: Workload, start: dict[str, Tensor]) -> Contender:
    """The hand-written loop."""
    model = Llama(work)
    load(model, start)
    optimizer = torch.optim.AdamW(
        decay_groups(model.parameters(), work), lr=work.lr, betas=work.betas, eps=work.eps, fused=True
    )

    def step(tokens: Tensor) -> float:
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return Contender("plain PyTorch", step)
