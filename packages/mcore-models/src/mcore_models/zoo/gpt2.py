"""The GPT-2 family (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners"). Data only."""

from mcore_models.specs import ModelSpec

_GPT2 = {"vocab_size": 50257, "max_position_embeddings": 1024}

GPT = ModelSpec(
    name="gpt",
    summary="GPT-2: learned positions, LayerNorm, GELU, biases, tied embeddings",
    defaults={
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": 1e-5,
        "swiglu": False,
        "disable_bias_linear": False,
        "untie_embeddings_and_output_weights": False,
    },
    presets={
        "gpt2-small": {**_GPT2, "num_layers": 12, "hidden_size": 768, "num_attention_heads": 12},
        "gpt2-medium": {**_GPT2, "num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16},
        "gpt2-large": {**_GPT2, "num_layers": 36, "hidden_size": 1280, "num_attention_heads": 20},
        "gpt2-xl": {**_GPT2, "num_layers": 48, "hidden_size": 1600, "num_attention_heads": 25},
    },
)
