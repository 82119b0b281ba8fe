"""Hugging Face transformers' LlamaForCausalLM in the same loop."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn

from contenders.workload import Contender, Workload, decay_groups


def load(model: nn.Module, start: dict[str, Tensor], layers: int) -> None:
    """Copy the common starting point."""
    names = {
        "input_layernorm": "input_layernorm",
        "self_attn.q_proj": "self_attention.linear_q",
        "self_attn.k_proj": "self_attention.linear_k",
        "self_attn.v_proj": "self_attention.linear_v",
        "self_attn.o_proj": "self_attention.linear_proj",
        "post_attention_layernorm": "pre_mlp_layernorm",
        "mlp.gate_proj": "mlp.linear_gate",
        "mlp.up_proj": "mlp.linear_up",
        "mlp.down_proj": "mlp.linear_fc2",
    }
    own = {
        "model.embed_tokens.weight": start["embedding.word_embeddings.weight"],
        "model.norm.weight": start["decoder.final_layernorm.weight"],
        "lm_head.weight": start["output_layer.weight"],
    }
    for i in range(layers):
        for theirs, ours in names.items():
            own[f"model.layers.{i}.{theirs}.weight"] = start[f"decoder.layers.{i}.{ours}.weight"]
    model.load_state_dict(own)


def build(work: Workload, start: dict[str, Tensor]) -> Contender:
    """A plain loop around LlamaForCausalLM with its SDPA attention."""
    config = transformers.LlamaConfig(
        hidden_size=work.hidden,
        intermediate_size=work.ffn,
        num_hidden_layers=work.layers,
        num_attention_heads=work.heads,
        num_key_value_heads=work.heads,
        vocab_size=work.vocab,
        max_position_embeddings=work.sequence,
        rms_norm_eps=work.norm_eps,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
        # transformers refuses special tokens outside the vocabulary; the loop uses none.
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).float().train()
    load(model, start, work.layers)
    optimizer = torch.optim.AdamW(
        decay_groups(model.parameters(), work), lr=work.lr, betas=work.betas, eps=work.eps, fused=True
    )

    def step(tokens: Tensor) -> float:
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        loss = model(input_ids=inputs, labels=labels, shift_labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    return Contender(f"transformers {transformers.__version__}", step)
