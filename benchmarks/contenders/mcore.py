"""mcore on one rank, put together from its libraries: the same stage, executor and optimizer that every layout uses."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from contenders.workload import Contender, Workload
from mcore_models.build import build_stage_model
from mcore_models.config import ModelConfig
from mcore_models.specs import StageSpec
from mcore_models.stage_model import StageModel
from mcore_parallel.axis import single_layout
from mcore_parallel.config import OptimizerConfig, ParallelConfig
from mcore_parallel.optim.optimizer import build_optimizer
from mcore_parallel.pipeline import executor
from mcore_parallel.pipeline.compile import compile_schedule
from mcore_parallel.placement import placement_of
from mcore_parallel.plugins import Registry, plugin_manager


class OneStage:
    """The whole model as the only stage of a pipeline; ``tokens`` ``[b, s + 1]`` are set before each step."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, model: StageModel) -> None:
        self.model = model
        self.tokens = torch.empty(0)

    def receive_shape(self) -> tuple[int, ...]:
        """Nothing is received on one stage; the shape of the hidden states all the same."""
        batch, length = self.tokens.shape
        return self.model.activation_shape(batch, length - 1)

    def forward(self, micro_batch: int, chunk: int, received: Tensor | None) -> Tensor:
        """The summed loss of the step's only micro-batch."""
        del micro_batch, chunk, received
        inputs, labels = self.tokens[:, :-1].contiguous(), self.tokens[:, 1:].contiguous()
        return self.model(inputs, labels=labels)


def model_config(work: Workload, defaults: dict[str, object]) -> ModelConfig:
    """The workload as a Llama, in the words of a recipe."""
    return ModelConfig(
        **defaults,
        num_layers=work.layers,
        hidden_size=work.hidden,
        ffn_hidden_size=work.ffn,
        num_attention_heads=work.heads,
        vocab_size=work.vocab,
        max_position_embeddings=work.sequence,
        rotary_base=work.rotary_base,
    )


def load(parameters: list[nn.Parameter], start: dict[str, Tensor]) -> None:
    """Copy the common starting point, piece by piece as the placements say."""
    with torch.no_grad():
        for parameter in parameters:
            for piece in placement_of(parameter).pieces:
                box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
                parameter[piece.start : piece.start + piece.shape[0]] = start[piece.name][box]


def build(work: Workload, start: dict[str, Tensor]) -> Contender:
    """mcore's training step with one micro-batch and one rank."""
    plugins = plugin_manager()
    family = Registry("model", plugins.collect("mcore_models"))["llama"]
    kernels = Registry("kernel set", plugins.collect("mcore_kernels"))["local"].build()
    schedule = Registry("schedule", plugins.collect("mcore_pipeline_schedules"))["1f1b"]
    adam = Registry("optimizer", plugins.collect("mcore_optimizers"))["adam"]

    layout = single_layout()
    config = model_config(work, {**family.fields(), "norm_epsilon": work.norm_eps})
    stage = StageSpec(first_layer=0, num_layers=work.layers, is_first=True, is_last=True)
    model = build_stage_model(config, layout=layout, stage=stage, kernels=kernels)
    load(list(model.parameters()), start)
    optimizer = build_optimizer(
        model.parameters(),
        layout,
        spec=adam,
        optimizer=OptimizerConfig(
            lr=work.lr,
            weight_decay=work.weight_decay,
            adam_beta1=work.betas[0],
            adam_beta2=work.betas[1],
            adam_eps=work.eps,
            clip_grad=work.clip,
        ),
        parallel=ParallelConfig(),
    )
    plan = compile_schedule(schedule, num_stages=1, num_micro_batches=1).for_rank(0)
    only_stage = OneStage(model)

    def step(tokens: Tensor) -> float:
        only_stage.tokens = tokens
        optimizer.begin_step(1)
        result = executor.run(plan, stage=only_stage, axis=layout.axis("pp"))
        optimizer.finish_grads()
        optimizer.step(work.tokens)
        return float(result.losses[0]) / work.tokens

    return Contender("mcore, one rank", step)
