"""Rules of the rank grid: how ranks divide, and what each axis asks of the model's sizes. No torch."""

from __future__ import annotations

from mcore_cli.resolve import model_parallel_size
from mcore_cli.rules.engine import Context, Rule, Violation, divisors, nearest_divisors, nearest_multiples

TP = "--tensor-model-parallel-size"
PP = "--pipeline-model-parallel-size"
CP = "--context-parallel-size"


def world(context: Context) -> Violation | None:
    """Ranks are a multiple of tp x pp x cp."""
    parallel = context.config.parallel
    size = model_parallel_size(context.config)
    if context.world_size % size == 0:
        return None
    tp, pp, cp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    return Violation(
        "world-size",
        f"{context.world_size} rank{'s' if context.world_size > 1 else ''} for {TP} {tp} x {PP} {pp} x {CP} {cp}",
        f"ranks must be a multiple of {tp} x {pp} x {cp} = {size}",
        "set --nproc-per-node (or the launcher's ranks), or a smaller size",
        f"{nearest_multiples(context.world_size, size)} ranks",
    )


def context_parallel(context: Context) -> Violation | None:
    """Context parallelism does not exist yet."""
    size = context.config.parallel.context_parallel_size
    if size == 1:
        return None
    return Violation(
        "context-parallel", f"{CP} {size}", "context parallelism is not available in this version", "use 1", "1"
    )


def sequence_parallel(context: Context) -> Violation | None:
    """Sequence parallelism splits over tp, so it needs one."""
    parallel = context.config.parallel
    if not parallel.sequence_parallel or parallel.tensor_model_parallel_size > 1:
        return None
    return Violation(
        "sequence-parallel",
        f"--sequence-parallel with {TP} 1",
        "it splits activations over the tensor-parallel ranks and has no effect with one",
        f"set {TP} above 1 or use --no-sequence-parallel",
        f"{TP} 2",
    )


def sequence_divides(context: Context) -> Violation | None:
    """Under sequence parallelism each rank holds s/tp tokens."""
    parallel, length = context.config.parallel, context.config.data.seq_length
    tp = parallel.tensor_model_parallel_size
    if not parallel.sequence_parallel or length % tp == 0:
        return None
    return Violation(
        "sequence-split",
        f"--seq-length {length} with --sequence-parallel and {TP} {tp}",
        "the sequence length must be divisible by the tensor-parallel size",
        "change --seq-length or drop --sequence-parallel",
        f"--seq-length {nearest_multiples(length, tp)}",
    )


def heads_divide(context: Context) -> Violation | None:
    """Each tensor-parallel rank holds whole query heads."""
    model, tp = context.config.model, context.config.parallel.tensor_model_parallel_size
    if model.num_attention_heads % tp == 0:
        return None
    return Violation(
        "heads-per-rank",
        f"--num-attention-heads {model.num_attention_heads} ({model.num_kv_heads} KV heads) over {TP} {tp}",
        "query heads must be divisible by the tensor-parallel size",
        f"change --num-attention-heads or {TP}",
        f"{TP} {nearest_divisors(tp, model.num_attention_heads)}; "
        f"--num-attention-heads {nearest_multiples(model.num_attention_heads, tp)}",
    )


def kv_heads_divide(context: Context) -> Violation | None:
    """KV heads are split evenly over tp, or each is copied to equally many ranks."""
    model, tp = context.config.model, context.config.parallel.tensor_model_parallel_size
    groups = model.num_kv_heads
    if groups % tp == 0 or tp % groups == 0:
        return None
    legal = sorted(
        (n for n in divisors(model.num_attention_heads) if n % tp == 0 or tp % n == 0), key=lambda n: abs(n - groups)
    )
    return Violation(
        "kv-heads-per-rank",
        f"--num-query-groups {groups} ({model.num_attention_heads} query heads) over {TP} {tp}",
        "KV heads must be a multiple or a divisor of the tensor-parallel size",
        f"change --num-query-groups or {TP}",
        f"--num-query-groups {' or '.join(str(n) for n in sorted(legal[:2]))}",
    )


def ffn_divides(context: Context) -> Violation | None:
    """Each tensor-parallel rank holds an equal part of the MLP."""
    size, tp = context.config.model.ffn_size, context.config.parallel.tensor_model_parallel_size
    if size % tp == 0:
        return None
    return Violation(
        "ffn-per-rank",
        f"--ffn-hidden-size {size} over {TP} {tp}",
        "the MLP width must be divisible by the tensor-parallel size",
        f"change --ffn-hidden-size or {TP}",
        f"--ffn-hidden-size {nearest_multiples(size, tp)}",
    )


def nccl_needs_cuda(context: Context) -> Violation | None:
    """NCCL moves CUDA tensors only."""
    backend, device = context.config.parallel.distributed_backend, context.config.train.device
    if backend != "nccl" or device != "cpu":
        return None
    return Violation(
        "backend",
        "--distributed-backend nccl with --device cpu",
        "nccl moves tensors of CUDA devices only",
        "use --distributed-backend gloo, or --device cuda",
        "gloo",
    )


LAYOUT_RULES = (
    Rule("context-parallel", context_parallel),
    Rule("world-size", world),
    Rule("sequence-parallel", sequence_parallel),
    Rule("sequence-split", sequence_divides),
    Rule("heads-per-rank", heads_divide),
    Rule("kv-heads-per-rank", kv_heads_divide),
    Rule("ffn-per-rank", ffn_divides),
    Rule("backend", nccl_needs_cuda),
)
