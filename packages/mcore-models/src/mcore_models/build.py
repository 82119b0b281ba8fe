"""From a model configuration to the modules of a rank's stages: the only place in this package that reads the fields
of ``ModelConfig`` to build layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from mcore_models.attention import SelfAttention, qkv_placements
from mcore_models.config import ModelConfig
from mcore_models.dropout import AttentionDropout, HiddenDropout
from mcore_models.embedding import Embedding
from mcore_models.environment import Environment
from mcore_models.heads import HeadSplit
from mcore_models.kernels import KernelSet
from mcore_models.layer import TransformerLayer
from mcore_models.mlp import MLP, fc1_placements
from mcore_models.norm import LayerNorm, RMSNorm
from mcore_models.output import Output
from mcore_models.rope import RopeScaling, RotaryEmbedding, rotary_size
from mcore_models.rules import violations
from mcore_models.specs import Recompute, StageSpec, holds_both_ends
from mcore_models.stage_model import StageModel
from mcore_models.vocabulary import VocabularySplit
from mcore_parallel import rng
from mcore_parallel.axis import Layout
from mcore_parallel.embedding import VocabParallelEmbedding
from mcore_parallel.flat_layout import padding_ranges
from mcore_parallel.linear import ColumnParallelLinear, RowParallelLinear
from mcore_parallel.placement import Init, Placement, columns, place, placement_of, replicated, rows, shared

WORD_EMBEDDING = "embedding.word_embeddings.weight"
POSITION_EMBEDDING = "embedding.position_embeddings.weight"
OUTPUT_WEIGHT = "output_layer.weight"


def build_stage_models(
    config: ModelConfig,
    *,
    layout: Layout,
    stages: Sequence[StageSpec],
    kernels: KernelSet,
    sequence_parallel: bool = False,
    recompute: Recompute | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> list[StageModel]:
    """Build the modules of a rank's ``stages``, one per model chunk, their parameters placed but empty:
    :func:`initialise_model` or a load fills them. Padding rows are zero from the start.

    With tied weights the word embedding is one parameter where the first and the last stage are both among ``stages``;
    otherwise each of the two ranks holds a copy, whose gradients are partial over the axis ``embedding``.

    Raises:
        ValueError: the vocabulary is not known, or the configuration cannot be built at this tensor-parallel size;
            every reason is named.
    """
    tp = layout.axis("tp")
    found = violations(config, tp=tp.size)
    if found:
        raise ValueError("; ".join(found))
    environment = Environment(
        tp=tp,
        kernels=kernels,
        hidden=config.hidden_size,
        sequence_parallel=sequence_parallel and tp.size > 1,
        dtype=dtype,
        device=device,
    )
    if config.vocab_size is None:
        raise ValueError("vocab-size is not known: give --vocab-size, or a tokenizer to take it from")
    vocabulary = VocabularySplit(config.vocab_size, config.make_vocab_size_divisible_by, tp.size, tp.rank)
    builder = _Builder(config, environment, vocabulary, tied_stages=config.tied and not holds_both_ends(stages))
    embedding = builder.embedding() if any(stage.is_first for stage in stages) else None
    models = [builder.model(stage, embedding, recompute) for stage in stages]
    _number_chunks(models)
    for model in models:
        _clear_padding(model)
    return models


def build_stage_model(
    config: ModelConfig,
    *,
    layout: Layout,
    stage: StageSpec,
    kernels: KernelSet,
    sequence_parallel: bool = False,
    recompute: Recompute | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> StageModel:
    """:func:`build_stage_models` of a rank that holds one stage."""
    (model,) = build_stage_models(
        config,
        layout=layout,
        stages=[stage],
        kernels=kernels,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        dtype=dtype,
        device=device,
    )
    return model


def distinct_parameters(models: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters of a rank's chunks in build order, a shared one once."""
    return list({id(parameter): parameter for model in models for parameter in model.parameters()}.values())


def _number_chunks(models: Sequence[StageModel]) -> None:
    """Write each parameter's chunk into its placement. A word embedding that two chunks share belongs to the first
    stage's, whose backward comes last."""
    order = sorted(range(len(models)), key=lambda chunk: not models[chunk].stage.is_first)
    seen: set[int] = set()
    for chunk in order:
        for parameter in models[chunk].parameters():
            if id(parameter) not in seen:
                place(parameter, replace(placement_of(parameter), chunk=chunk))
                seen.add(id(parameter))


def _clear_padding(model: nn.Module) -> None:
    # Loads fill only what has a logical place, and a nan in a padding row would spread through products with zero.
    with torch.no_grad():
        for parameter in model.parameters():
            for begin, end in padding_ranges(placement_of(parameter), tuple(parameter.shape)):
                parameter.view(-1)[begin:end] = 0


def initialise_model(model: nn.Module, *, seed: int) -> None:
    """Give every parameter its initial value, which depends on ``seed``, global name and global index alone."""
    for parameter in model.parameters():
        rng.initialise(parameter, placement_of(parameter), seed=seed)


@dataclass(frozen=True)
class _Builder:
    """``tied_stages``: tied weights whose two ends live on different ranks."""

    config: ModelConfig
    environment: Environment
    vocabulary: VocabularySplit
    tied_stages: bool

    def model(self, stage: StageSpec, embedding: Embedding | None, recompute: Recompute | None) -> StageModel:
        """``embedding``: that of the first stage, if this rank has it."""
        first = stage.first_layer
        return StageModel(
            stage,
            embedding=embedding if stage.is_first else None,
            layers=[self.layer(i) for i in range(first, first + stage.num_layers)],
            output=self.output(embedding) if stage.is_last else None,
            rotary=self.rotary(),
            recompute=recompute,
            environment=self.environment,
        )

    @property
    def init(self) -> Init:
        return Init("normal", self.config.init_method_std)

    @property
    def residual_init(self) -> Init:
        """Projections into the residual stream start smaller, by the depth of the whole model (GPT-2)."""
        return Init("normal", self.config.init_method_std / math.sqrt(2 * self.config.num_layers))

    def rotary(self) -> RotaryEmbedding | None:
        config = self.config
        if config.position_embedding_type != "rope":
            return None
        scaling = None
        if config.use_rope_scaling:
            scaling = RopeScaling(
                config.rope_scaling_factor,
                config.rope_scaling_low_freq_factor,
                config.rope_scaling_high_freq_factor,
                config.rope_scaling_original_max_position_embeddings,
            )
        size = rotary_size(config.head_size, config.rotary_percent)
        return RotaryEmbedding(size, base=config.rotary_base, scaling=scaling)

    def hidden_dropout(self, layer: int, site: str) -> HiddenDropout:
        environment = self.environment
        probability = self.config.hidden_dropout
        return HiddenDropout(probability, layer, site, environment.tp, environment.sequence_parallel)

    def norm(self, name: str) -> LayerNorm | RMSNorm:
        kind = RMSNorm if self.config.normalization == "RMSNorm" else LayerNorm
        return kind(name, self.config.hidden_size, epsilon=self.config.norm_epsilon, environment=self.environment)

    def vocabulary_placement(self, name: str) -> Placement:
        split = self.vocabulary
        begin, end = split.first_row, split.first_row + split.local_rows
        shape = (split.vocab_size, self.config.hidden_size)
        piece = rows(name, shape, begin=begin, end=end, init=self.init)
        is_copy = self.tied_stages and name == WORD_EMBEDDING
        return Placement((shared(piece, partial_over=("embedding",)) if is_copy else piece,))

    def embedding(self) -> Embedding:
        config, environment = self.config, self.environment
        words = VocabParallelEmbedding(
            self.vocabulary.local_rows,
            config.hidden_size,
            tp=environment.tp,
            first_row=self.vocabulary.first_row,
            weight=self.vocabulary_placement(WORD_EMBEDDING),
            sequence_parallel=environment.sequence_parallel,
            dtype=environment.dtype,
            device=environment.device,
        )
        return Embedding(
            words,
            self.position_table(),
            dropout=self.hidden_dropout(0, "embedding"),
            tp=environment.tp,
            sequence_parallel=environment.sequence_parallel,
        )

    def position_table(self) -> nn.Parameter | None:
        config = self.config
        if config.position_embedding_type != "learned_absolute":
            return None
        if config.max_position_embeddings is None:
            raise ValueError("learned positions need max-position-embeddings: give it, or a seq-length to take it from")
        shape = (config.max_position_embeddings, config.hidden_size)
        return self.environment.replicated_parameter(POSITION_EMBEDDING, shape, self.init)

    def output(self, embedding: Embedding | None) -> Output:
        config, environment = self.config, self.environment
        if config.tied and embedding is not None:
            weight = embedding.word_embeddings.weight
        else:
            name = WORD_EMBEDDING if config.tied else OUTPUT_WEIGHT
            weight = environment.empty((self.vocabulary.local_rows, config.hidden_size))
            place(weight, self.vocabulary_placement(name))
        return Output(
            self.norm("decoder.final_layernorm"),
            weight,
            vocab_size=self.vocabulary.vocab_size,
            tp=environment.tp,
            sequence_parallel=environment.sequence_parallel,
        )

    def layer(self, index: int) -> TransformerLayer:
        prefix = f"decoder.layers.{index}"
        return TransformerLayer(
            self.attention(index, f"{prefix}.self_attention"),
            self.mlp(f"{prefix}.mlp"),
            input_norm=self.norm(f"{prefix}.input_layernorm"),
            mlp_norm=self.norm(f"{prefix}.pre_mlp_layernorm"),
            dropouts=(self.hidden_dropout(index, "attention_output"), self.hidden_dropout(index, "mlp_output")),
        )

    def attention(self, index: int, prefix: str) -> SelfAttention:
        config, tp = self.config, self.environment.tp
        heads = HeadSplit(config.num_attention_heads, config.num_kv_heads, config.head_size, tp.size, tp.rank)
        weight, bias = qkv_placements(
            prefix,
            heads,
            hidden=config.hidden_size,
            init=self.init,
            has_bias=config.has_linear_bias or config.add_qkv_bias,
        )
        return SelfAttention(
            self.column(heads.qkv_rows, weight, bias),
            self.row(f"{prefix}.linear_proj", config.num_attention_heads * config.head_size),
            heads=heads,
            dropout=AttentionDropout(config.attention_dropout, index, heads),
            kernels=self.environment.kernels,
        )

    def mlp(self, prefix: str) -> MLP:
        config, environment = self.config, self.environment
        weight, bias = fc1_placements(
            prefix,
            hidden=config.hidden_size,
            ffn=config.ffn_size,
            gated=config.swiglu,
            init=self.init,
            has_bias=config.has_linear_bias,
            tp=environment.tp,
        )
        width = config.ffn_size // environment.tp.size * (2 if config.swiglu else 1)
        return MLP(
            self.column(width, weight, bias),
            self.row(f"{prefix}.linear_fc2", config.ffn_size),
            activation=environment.kernels.swiglu if config.swiglu else environment.kernels.gelu,
        )

    def column(self, local_out: int, weight: Placement, bias: Placement | None) -> ColumnParallelLinear:
        environment = self.environment
        return ColumnParallelLinear(
            self.config.hidden_size,
            local_out,
            tp=environment.tp,
            weight=weight,
            bias=bias,
            sequence_parallel=environment.sequence_parallel,
            dtype=environment.dtype,
            device=environment.device,
        )

    def row(self, name: str, in_features: int) -> RowParallelLinear:
        """A projection ``[in_features/tp] -> [h]`` into the residual stream."""
        environment, hidden = self.environment, self.config.hidden_size
        local = in_features // environment.tp.size
        begin = environment.tp.rank * local
        weight = columns(
            f"{name}.weight", (hidden, in_features), begin=begin, end=begin + local, init=self.residual_init
        )
        bias = None
        if self.config.has_linear_bias:
            bias = replicated(f"{name}.bias", (hidden,), init=Init("zeros"), **environment.copies())
        return RowParallelLinear(
            local,
            hidden,
            tp=environment.tp,
            weight=Placement((weight,)),
            bias=bias,
            sequence_parallel=environment.sequence_parallel,
            dtype=environment.dtype,
            device=environment.device,
        )
