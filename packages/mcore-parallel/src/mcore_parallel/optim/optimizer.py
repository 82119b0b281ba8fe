"""The optimizer as training uses it: complete gradients, divide once, clip, step on owned shards, publish weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mcore_parallel.axis import Layout
from mcore_parallel.config import OptimizerConfig, ParallelConfig
from mcore_parallel.grad_sync import GradBuffers
from mcore_parallel.optim.grad_norm import clip_coefficient, global_norm
from mcore_parallel.specs import OptimizerSpec
from mcore_parallel.zero import OwnedShard, StateShard, counted_ranges, owned_shards, publish, state_shards


@dataclass(frozen=True)
class StepStats:
    """What a step did. ``applied`` is False when the gradient was not finite: weights and state are then untouched.

    ``grad_norm`` is the global L2 norm of the divided gradient before clipping.
    """

    grad_norm: float
    clip_coefficient: float
    applied: bool


class ShardedOptimizer:
    """A torch optimizer over the flat shards that this rank owns.

    A step is ``begin_step(n)``, ``n`` micro-batches of backward, ``finish_grads()``, ``step(num_tokens)``. A step that
    does not wait for the weights leaves ZeRO's all-gather running: :meth:`complete_weights` before anything reads them.
    """

    def __init__(
        self,
        buffers: GradBuffers,
        shards: list[OwnedShard],
        torch_optimizer: torch.optim.Optimizer,
        *,
        clip_grad: float = 0.0,
    ) -> None:
        """``torch_optimizer`` works on the ``master`` of each of ``shards``; ``clip_grad`` 0 is off."""
        self.buffers, self.shards = buffers, shards
        self.torch_optimizer = torch_optimizer
        self.clip_grad = clip_grad
        self._world = buffers.layout.axis("world")
        self._device = shards[0].master.device
        self._counted = [
            (shard, begin, end) for shard in shards for begin, end in counted_ranges(shard, buffers.layout)
        ]

    def begin_step(self, num_micro_batches: int = 1) -> None:
        """Zero the gradients and expect ``num_micro_batches`` backward passes."""
        self.buffers.begin_step(num_micro_batches)

    def finish_grads(self) -> None:
        """Complete the gradients: ``main_grad`` becomes the sum over all that trained (ZeRO: own shards only)."""
        self.buffers.finish()

    def grad_norm(self) -> float:
        """The global L2 norm of what the finished gradients are now; a collective of all ranks."""
        grads = (shard.grad[begin:end] for shard, begin, end in self._counted)
        return global_norm(grads, world=self._world, device=self._device)

    def param_norm(self) -> float:
        """The global L2 norm of the (master) weights; a collective of all ranks."""
        masters = (shard.master.detach()[begin:end] for shard, begin, end in self._counted)
        return global_norm(masters, world=self._world, device=self._device)

    def reduce_chunk(self, chunk: int) -> None:
        """Start the reduction of a model chunk's gradients after its last backward of the step."""
        self.buffers.reduce_chunk(chunk)

    def complete_weights(self, chunk: int | None = None) -> None:
        """Wait until the weights of ``chunk`` (default: of all) are whole on this rank; at once if they are."""
        self.buffers.finish_gather_weights(chunk)

    def step(self, num_tokens: float, *, wait: bool = True) -> StepStats:
        """Divide the finished gradients by the global ``num_tokens``, clip, update and publish the weights.

        ``wait`` False returns before the weights are whole, so that their all-gather overlaps what follows.

        A batch without any valid token has a zero gradient, which stays zero. All ranks take the same decision: a
        gradient that is not finite changes nothing (see :meth:`local_non_finite` for whose it was).

        Raises:
            ValueError: a negative token count.
        """
        if num_tokens < 0:
            raise ValueError(f"the number of tokens cannot be negative, got {num_tokens}")
        divisor = max(float(num_tokens), 1.0)
        norm = self.grad_norm() / divisor
        if not math.isfinite(norm):
            return StepStats(norm, 1.0, applied=False)
        coefficient = clip_coefficient(norm, self.clip_grad)
        with torch.no_grad():
            for shard in self.shards:
                shard.grad.mul_(coefficient / divisor)
        self.torch_optimizer.step()
        publish(self.buffers, self.shards)
        if wait:
            self.complete_weights()
        return StepStats(norm, coefficient, applied=True)

    def local_non_finite(self) -> list[str]:
        """After ``finish_grads()``: parameters whose gradient was not finite on this rank before any reduction."""
        return self.buffers.local_non_finite()

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group."""
        for group in self.torch_optimizer.param_groups:
            group["lr"] = lr

    def set_weight_decay(self, weight_decay: float) -> None:
        """Set the weight decay of the groups that decay; biases and norms keep 0."""
        for group in self.torch_optimizer.param_groups:
            group["weight_decay"] = weight_decay if group["decay"] else 0.0

    @property
    def step_count(self) -> int:
        """Steps taken, as the optimizer counts them (Adam's bias correction); 0 for one that does not count."""
        counts = {int(state["step"]) for state in self.torch_optimizer.state.values() if "step" in state}
        assert len(counts) <= 1, f"shards disagree on the step: {sorted(counts)}"
        return counts.pop() if counts else 0

    @step_count.setter
    def step_count(self, value: int) -> None:
        for state in self.torch_optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"].fill_(value)
            elif "step" in state:
                state["step"] = value

    def state_arrays(self) -> list[StateShard]:
        """This rank's optimizer state by parameter, as views to write to a checkpoint or to load into.

        After loading, call :meth:`refresh_weights`.
        """
        slots = [
            {name: value for name, value in self._state(shard).items() if _is_slot(value, shard)}
            for shard in self.shards
        ]
        return state_shards(self.shards, slots)

    def _state(self, shard: OwnedShard) -> dict[str, Any]:
        return self.torch_optimizer.state.get(shard.master, {})

    def refresh_weights(self) -> None:
        """Make the weights what the masters say, on every data-parallel rank (after masters were loaded)."""
        publish(self.buffers, self.shards)
        self.complete_weights()

    def refresh_masters(self) -> None:
        """Make the masters what the weights say (after weights were loaded without masters)."""
        with torch.no_grad():
            for shard in self.shards:
                shard.read_weights()


def _is_slot(value: object, shard: OwnedShard) -> bool:
    return isinstance(value, Tensor) and value.shape == shard.master.shape


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    layout: Layout,
    *,
    spec: OptimizerSpec,
    optimizer: OptimizerConfig,
    parallel: ParallelConfig,
    chunk_order: Sequence[int] = (),
) -> ShardedOptimizer:
    """Move placed ``parameters`` (in build order) into flat buffers; ``spec``'s optimizer gets what this rank owns.

    ``chunk_order``: the order of the plan's ``REDUCE`` actions, if it has any.

    Raises:
        ValueError: nothing to train, a parameter without placement, or an optimizer that breaks its spec.
    """
    buffers = GradBuffers(
        parameters,
        layout,
        bucket_size=parallel.ddp_bucket_size,
        overlap=parallel.overlap_grad_reduce,
        sharded=parallel.use_distributed_optimizer,
        chunk_order=chunk_order,
    )
    shards = owned_shards(buffers)
    torch_optimizer = spec.build(_groups(shards, optimizer), optimizer)
    _check_slots(spec, shards, torch_optimizer)
    return ShardedOptimizer(buffers, shards, torch_optimizer, clip_grad=optimizer.clip_grad)


def _groups(shards: list[OwnedShard], config: OptimizerConfig) -> list[dict[str, Any]]:
    groups = []
    for decay in (True, False):
        masters = [shard.master for shard in shards if shard.buffer.kind.decay == decay]
        if masters:
            weight_decay = config.weight_decay if decay else 0.0
            groups.append({"params": masters, "lr": config.lr, "weight_decay": weight_decay, "decay": decay})
    return groups


def _check_slots(spec: OptimizerSpec, shards: list[OwnedShard], torch_optimizer: torch.optim.Optimizer) -> None:
    for shard in shards:
        state = torch_optimizer.state.get(shard.master, {})
        missing = [name for name in spec.slots if not _is_slot(state.get(name), shard)]
        if missing:
            raise ValueError(
                f"optimizer {spec.name!r} must hold its slots before the first step, one value per element, but "
                f"{', '.join(missing)} is missing; create them in build() (zeros), or take them out of the spec's slots"
            )
