"""Conformance suites for plugin authors: subclass one in a test module, set ``spec``, and run pytest.

    class TestMySchedule(ScheduleConformance):
        spec = ScheduleSpec("mine", plan=lazy("my_package.schedule:plan"))

Nothing here imports pytest; the classes hold plain ``test_`` methods that say in their messages which case failed.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mcore_parallel.config import OptimizerConfig
from mcore_parallel.pipeline.actions import COMPUTE_KINDS, Kind, Plan
from mcore_parallel.pipeline.compile import compile_forward, compile_schedule
from mcore_parallel.pipeline.simulate import simulate
from mcore_parallel.pipeline.verify import Report, verify
from mcore_parallel.specs import OptimizerSpec, ScheduleSpec


class Case(NamedTuple):
    """Sizes that a schedule is asked for."""

    num_ranks: int
    num_micro_batches: int
    num_chunks: int


class ScheduleConformance:
    """What every :class:`~mcore_parallel.specs.ScheduleSpec` must do.

    Set ``spec``; override ``max_live`` and ``max_held`` to hold it to its bounds on memory. ``ranks``,
    ``micro_batches`` and ``chunks`` span the grid of cases; the spec says which of them are legal, and must refuse the
    others with ``ValueError``.
    """

    spec: ClassVar[ScheduleSpec]
    ranks: ClassVar[tuple[int, ...]] = (1, 2, 3, 4, 8)
    micro_batches: ClassVar[tuple[int, ...]] = (1, 2, 3, 5, 8, 17)
    chunks: ClassVar[tuple[int, ...]] = (1, 2, 3, 4)

    def max_live(self, case: Case, rank: int) -> int:
        """The most chunk activations that ``rank`` may hold at once."""
        return case.num_micro_batches * case.num_chunks

    def max_held(self, case: Case, rank: int) -> int:
        """The most chunk activations and deferred weight gradients that ``rank`` may hold together."""
        return case.num_micro_batches * case.num_chunks

    def test_legal_cases_are_proven(self) -> None:
        """Complete, in order, matched and free of deadlock, holding no more than it says."""
        for case in self._legal():
            _, report = self._proven(case)
            for rank, (live, held) in enumerate(zip(report.peak_live, report.peak_held, strict=True)):
                bound, whole = self.max_live(case, rank), self.max_held(case, rank)
                assert live <= bound, f"{self._name(case)}: rank {rank} holds {live} live activations, at most {bound}"
                assert held <= whole, f"{self._name(case)}: rank {rank} holds {held} passes, at most {whole}"

    def test_traffic_is_one_message_each_way_per_boundary(self) -> None:
        """Boundaries between ranks times micro-batches, once forward and once backward."""
        for case in self._legal():
            plan, report = self._proven(case)
            places = plan.flow.places
            boundaries = sum(a.rank != b.rank for a, b in zip(places, places[1:], strict=False))
            assert report.num_messages == 2 * boundaries * case.num_micro_batches, self._name(case)

    def test_it_simulates(self) -> None:
        """Every rank works all passes, the first rank of the flow starts at once, and no bubble is negative."""
        for case in self._legal():
            plan, report = self._proven(case)
            timeline = simulate(plan)
            work = 3.0 * case.num_micro_batches * case.num_chunks
            assert timeline.work == (work,) * case.num_ranks, self._name(case)
            assert timeline.peak_live == report.peak_live, self._name(case)
            assert timeline.peak_deferred == report.peak_deferred, self._name(case)
            assert 0 <= timeline.bubble_span <= 1, self._name(case)
            assert 0 <= timeline.bubble_makespan < 1, self._name(case)

    def test_illegal_cases_are_refused(self) -> None:
        """By a ValueError that holds the numbers, before anything runs."""
        for case in self._grid():
            if self.spec.why_illegal(*case) is None:
                continue
            message = self._refusal(case)
            in_range = self.spec.min_chunks <= case.num_chunks <= (self.spec.max_chunks or case.num_chunks)
            for number in case[:2] if in_range else case[2:]:
                assert str(number) in message, f"{self._name(case)}: {message}"

    def test_numbers_below_one_are_refused(self) -> None:
        """No rank or no micro-batch is a mistake, not an empty plan."""
        for num_ranks, num_micro_batches in ((0, 1), (1, 0), (2, -1)):
            self._refusal(Case(num_ranks, num_micro_batches, self.spec.min_chunks))

    def test_plan_is_pure(self) -> None:
        """Ranks plan for themselves and must agree: equal numbers give equal plans, and no list is shared."""
        for case in self._legal():
            first = self.spec.actions(*case)
            expected = copy.deepcopy(first)
            for actions in first:
                if isinstance(actions, list):
                    actions.clear()
            assert self.spec.actions(*case) == expected, self._name(case)

    def test_plan_holds_compute_alone(self) -> None:
        """Sends and receives are derived, chunks stay within their number, and split backwards are declared."""
        for case in self._legal():
            for actions in self.spec.actions(*case):
                for action in actions:
                    where = f"{self._name(case)}: {action}"
                    assert action.kind in COMPUTE_KINDS, where
                    assert 0 <= action.chunk < case.num_chunks, where
                    assert self.spec.splits_backward or action.kind in (Kind.FORWARD, Kind.BACKWARD), where

    def test_evaluation_is_proven(self) -> None:
        """The forward-only plan, for any number of micro-batches, on ranks and chunks that train with some number."""
        shapes = {(case.num_ranks, case.num_chunks) for case in self._legal()}
        for num_ranks, num_micro_batches, num_chunks in self._grid():
            if (num_ranks, num_chunks) in shapes:
                compile_forward(
                    self.spec, num_ranks=num_ranks, num_micro_batches=num_micro_batches, num_chunks=num_chunks
                )

    def _grid(self) -> Iterator[Case]:
        return (Case(*sizes) for sizes in itertools.product(self.ranks, self.micro_batches, self.chunks))

    def _legal(self) -> Iterator[Case]:
        return (case for case in self._grid() if self.spec.why_illegal(*case) is None)

    def _name(self, case: Case) -> str:
        chunks = f", {case.num_chunks} chunks" if case.num_chunks > 1 else ""
        return f"{self.spec.name}, {case.num_ranks} ranks, {case.num_micro_batches} micro-batches{chunks}"

    def _proven(self, case: Case) -> tuple[Plan, Report]:
        num_ranks, num_micro_batches, num_chunks = case
        try:
            plan = compile_schedule(
                self.spec, num_ranks=num_ranks, num_micro_batches=num_micro_batches, num_chunks=num_chunks
            )
            return plan, verify(plan)
        except ValueError as error:
            raise AssertionError(f"{self._name(case)}: {error}") from error

    def _refusal(self, case: Case) -> str:
        try:
            self.spec.actions(*case)
        except ValueError as error:
            return str(error)
        raise AssertionError(f"{self._name(case)} must be refused with ValueError")


class OptimizerConformance:
    """What every :class:`~mcore_parallel.specs.OptimizerSpec` must do.

    Set ``spec``. ``config`` holds the settings, ``num_elements`` the length of the flat shard, ``steps`` the number
    of steps each check takes.
    """

    spec: ClassVar[OptimizerSpec]
    config: ClassVar[OptimizerConfig] = OptimizerConfig(lr=0.01)
    num_elements: ClassVar[int] = 1031
    steps: ClassVar[int] = 4

    def test_cutting_the_shard_changes_no_bit(self) -> None:
        """ZeRO cuts flat buffers anywhere: an update may read its own element alone."""
        for dtype in (torch.float32, torch.float64):
            whole = self._weights(dtype)
            self._train(self._build([whole]), [whole])
            for cut in (1, self.num_elements // 3, self.num_elements - 7):
                parts = [part.clone() for part in self._weights(dtype).tensor_split([cut])]
                self._train(self._build(parts), parts)
                assert torch.equal(torch.cat(parts), whole), f"{self.spec.name}: {dtype} cut at {cut} differs"

    def test_it_moves_weights(self) -> None:
        """A step with a gradient changes weights, and keeps them finite."""
        weights = self._weights(torch.float32)
        self._train(self._build([weights]), [weights])
        assert not torch.equal(weights, self._weights(torch.float32)), f"{self.spec.name} does nothing"
        assert torch.isfinite(weights).all(), f"{self.spec.name} left the finite numbers"

    def test_zero_learning_rate_moves_nothing(self) -> None:
        """Not even weight decay, which is scaled by the learning rate."""
        weights = self._weights(torch.float32)
        optimizer = self._build([weights])
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        self._train(optimizer, [weights])
        assert torch.equal(weights, self._weights(torch.float32)), f"{self.spec.name}: weights moved at lr 0"

    def test_groups_keep_their_own_rates(self) -> None:
        """The schedule writes ``lr`` and ``weight_decay`` into the groups before each step."""
        moving, resting = self._weights(torch.float32), self._weights(torch.float32)
        optimizer = self._build([moving, resting])
        optimizer.param_groups[1]["lr"] = 0.0
        self._train(optimizer, [moving, resting])
        assert not torch.equal(moving, resting)
        assert torch.equal(resting, self._weights(torch.float32)), f"{self.spec.name} ignores a group's lr"

    def test_weight_decay_shrinks_weights(self) -> None:
        """With a zero gradient, decay pulls weights towards zero, and no decay leaves them."""
        for decay in (0.0, 0.5):
            weights = self._weights(torch.float32)
            optimizer = self._build([weights], weight_decay=decay)
            weights.grad = torch.zeros_like(weights)
            optimizer.step()
            before, after = self._weights(torch.float32).norm(), weights.norm()
            assert (after < before) if decay else (after == before), f"{self.spec.name}: weight decay {decay}"

    def test_state_is_what_the_spec_declares(self) -> None:
        """The per-element state tensors are exactly ``slots``, there before the first step so that they can load."""
        weights = self._weights(torch.float32)
        optimizer = self._build([weights])
        self._check_slots(optimizer, weights, "before the first step")
        self._train(optimizer, [weights])
        self._check_slots(optimizer, weights, "after a step")

    def test_state_restores_bit_for_bit(self) -> None:
        """Saved after some steps and loaded into a fresh optimizer, it goes on as if nothing had happened."""
        straight = self._weights(torch.float32)
        optimizer = self._build([straight])
        self._train(optimizer, [straight])
        resumed = straight.clone()
        fresh = self._build([resumed])
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        self._train(optimizer, [straight], first=self.steps)
        self._train(fresh, [resumed], first=self.steps)
        assert torch.equal(straight, resumed), f"{self.spec.name}: state_dict() does not hold all state"

    def _build(self, shards: list[Tensor], *, weight_decay: float | None = None) -> torch.optim.Optimizer:
        decay = self.config.weight_decay if weight_decay is None else weight_decay
        groups: list[dict[str, Any]] = [
            {"params": [shard.requires_grad_()], "lr": self.config.lr, "weight_decay": decay} for shard in shards
        ]
        optimizer: torch.optim.Optimizer = self.spec.build(groups, self.config)
        return optimizer

    def _weights(self, dtype: torch.dtype) -> Tensor:
        return self._random(0, dtype)

    def _random(self, seed: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(self.num_elements, generator=torch.Generator().manual_seed(seed), dtype=dtype)

    def _train(self, optimizer: torch.optim.Optimizer, shards: list[Tensor], *, first: int = 0) -> None:
        """``steps`` steps; step ``i`` has the ``i``-th gradient, cut as ``shards`` are (or whole for each of them)."""
        extents = [shard.numel() for shard in shards]
        for step in range(first, first + self.steps):
            gradient = self._random(1000 + step, shards[0].dtype)
            whole = all(extent == self.num_elements for extent in extents)
            parts = [gradient] * len(shards) if whole else list(gradient.split(extents))
            for shard, part in zip(shards, parts, strict=True):
                shard.grad = part.clone()
            optimizer.step()
        for shard in shards:
            shard.grad = None
            shard.requires_grad_(False)

    def _check_slots(self, optimizer: torch.optim.Optimizer, weights: Tensor, when: str) -> None:
        state = optimizer.state[weights]
        found = {name for name, value in state.items() if isinstance(value, Tensor) and value.shape == weights.shape}
        assert found == set(self.spec.slots), (
            f"{self.spec.name} {when}: state per element is {sorted(found)}, declared is {sorted(self.spec.slots)}"
        )
