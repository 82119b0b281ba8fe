"""Runs one rank's plan: the only place in mcore that calls autograd's backward.

Nothing is scaled here. The last stage returns summed losses, gradients of all micro-batches add up in the parameters,
and the caller divides once by the global token count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mcore_parallel.axis import Axis
from mcore_parallel.collectives import Done
from mcore_parallel.pipeline.actions import (
    COMMUNICATION_KINDS,
    RECEIVE_KINDS,
    SEND_KINDS,
    Action,
    Kind,
    Place,
    RankPlan,
    Step,
)
from mcore_parallel.pipeline.p2p import Courier, Message
from mcore_parallel.weight_grad import WeightGradQueue


class Stage(Protocol):
    """The layers of this rank, chunk by chunk, as the executor sees them."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations that cross stages."""

    @property
    def device(self) -> torch.device:
        """Where received tensors are to lie."""

    def receive_shape(self, micro_batch: int) -> tuple[int, ...]:
        """Shape of the activation that crosses stages, ``[s, b, h]`` (``[s/tp, b, h]`` under sequence parallel).

        It may differ between micro-batches; every rank knows it from its own copy of the batch, so no message says it.
        """

    def forward(self, micro_batch: int, chunk: int, received: Tensor | None) -> Tensor:
        """The activation to send on, or on the last stage the micro-batch's summed loss (0-d).

        ``received`` is the previous stage's activation, None on the first stage.
        """


@dataclass(frozen=True)
class PipelineResult:
    """``losses``: on the rank of the last stage, the detached summed loss (0-d) of each micro-batch; elsewhere empty.

    ``peak_live``: the most chunk activations that were held at once; ``peak_deferred``: the most (micro-batch, chunk)
    pairs whose weight gradients waited; ``peak_held``: the most of both together.
    """

    losses: list[Tensor]
    peak_live: int
    peak_deferred: int = 0
    peak_held: int = 0


def run(
    plan: RankPlan,
    *,
    stage: Stage,
    axis: Axis,
    weight_grads: WeightGradQueue | None = None,
    reduce: Callable[[int], None] | None = None,
    gather: Callable[[int], None] | None = None,
) -> PipelineResult:
    """One training step of this rank: all micro-batches forward and backward; gradients add up in the parameters.

    ``weight_grads``: where the layers put their weight gradients in an ``INPUT_GRAD`` (see
    :class:`~mcore_parallel.weight_grad.WeightGradQueue`); needed if the plan splits backwards. ``reduce(chunk)`` and
    ``gather(chunk)`` are called where the plan says ``REDUCE`` and ``GATHER``.

    Raises:
        ValueError: the plan is of another rank or size than ``axis``, is forward only, or splits backwards without a
            queue; or the stage returned a tensor of another shape or type than it announced.
    """
    if not plan.backward:
        raise ValueError("this plan is forward only; run_forward() runs it")
    if weight_grads is None and any(action.kind is Kind.INPUT_GRAD for action in plan.actions):
        raise ValueError("this plan splits backwards; give the queue that the layers put their weight gradients into")
    queue = WeightGradQueue() if weight_grads is None else weight_grads
    return _Run(plan, stage, axis, queue, reduce, gather).play()


def run_forward(plan: RankPlan, *, stage: Stage, axis: Axis) -> PipelineResult:
    """All micro-batches forward without autograd (evaluation); ``plan`` is forward only.

    Raises:
        ValueError: as :func:`run`, or the plan has backward actions.
    """
    if plan.backward:
        raise ValueError("this plan trains; run() runs it, and compile_forward() makes one for evaluation")
    with torch.no_grad():
        return _Run(plan, stage, axis, WeightGradQueue(), None, None).play()


@dataclass
class _Live:
    """What one micro-batch's forward through one chunk leaves for its backward.

    The output itself is not kept: its edge is all that backward needs, so its memory goes once it is sent and unless
    autograd saved it.
    """

    received: Tensor | None
    edge: GradientEdge


@dataclass
class _Run:
    """One pass through a plan. Tensors wait under the action that takes them or brought them."""

    plan: RankPlan
    stage: Stage
    axis: Axis
    weight_grads: WeightGradQueue
    reduce: Callable[[int], None] | None
    gather: Callable[[int], None] | None
    losses: dict[int, Tensor] = field(default_factory=dict)
    peak_live: int = 0
    peak_deferred: int = 0
    peak_held: int = 0
    _live: dict[tuple[int, int], _Live] = field(default_factory=dict)
    _deferred: set[tuple[int, int]] = field(default_factory=set)
    _arrivals: dict[Action, Message] = field(default_factory=dict)
    _departures: dict[Action, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        flow = self.plan.flow
        if (flow.num_ranks, self.plan.rank) != (self.axis.size, self.axis.rank):
            raise ValueError(
                f"the plan is for rank {self.plan.rank} of {flow.num_ranks}, "
                f"but axis {self.axis.name!r} is rank {self.axis.rank} of {self.axis.size}"
            )
        self._courier = Courier(self.axis)

    def play(self) -> PipelineResult:
        runs: dict[Kind, Callable[[Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT_GRAD: self._input_grad,
            Kind.WEIGHT_GRAD: self._weight_grad,
            Kind.REDUCE: self._reduce,
            Kind.GATHER: self._gather,
        }
        for step in self.plan.steps:
            action = step.actions[0]
            if action.kind in COMMUNICATION_KINDS:
                self._communicate(step)
            else:
                runs[action.kind](action)
        self._courier.drain()
        left = [*self._live, *self._deferred, *self._arrivals, *self._departures]
        assert not left, f"a verified plan leaves nothing behind, but {left} remain"
        losses = [self.losses[i] for i in sorted(self.losses)]
        return PipelineResult(losses, self.peak_live, self.peak_deferred, self.peak_held)

    def _communicate(self, step: Step) -> None:
        sends = [
            (self._peer(action), self._departures.pop(action)) for action in step.actions if action.kind in SEND_KINDS
        ]
        receives = [action for action in step.actions if action.kind in RECEIVE_KINDS]
        buffers = [(self._peer(action), self._new_buffer(action.micro_batch)) for action in receives]
        self._arrivals.update(zip(receives, self._courier.post(sends, buffers), strict=True))

    def _peer(self, action: Action) -> int:
        to_downstream = action.kind in (Kind.SEND_FORWARD, Kind.RECV_BACKWARD)
        find = self.plan.flow.downstream if to_downstream else self.plan.flow.upstream
        place = find(self.plan.rank, action.chunk)
        assert place is not None, "a verified plan communicates with neighbours only"
        return place.rank

    def _new_buffer(self, micro_batch: int) -> Tensor:
        return torch.empty(self.stage.receive_shape(micro_batch), dtype=self.stage.dtype, device=self.stage.device)

    def _forward(self, action: Action) -> None:
        _, micro_batch, chunk = action
        upstream = self.plan.flow.upstream(self.plan.rank, chunk)
        received = None if upstream is None else self._arrived(Kind.RECV_FORWARD, action)
        if received is not None and self.plan.backward:
            received.requires_grad_()
        output = self.stage.forward(micro_batch, chunk, received)
        downstream = self.plan.flow.downstream(self.plan.rank, chunk)
        if downstream is None:
            self._check_loss(output, action)
            self.losses[micro_batch] = output.detach()
        else:
            self._check_activation(output, action)
            self._hand_on(output.detach(), action, downstream, Kind.SEND_FORWARD, Kind.RECV_FORWARD)
        if self.plan.backward:
            self._live[micro_batch, chunk] = _Live(received, get_gradient_edge(output))
        self.peak_live = max(self.peak_live, len(self._live), 1)
        self.peak_held = max(self.peak_held, len(self._live) + len(self._deferred), 1)

    def _backward(self, action: Action) -> None:
        _, micro_batch, chunk = action
        live = self._live.pop((micro_batch, chunk))
        downstream = self.plan.flow.downstream(self.plan.rank, chunk)
        gradient = None if downstream is None else self._arrived(Kind.RECV_BACKWARD, action)
        torch.autograd.backward(live.edge, gradient)
        upstream = self.plan.flow.upstream(self.plan.rank, chunk)
        if upstream is None:
            return
        assert live.received is not None
        input_gradient = live.received.grad
        if input_gradient is None:
            raise ValueError(f"{action}: the stage's output does not depend on the activation that it received")
        self._hand_on(input_gradient, action, upstream, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD)

    def _input_grad(self, action: Action) -> None:
        _, micro_batch, chunk = action
        with self.weight_grads.deferring(micro_batch, chunk):
            self._backward(action)
        self._deferred.add((micro_batch, chunk))
        self.peak_deferred = max(self.peak_deferred, len(self._deferred))

    def _weight_grad(self, action: Action) -> None:
        _, micro_batch, chunk = action
        self.weight_grads.drain(micro_batch, chunk)
        self._deferred.remove((micro_batch, chunk))

    def _reduce(self, action: Action) -> None:
        if self.reduce is not None:
            self.reduce(action.chunk)

    def _gather(self, action: Action) -> None:
        if self.gather is not None:
            self.gather(action.chunk)

    def _arrived(self, kind: Kind, action: Action) -> Tensor:
        return self._arrivals.pop(action._replace(kind=kind)).wait()

    def _hand_on(self, payload: Tensor, action: Action, target: Place, send: Kind, receive: Kind) -> None:
        """Leave ``payload`` for the group that sends it, or straight for the neighbouring chunk of the same rank."""
        if target.rank == self.plan.rank:
            self._arrivals[Action(receive, action.micro_batch, target.chunk)] = Message(payload, Done())
        else:
            self._departures[action._replace(kind=send)] = payload.contiguous()

    def _check_loss(self, output: Tensor, action: Action) -> None:
        if output.dim() != 0:
            raise ValueError(f"{action}: the last stage must return a 0-d summed loss, got shape {tuple(output.shape)}")

    def _check_activation(self, output: Tensor, action: Action) -> None:
        # A message of another size than its buffer would abort the process in gloo, or pass in part.
        shape, dtype = tuple(self.stage.receive_shape(action.micro_batch)), self.stage.dtype
        if (tuple(output.shape), output.dtype) != (shape, dtype):
            raise ValueError(
                f"{action}: the stage returned {tuple(output.shape)} of {output.dtype} but announced {shape} of {dtype}"
            )
