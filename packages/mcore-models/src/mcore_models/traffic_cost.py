"""Bytes that one rank's training step moves, in closed form, by axis and operation. Pure integers, no torch.

As ``mcore_parallel.traffic`` counts them: the whole, unsharded buffer of each operation. ``A = s * b * h`` below is the
activation of one micro-batch. Sums of scalars for logging and the gradient norm (axis ``world``) are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mcore_models.config import ModelConfig
from mcore_models.local_parameters import LocalParameter, RankShape, local_parameters
from mcore_models.specs import Recompute, StageSpec
from mcore_parallel.flat_layout import plan_buckets
from mcore_parallel.pipeline.actions import Flow

Traffic = Counter[tuple[str, str]]


@dataclass(frozen=True)
class StepShape:
    """One rank's training step.

    ``data_ranks``: dp x cp. ``weight_bytes``: of a weight or activation element; ``reduce_bytes``: of an activation
    element while it is summed (4 for 16-bit activations on CPU, where they are summed in fp32; else as the former).
    ``num_crossings``: see :func:`num_crossings`.
    """

    seq_length: int
    micro_batch_size: int
    num_micro_batches: int
    num_crossings: int = 0
    data_ranks: int = 1
    zero: bool = False
    bucket_size: int = 40_000_000
    recompute: Recompute | None = None
    weight_bytes: int = 4
    reduce_bytes: int = 4

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch (``s * b``)."""
        return self.seq_length * self.micro_batch_size

    @property
    def wide_bytes(self) -> int:
        """Of an element of main gradients and of the loss: at least fp32."""
        return max(4, self.weight_bytes)


def num_crossings(flow: Flow, rank: int) -> int:
    """Boundaries between a stage of ``rank`` and the next or previous one on another rank: over each, a micro-batch
    sends one activation one way and one gradient the other."""
    neighbours = (find(rank, chunk) for chunk in range(flow.num_chunks) for find in (flow.upstream, flow.downstream))
    return sum(place is not None and place.rank != rank for place in neighbours)


def step_traffic(
    config: ModelConfig, *, stages: Sequence[StageSpec], rank: RankShape, shape: StepShape, vocab_size: int
) -> dict[tuple[str, str], int]:
    """Bytes by ``(axis, operation)``, as ``TrafficRecorder.totals()`` of that rank has them after one step.

    ``stages``: those of the rank, one per model chunk.
    """
    traffic: Traffic = Counter()
    if rank.tp > 1:
        for stage in stages:
            _tensor_parallel(traffic, config, stage, rank, shape)
    _pipeline(traffic, config, rank, shape)
    parameters = local_parameters(config, stages=stages, rank=rank, vocab_size=vocab_size)
    _partial_sums(traffic, parameters, shape)
    _data_parallel(traffic, parameters, shape)
    return {key: count for key, count in traffic.items() if count}


def _tensor_parallel(
    traffic: Traffic, config: ModelConfig, stage: StageSpec, rank: RankShape, shape: StepShape
) -> None:
    """Each layer has two column-parallel inputs and two row-parallel outputs.

    Plain: an all-reduce per output in forward and per input in backward. Sequence parallel: forward gathers each input
    and scatters each output; backward gathers each input again and scatters its gradient, and gathers each output's
    gradient (Korthikanti et al., arXiv:2205.05198).
    """
    inputs = outputs = 2 * stage.num_layers
    again_inputs, again_outputs = _recomputed(config, stage, shape.recompute)
    embeddings, losses = int(stage.is_first), int(stage.is_last)
    if rank.sequence_parallel:
        gathers = 2 * inputs + again_inputs + outputs + embeddings + losses
        scatters = inputs + outputs + again_outputs + embeddings + losses
        counts = {"all_gather": gathers * shape.weight_bytes, "reduce_scatter": scatters * shape.reduce_bytes}
    else:
        sums = inputs + outputs + again_outputs + embeddings + losses
        counts = {"all_reduce": sums * shape.reduce_bytes}
    activation = shape.tokens * config.hidden_size
    for op, count in counts.items():
        traffic["tp", op] += count * activation * shape.num_micro_batches
    # the loss: a maximum, a sum of exponentials and the label's logit per token
    traffic["tp", "all_reduce"] += losses * 3 * shape.tokens * shape.wide_bytes * shape.num_micro_batches


def _recomputed(config: ModelConfig, stage: StageSpec, recompute: Recompute | None) -> tuple[int, int]:
    """Column-parallel inputs and row-parallel outputs that backward computes once more.

    Recomputation stops at the last tensor that backward needs, so a chunk's last output is not summed again, unless
    dropout follows it.
    """
    inputs = outputs = 0
    for begin, end, recomputed in recompute.chunks(stage.num_layers) if recompute is not None else ():
        if recomputed:
            inputs += 2 * (end - begin)
            outputs += 2 * (end - begin) - (0 if config.hidden_dropout else 1)
    return inputs, outputs


def _pipeline(traffic: Traffic, config: ModelConfig, rank: RankShape, shape: StepShape) -> None:
    cut = rank.tp if rank.sequence_parallel else 1
    message = shape.tokens // cut * config.hidden_size * shape.weight_bytes
    for op in ("send", "recv"):
        traffic["pp", op] += shape.num_crossings * shape.num_micro_batches * message


def _partial_sums(traffic: Traffic, parameters: Iterable[LocalParameter], shape: StepShape) -> None:
    for parameter in parameters:
        for axis, num_elements in parameter.partial.items():
            traffic[axis, "all_reduce"] += num_elements * shape.wide_bytes


def _data_parallel(traffic: Traffic, parameters: list[LocalParameter], shape: StepShape) -> None:
    """Plain: an all-reduce of all main gradients. ZeRO-1: a reduce-scatter of them, an all-gather of the weights."""
    if shape.data_ranks == 1:
        return
    kinds: dict[tuple[bool, tuple[str, ...], int], list[tuple[int, int]]] = {}
    for index, parameter in enumerate(parameters):
        kind = parameter.decay, tuple(sorted(parameter.partial)), parameter.chunk
        kinds.setdefault(kind, []).append((index, parameter.num_elements))
    num_shards = shape.data_ranks if shape.zero else 1
    total = sum(
        plan_buckets(sizes[::-1], bucket_size=shape.bucket_size, num_shards=num_shards)[-1].end
        for sizes in kinds.values()
    )
    if shape.zero:
        traffic["dp_cp", "reduce_scatter"] += total * shape.wide_bytes
        traffic["dp_cp", "all_gather"] += total * shape.weight_bytes
    else:
        traffic["dp_cp", "all_reduce"] += total * shape.wide_bytes
