"""Which samples a step uses and which rank takes them: Megatron's ``single`` order, as pure functions.

Global batch ``b`` is the run of ids ``[consumed, consumed + global_batch_size)``, whatever the layout. Within it,
every ``micro_batch_size * dp_size`` ids in a row make one micro-step, and data-parallel rank r takes ids
``[r * micro_batch_size, (r + 1) * micro_batch_size)`` of each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def num_micro_batches(global_batch_size: int, micro_batch_size: int, dp_size: int) -> int:
    """Micro-batches that one rank runs per step.

    Raises:
        ValueError: a size is not positive, or the global batch does not divide.
    """
    sizes = {"global batch size": global_batch_size, "micro-batch size": micro_batch_size, "dp size": dp_size}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} {size} must be at least 1")
    per_step = micro_batch_size * dp_size
    if global_batch_size % per_step:
        below = global_batch_size // per_step * per_step
        nearest = f"{below} or {below + per_step}" if below else f"{per_step}"
        raise ValueError(
            f"global batch size {global_batch_size} is not a multiple of micro-batch size {micro_batch_size} x "
            f"data-parallel size {dp_size} = {per_step}; the nearest that is: {nearest}"
        )
    return global_batch_size // per_step


def rank_sample_ids(
    consumed_samples: int, *, global_batch_size: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> NDArray[np.int64]:
    """Sample ids of one rank for the next step: ``[micro-batches, b]``.

    Raises:
        ValueError: the sizes do not divide, ``consumed_samples`` is negative, or there is no such rank.
    """
    count = num_micro_batches(global_batch_size, micro_batch_size, dp_size)
    if consumed_samples < 0:
        raise ValueError(f"consumed samples {consumed_samples} must not be negative")
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"data-parallel rank {dp_rank} is not in 0..{dp_size - 1}")
    ids = np.arange(consumed_samples, consumed_samples + global_batch_size, dtype=np.int64)
    return ids.reshape(count, dp_size, micro_batch_size)[:, dp_rank]
