"""The parity oracle of a run: one step on its layout against one rank, in float64.

Compared per logical parameter: initial values, gradient, and the weights after one optimizer step from one injected
common gradient (adaptive and sign-based steps amplify rounding of near-zero gradients); and the loss and the gradient
norm. The reference runs the whole global batch as one micro-batch, without recomputation or sharding, on rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_ckpt.layout import parameter_arrays
from mcore_cli.build import Parts, build_parts, build_run_tokenizer, global_batch_size, with_vocabulary
from mcore_cli.config import RunConfig
from mcore_cli.errors import RunFailed
from mcore_cli.pipeline import one_stage
from mcore_cli.step import backward_all, sum_over_ranks
from mcore_cli.world import World, build_run_layout, join_world
from mcore_data.loader import Batch
from mcore_data.sampler import rank_sample_ids
from mcore_parallel.axis import Layout, single_layout
from mcore_parallel.placement import placement_of
from mcore_parallel.plugins import PluginManager, plugin_manager
from mcore_parallel.testing.parity import BOUND_FLOAT64, Box, Comparison, assemble, compare, scalar_error
from mcore_parallel.traffic import order_conflicts

STEP = 3  # any number: it only keys the dropout masks


@dataclass(frozen=True)
class Answer:
    """What one layout says: logical arrays by name, gathered from all ranks."""

    loss: float
    grad_norm: float
    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class ParityReport:
    """Errors against the one-rank reference, worst first; ``conflicts``: collectives whose order ranks disagree on."""

    bound: float
    loss: float
    grad_norm: float
    initial: list[Comparison]
    gradients: list[Comparison]
    weights: list[Comparison]
    conflicts: list[str]
    num_tokens: int

    @property
    def failures(self) -> list[str]:
        """Every quantity over the bound, one line each; initial values must be bit-equal."""
        lines = [
            f"{name} is off by {error:.3e} (bound {self.bound:.0e})"
            for name, error in (("loss", self.loss), ("gradient norm", self.grad_norm))
            if not error <= self.bound
        ]
        lines += [f"initial value of {c.name} differs by {c.error:.3e}" for c in self.initial if c.error != 0.0]
        for kind, comparisons in (("gradient", self.gradients), ("weight after a step", self.weights)):
            lines += [
                f"{kind} of {c.name} is off by {c.error:.3e} (bound {self.bound:.0e})"
                for c in comparisons
                if not c.error <= self.bound
            ]
        return lines + self.conflicts


def parity_samples(config: RunConfig, num_samples: int, *, ragged: bool) -> Batch:
    """A global batch of random tokens; ``ragged`` masks out different shares of the samples' tokens."""
    assert config.model.vocab_size is not None, "the vocabulary is known"
    generator = np.random.default_rng(config.train.seed)
    shape = (num_samples, config.data.seq_length)
    stream = generator.integers(0, config.model.vocab_size, (num_samples, shape[1] + 1))
    mask = np.ones(shape, dtype=np.float32)
    if ragged:
        share = np.linspace(1.0, 0.0, num_samples)  # the first sample counts whole, the last not at all
        mask = (generator.random(shape) < share[:, None]).astype(np.float32)
    positions = np.broadcast_to(np.arange(shape[1]), shape).copy()
    return Batch(stream[:, :-1].copy(), stream[:, 1:].copy(), mask, positions, np.arange(num_samples))


def take(batch: Batch, rows: Any) -> Batch:
    """The samples ``rows`` of a batch."""
    return Batch(
        batch.tokens[rows], batch.labels[rows], batch.loss_mask[rows], batch.position_ids[rows], batch.sample_ids[rows]
    )


def parity(
    config: RunConfig,
    layout: Layout,
    *,
    manager: PluginManager,
    device: torch.device,
    dtype: torch.dtype = torch.float64,
    bound: float = BOUND_FLOAT64,
    ragged: bool = True,
) -> ParityReport | None:
    """Run one step on ``layout`` and on one rank and compare; the report is on rank 0, None elsewhere."""
    samples = parity_samples(config, global_batch_size(config, layout.axis("dp").size), ragged=ragged)
    parts = build_parts(config, layout, manager=manager, device=device, dtype=dtype)
    layout.recorder.enabled = True
    answer, tokens = _answer(parts, _own_batches(parts, samples))
    events = _gather(layout, layout.recorder.events)
    layout.recorder.enabled = False
    reference_parts = reference = None
    if layout.rank == 0:
        reference_parts = build_parts(
            reference_config(config, samples), single_layout(), manager=manager, device=device, dtype=dtype
        )
        reference, _ = _answer(reference_parts, [samples])
    common = _broadcast(layout, reference.gradients if reference is not None else None)
    weights = _step_from(parts, common, tokens)
    if layout.rank != 0:
        return None
    assert answer is not None
    assert reference is not None
    assert reference_parts is not None
    want = _step_from(reference_parts, common, tokens)
    return ParityReport(
        bound,
        scalar_error(answer.loss, reference.loss),
        scalar_error(answer.grad_norm, reference.grad_norm),
        compare(answer.initial, reference.initial),
        compare(answer.gradients, reference.gradients),
        compare(weights, want),
        order_conflicts(events),
        int(tokens),
    )


def reference_config(config: RunConfig, samples: Batch) -> RunConfig:
    """``config`` on one rank: nothing split, nothing recomputed, one micro-batch."""
    parallel = config.parallel.model_copy(
        update={
            **one_stage(),
            "tensor_model_parallel_size": 1,
            "context_parallel_size": 1,
            "sequence_parallel": False,
            "use_distributed_optimizer": False,
            "recompute_granularity": None,
            "recompute_method": None,
            "recompute_num_layers": None,
        }
    )
    size = len(samples.sample_ids)
    train = config.train.model_copy(update={"micro_batch_size": size, "global_batch_size": size})
    return config.model_copy(update={"parallel": parallel, "train": train})


def _own_batches(parts: Parts, samples: Batch) -> list[Batch]:
    dp, train = parts.layout.axis("dp"), parts.config.train
    rows = rank_sample_ids(
        0,
        global_batch_size=global_batch_size(parts.config, dp.size),
        micro_batch_size=train.micro_batch_size,
        dp_rank=dp.rank,
        dp_size=dp.size,
    )
    return [take(samples, row) for row in rows]


def _answer(parts: Parts, batches: list[Batch]) -> tuple[Answer | None, float]:
    initial = _logical(parts, {})
    losses = backward_all(parts, batches, step=STEP)
    sums = sum_over_ranks(parts.layout, losses, batches, device=parts.device)
    norm = parts.optimizer.grad_norm() / sums.tokens
    parts.optimizer.buffers.gather_grads()
    gradients = _logical(parts, {id(p): p.main_grad for p in parts.parameters})  # type: ignore[attr-defined]
    if initial is None or gradients is None:
        return None, sums.tokens
    divided = {name: grad / sums.tokens for name, grad in gradients.items()}
    return Answer(sums.mean_loss, norm, initial, divided), sums.tokens


def _logical(parts: Parts, values: Mapping[int, Tensor]) -> dict[str, Tensor] | None:
    """Logical arrays of ``values`` by parameter id (default: the weights) from all ranks; on rank 0 only."""
    parts.optimizer.complete_weights()
    boxes = [
        Box(array.key.removeprefix("parity/"), array.global_shape, array.offset, array.tensor.cpu().clone())
        for parameter in parts.parameters
        for array in parameter_arrays("parity", values.get(id(parameter), parameter), placement_of(parameter))
    ]
    ranks = _gather(parts.layout, boxes)
    return assemble(ranks) if parts.layout.rank == 0 else None


def logical_weights(parts: Parts) -> dict[str, Tensor]:
    """The whole weights by logical name, on rank 0; empty elsewhere. Collective."""
    return _logical(parts, {}) or {}


def _gather(layout: Layout, value: Any) -> list[Any]:
    if layout.mesh.world_size == 1:
        return [value]
    values: list[Any] | None = [None] * layout.mesh.world_size if layout.rank == 0 else None
    dist.gather_object(value, values, dst=0)
    return values or []


def _broadcast(layout: Layout, value: Any) -> Any:
    if layout.mesh.world_size == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _step_from(parts: Parts, gradients: Mapping[str, Tensor], tokens: float) -> dict[str, Tensor]:
    """The weights after one optimizer step from the given (divided) logical gradients; empty off rank 0."""
    with torch.no_grad():
        for parameter in parts.parameters:
            main_grad: Tensor = parameter.main_grad  # type: ignore[attr-defined]
            for array in parameter_arrays("inject", main_grad, placement_of(parameter)):
                whole = gradients[array.key.removeprefix("inject/")]
                box = tuple(slice(o, o + n) for o, n in zip(array.offset, array.shape, strict=True))
                array.tensor.copy_(whole[box] * tokens)
    parts.optimizer.step(tokens)
    return logical_weights(parts)


def run(config: RunConfig) -> None:
    """Verify the layout of ``config`` and print the report on rank 0.

    Raises:
        RunFailed: something is over its bound; every such quantity is listed.
    """
    with join_world(config) as world:
        manager = plugin_manager()
        config = with_vocabulary(config, build_run_tokenizer(config, manager))
        layout = build_run_layout(config, world, manager=manager)
        report = parity(config, layout, manager=manager, device=world.device)
        if report is not None:
            print(describe(report, config, world))
        failures: list[str] = _broadcast(layout, report.failures if report is not None else None)
        if failures:
            raise RunFailed("parity failed: " + "; ".join(failures[:20]))


def describe(report: ParityReport, config: RunConfig, world: World) -> str:
    """The report as lines for people: the worst of each kind."""
    parallel = config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    sizes = f"tp {tp}, pp {pp}, dp {world.size // (tp * pp * parallel.context_parallel_size)}"
    lines = [
        f"{config.train.name} on {world.size} rank(s) ({sizes}) against one rank, float64, "
        f"one step of random tokens, {report.num_tokens} of them with loss:",
        f"  loss              error {report.loss:.2e}",
        f"  gradient norm     error {report.grad_norm:.2e}",
    ]
    for label, comparisons in (
        ("initial weights", report.initial),
        ("gradients", report.gradients),
        ("weights after a step", report.weights),
    ):
        worst = comparisons[0] if comparisons else Comparison("-", 0.0)
        lines.append(f"  {label:<20} {len(comparisons)} arrays, worst error {worst.error:.2e} ({worst.name})")
    verdict = "FAILED" if report.failures else f"passed: all within {report.bound:.0e}"
    return "\n".join([*lines, verdict, *(f"  {line}" for line in report.failures)])
