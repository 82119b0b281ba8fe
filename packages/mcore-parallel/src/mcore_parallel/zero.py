"""What one rank's optimizer owns: flat fp32 (or float64) master weights with their gradients, whole or ZeRO-1 shards.

fp32 and float64 masters are the weights themselves; 16-bit weights have fp32 masters beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mcore_parallel.axis import Layout
from mcore_parallel.flat_layout import ALIGNMENT, intersect, merge_ranges, piece_range, round_up
from mcore_parallel.grad_buffer import GradBuffer
from mcore_parallel.grad_sync import GradBuffers
from mcore_parallel.placement import Placement


class OwnedShard:
    """Elements ``begin : end`` of one buffer, which this rank's optimizer updates.

    ``master`` ``[end - begin]`` carries the reduced gradient as its ``.grad``.
    """

    def __init__(self, buffer: GradBuffer, begin: int, end: int) -> None:
        self.buffer, self.begin, self.end = buffer, begin, end
        self.weights = buffer.weights[begin:end]
        self.has_own_master = buffer.weights.dtype != buffer.grads.dtype
        self.master = nn.Parameter(self.weights.to(buffer.grads.dtype))  # .to() is the same memory for an equal dtype
        self.master.grad = self.grad = buffer.grads[begin:end]

    def write_weights(self) -> None:
        """Round the master to the weights' dtype (nothing to do where it is the weights)."""
        if self.has_own_master:
            self.weights.copy_(self.master.detach())

    def read_weights(self) -> None:
        """Set the master from the weights, after weights were loaded without one."""
        if self.has_own_master:
            self.master.detach().copy_(self.weights)


@dataclass(frozen=True)
class StateShard:
    """Optimizer state of (a part of) one local parameter, for checkpoints.

    ``tensors`` are flat views, written and read in place: slot name to elements ``begin : begin + n`` of the flattened
    local parameter of ``local_shape``. ``whole`` says that the shard is all of the parameter and that every
    data-parallel rank holds the same; otherwise (ZeRO) this rank alone holds it. Weights of 16 bits have a slot
    ``master``; for others the parameter itself is the master.
    """

    placement: Placement
    local_shape: tuple[int, ...]
    begin: int
    tensors: dict[str, Tensor]
    whole: bool

    @property
    def end(self) -> int:
        """One past the last element of the flattened local parameter that the shard holds."""
        return self.begin + next(iter(self.tensors.values())).numel() if self.tensors else self.begin


def owned_shards(buffers: GradBuffers) -> list[OwnedShard]:
    """The shards that this rank owns, buffer by buffer."""
    return [OwnedShard(buffer, begin, end) for buffer in buffers.buffers for begin, end in buffer.owned]


def publish(buffers: GradBuffers, shards: Sequence[OwnedShard]) -> None:
    """Put updated masters into the weights, and start giving them to every data-parallel rank.

    Until ``buffers.finish_gather_weights()`` the weights outside this rank's shards are in flight.
    """
    with torch.no_grad():
        for shard in shards:
            shard.write_weights()
        buffers.start_gather_weights()


def counted_ranges(shard: OwnedShard, layout: Layout) -> list[tuple[int, int]]:
    """The ranges of ``shard`` (relative to its begin) that this rank contributes to global norms.

    Over all ranks every element of every logical array is counted once: by the first of the ranks that hold copies of
    it, along the axes it is shared over and, without ZeRO, along the data axes. Padding rows are in no range.
    """
    buffer = shard.buffer
    if not buffer.sharded and not buffer.axis.is_first:
        return []
    ranges = []
    for span in buffer.spans:
        shape = tuple(buffer.parameters[span.index].shape)
        for piece in buffer.placements[span.index].pieces:
            if all(layout.axis(name).is_first for name in piece.shared_over):
                begin, end = piece_range(piece, shape)
                # The gap up to the next parameter is always zero: counting it joins neighbours into long runs.
                stop = span.begin + end
                ranges.append((span.begin + begin, round_up(stop, ALIGNMENT) if stop == span.end else stop))
    inside = intersect(merge_ranges(ranges), shard.begin, shard.end)
    return [(begin - shard.begin, end - shard.begin) for begin, end in inside]


def state_shards(shards: Sequence[OwnedShard], slots: Sequence[dict[str, Tensor]]) -> list[StateShard]:
    """Cut owned shards and their ``slots`` (flat tensors by name, one dict per shard) into per-parameter pieces."""
    found: list[tuple[int, StateShard]] = []
    for shard, state in zip(shards, slots, strict=True):
        tensors = {"master": shard.master.detach(), **state} if shard.has_own_master else dict(state)
        for span in shard.buffer.spans:
            begin, end = max(span.begin, shard.begin), min(span.end, shard.end)
            if begin >= end:
                continue
            views = {name: flat[begin - shard.begin : end - shard.begin] for name, flat in tensors.items()}
            placement = shard.buffer.placements[span.index]
            shape = tuple(shard.buffer.parameters[span.index].shape)
            state_shard = StateShard(placement, shape, begin - span.begin, views, not shard.buffer.sharded)
            found.append((span.index, state_shard))
    return [state_shard for _, state_shard in sorted(found, key=lambda item: item[0])]
