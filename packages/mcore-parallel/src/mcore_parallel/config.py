"""Configuration of mcore-parallel. Field names are Megatron's; a field's description is its flag's help. No torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]


LARGEST = 2**40


class Section(BaseModel):
    """Base of every configuration section: frozen, keyword-only, unknown keys refused, finite numbers only."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    @field_validator("*")
    @classmethod
    def _no_absurd_number(cls, value: Any) -> Any:
        # Sizes beyond any machine would only be found out by arithmetic that never ends.
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) > LARGEST:
            raise ValueError(f"must be at most {LARGEST}")
        return value


class ParallelConfig(Section):
    """How the ranks are laid out and how the model is cut over them."""

    tensor_model_parallel_size: int = Field(1, ge=1, description="Ranks that split each layer (tp).")
    pipeline_model_parallel_size: int = Field(1, ge=1, description="Stages that split the layers (pp).")
    context_parallel_size: int = Field(1, ge=1, description="Ranks that split each sequence, attention included (cp).")
    sequence_parallel: bool = Field(
        False, description="Split norm and dropout activations over tp along the sequence (sp)."
    )
    use_distributed_optimizer: bool = Field(
        False, description="ZeRO-1: shard optimizer states and master weights over dp."
    )
    ddp_bucket_size: int = Field(
        40_000_000, ge=1, description="Elements per gradient bucket; a bucket is reduced while backward goes on."
    )
    overlap_grad_reduce: bool = Field(
        True, description="Reduce gradient buckets during the last micro-batch's backward instead of after it."
    )
    use_tp_pp_dp_mapping: bool = Field(False, description="Rank order tp-cp-pp-dp instead of tp-cp-dp-pp.")
    pipeline_schedule: str = Field(
        "1f1b",
        description="Pipeline schedule, by its plugin name (mcore schedule list). 1f1b with virtual stages is "
        "interleaved 1F1B, as in Megatron.",
    )
    pipeline_schedule_table: str | None = Field(
        None, description="Pipeline schedule from a CSV or YAML file of every rank's actions, instead of a name."
    )
    num_virtual_stages_per_pipeline_rank: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Model chunks of each pipeline rank (vpp); default what the schedule needs.",
    )
    num_layers_per_virtual_pipeline_stage: int | None = Field(
        None, ge=1, description="Layers of one model chunk: the same choice in other words, from which vpp follows."
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = Field(
        None,
        ge=1,
        description="Micro-batches that a rank runs through one chunk before the next, under interleaved schedules; "
        "default the pipeline size.",
    )
    decoder_first_pipeline_num_layers: int | None = Field(
        None, ge=0, description="Layers of the first pipeline rank; the other ranks share the rest evenly."
    )
    decoder_last_pipeline_num_layers: int | None = Field(
        None, ge=0, description="Layers of the last pipeline rank; the other ranks share the rest evenly."
    )
    account_for_embedding_in_pipeline_split: bool = Field(
        False, description="Count the embedding as one layer of an even split: the first stage holds one layer less."
    )
    account_for_loss_in_pipeline_split: bool = Field(
        False, description="Count the output layer as one layer of an even split: the last stage holds one layer less."
    )
    pipeline_model_parallel_layout: str | None = Field(
        None,
        description='The layers of each stage in model order, as "Et*3|(tt|)*2,tL": E embedding, t layer, L output '
        "layer, | next stage, *n repeats, () groups. Vpp is its stages divided by pp.",
    )
    pipeline_split: Literal["even", "auto"] = Field(
        "even",
        description="even: equal stages; auto: the largest stage costs least, by FLOPs of layers and output layer.",
    )
    recompute_granularity: Literal["full"] | None = Field(
        None, description="Activation recomputation: full = whole layers are recomputed in backward."
    )
    recompute_method: Literal["uniform", "block"] | None = Field(
        None, description="uniform: chunks of --recompute-num-layers layers; block: the first that many of each stage."
    )
    recompute_num_layers: int | None = Field(
        None, ge=1, description="Layers per recomputed chunk (uniform) or recomputed per stage (block)."
    )
    distributed_backend: Literal["auto", "gloo", "nccl"] = Field(
        "auto", description="Communication backend; auto takes nccl on CUDA and gloo on CPU."
    )
    distributed_timeout_minutes: float = Field(
        10.0, gt=0, description="Longest wait in any collective before the run ends with an error, in minutes."
    )


class OptimizerConfig(Section):
    """Optimizer, gradient clipping, learning-rate and weight-decay schedules."""

    optimizer: str = Field("adam", description="Optimizer, by its plugin name.")
    lr: float = Field(3e-4, ge=0, description="Peak learning rate.")
    min_lr: float = Field(0.0, ge=0, description="Learning rate after the decay.")
    lr_decay_style: DecayStyle = Field("linear", description="Shape of the decay.")
    lr_decay_iters: int | None = Field(None, ge=1, description="Iterations of warm-up plus decay; default train-iters.")
    lr_decay_samples: int | None = Field(None, ge=1, description="As lr-decay-iters, in samples.")
    lr_warmup_iters: int = Field(0, ge=0, description="Iterations of linear warm-up.")
    lr_warmup_samples: int = Field(0, ge=0, description="As lr-warmup-iters, in samples.")
    lr_warmup_fraction: float | None = Field(None, ge=0, lt=1, description="Warm-up as a share of the decay length.")
    lr_warmup_init: float = Field(0.0, ge=0, description="Learning rate at the start of the warm-up.")
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = Field(
        "exponential", description="Shape of the final annealing of WSD."
    )
    lr_wsd_decay_iters: int | None = Field(None, ge=1, description="Iterations of the final annealing of WSD.")
    lr_wsd_decay_samples: int | None = Field(None, ge=1, description="As lr-wsd-decay-iters, in samples.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay; not applied to biases and norms.")
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="How weight decay moves from start-weight-decay to end-weight-decay."
    )
    start_weight_decay: float | None = Field(None, ge=0, description="Weight decay at the start of the run.")
    end_weight_decay: float | None = Field(None, ge=0, description="Weight decay at the end of the run.")
    clip_grad: float = Field(1.0, ge=0, description="Largest global L2 norm of the gradient; 0 turns clipping off.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Adam's decay of the first moment.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Adam's decay of the second moment.")
    adam_eps: float = Field(1e-8, gt=0, description="Adam's epsilon.")
    sgd_momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of SGD.")
    override_opt_param_scheduler: bool = Field(
        False,
        description="On resume, take the schedule from the flags and ignore the checkpoint's.",
        json_schema_extra={"flag": "--override-opt_param-scheduler"},
    )
    use_checkpoint_opt_param_scheduler: bool = Field(
        False,
        description="On resume, take the schedule from the checkpoint and ignore the flags.",
        json_schema_extra={"flag": "--use-checkpoint-opt_param-scheduler"},
    )
