"""Tiny models on one rank."""

import pytest
import torch

from mcore_models.build import build_stage_model, initialise_model
from mcore_models.config import ModelConfig
from mcore_models.kernels import torch_kernels
from mcore_models.specs import StageSpec
from mcore_parallel.axis import single_layout


@pytest.fixture
def tiny_fields():
    """Fields of tiny members of both families."""
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 101, "ffn_hidden_size": 48}
    return {
        "gpt": {**shape, "max_position_embeddings": 64},
        "llama": {
            **shape,
            "group_query_attention": True,
            "num_query_groups": 2,
            "position_embedding_type": "rope",
            "normalization": "RMSNorm",
            "swiglu": True,
            "disable_bias_linear": True,
            "untie_embeddings_and_output_weights": True,
        },
    }


@pytest.fixture
def build():
    """``build(fields, **options)`` makes the whole model on this rank."""

    def call(fields, *, kernels=None, dtype=torch.float64, seed=1234, **options):
        config = ModelConfig(**fields)
        stage = options.pop("stage", StageSpec(0, config.num_layers, True, True))
        kernels = kernels or torch_kernels()
        model = build_stage_model(config, layout=single_layout(), stage=stage, kernels=kernels, dtype=dtype, **options)
        initialise_model(model, seed=seed)
        return model

    return call
