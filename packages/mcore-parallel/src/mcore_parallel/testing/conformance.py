"""Conformance suites for plugin authors: subclass one in a test module, set ``spec``, and run pytest.

    class TestMySchedule(ScheduleConformance):
        spec = ScheduleSpec("mine", plan=lazy("my_package.schedule:plan"))

Nothing here imports pytest; the classes hold plain ``test_`` methods that say in their messages which case failed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from mcore_parallel.config import OptimizerConfig
from mcore_parallel.pipeline.actions import COMPUTE_KINDS, Action, Plan
from mcore_parallel.pipeline.compile import compile_forward, compile_schedule
from mcore_parallel.pipeline.verify import Report, verify
from mcore_parallel.specs import OptimizerSpec, ScheduleSpec


class ScheduleConformance:
    """What every :class:`~mcore_parallel.specs.ScheduleSpec` must do.

    Set ``spec``; override ``is_legal`` if the schedule refuses some numbers (it must do so with ``ValueError``) and
    ``max_live`` to hold it to a bound on live activations. ``ranks`` and ``micro_batches`` span the grid of cases.
    """

    spec: ClassVar[ScheduleSpec]
    ranks: ClassVar[tuple[int, ...]] = (1, 2, 3, 4, 8)
    micro_batches: ClassVar[tuple[int, ...]] = (1, 2, 3, 5, 8, 17)

    def is_legal(self, num_ranks: int, num_micro_batches: int) -> bool:
        """Whether the schedule accepts these numbers."""
        return True

    def max_live(self, num_ranks: int, num_micro_batches: int, rank: int) -> int:
        """The most chunk activations that ``rank`` may hold at once."""
        return num_micro_batches * self.spec.min_chunks

    def test_legal_cases_are_proven(self) -> None:
        """Complete, in order, matched and free of deadlock, with as many live activations as it says."""
        for num_ranks, num_micro_batches in self._legal():
            _, report = self._proven(num_ranks, num_micro_batches)
            for rank, live in enumerate(report.peak_live):
                bound = self.max_live(num_ranks, num_micro_batches, rank)
                case = self._case(num_ranks, num_micro_batches)
                assert live <= bound, f"{case}: rank {rank} holds {live} live activations, at most {bound}"

    def test_traffic_is_one_message_each_way_per_boundary(self) -> None:
        """Boundaries between ranks times micro-batches, once forward and once backward."""
        for num_ranks, num_micro_batches in self._legal():
            plan, report = self._proven(num_ranks, num_micro_batches)
            places = plan.flow.places
            boundaries = sum(a.rank != b.rank for a, b in zip(places, places[1:], strict=False))
            assert report.num_messages == 2 * boundaries * num_micro_batches, self._case(num_ranks, num_micro_batches)

    def test_illegal_cases_are_refused(self) -> None:
        """By a ValueError that holds both numbers, before anything runs."""
        for num_ranks, num_micro_batches in self._grid():
            if self.is_legal(num_ranks, num_micro_batches):
                continue
            message = self._refusal(num_ranks, num_micro_batches)
            assert str(num_ranks) in message, message
            assert str(num_micro_batches) in message, message

    def test_numbers_below_one_are_refused(self) -> None:
        """No rank or no micro-batch is a mistake, not an empty plan."""
        for num_ranks, num_micro_batches in ((0, 1), (1, 0), (2, -1)):
            self._refusal(num_ranks, num_micro_batches)

    def test_plan_is_pure(self) -> None:
        """Ranks plan for themselves and must agree: equal numbers give equal plans, and no list is shared."""
        for num_ranks, num_micro_batches in self._legal():
            first = self._compute(num_ranks, num_micro_batches)
            expected = copy.deepcopy(first)
            for actions in first:
                if isinstance(actions, list):
                    actions.clear()
            again = self._compute(num_ranks, num_micro_batches)
            assert again == expected, self._case(num_ranks, num_micro_batches)

    def test_plan_holds_compute_alone(self) -> None:
        """Sends and receives are derived, and chunks stay within what the spec declares."""
        for num_ranks, num_micro_batches in self._legal():
            for actions in self._compute(num_ranks, num_micro_batches):
                for action in actions:
                    where = f"{self._case(num_ranks, num_micro_batches)}: {action}"
                    assert action.kind in COMPUTE_KINDS, where
                    assert 0 <= action.chunk < self.spec.min_chunks, where

    def test_evaluation_is_proven(self) -> None:
        """The forward-only plan with the schedule's chunks."""
        for num_ranks, num_micro_batches in self._grid():
            compile_forward(self.spec, num_ranks=num_ranks, num_micro_batches=num_micro_batches)

    def _grid(self) -> Iterator[tuple[int, int]]:
        return ((p, m) for p in self.ranks for m in self.micro_batches)

    def _legal(self) -> Iterator[tuple[int, int]]:
        return ((p, m) for p, m in self._grid() if self.is_legal(p, m))

    def _case(self, num_ranks: int, num_micro_batches: int) -> str:
        return f"{self.spec.name}, {num_ranks} ranks, {num_micro_batches} micro-batches"

    def _compute(self, num_ranks: int, num_micro_batches: int) -> list[list[Action]]:
        return self.spec.actions(num_ranks, num_micro_batches)

    def _proven(self, num_ranks: int, num_micro_batches: int) -> tuple[Plan, Report]:
        try:
            plan = compile_schedule(self.spec, num_ranks=num_ranks, num_micro_batches=num_micro_batches)
            return plan, verify(plan)
        except ValueError as error:
            raise AssertionError(f"{self._case(num_ranks, num_micro_batches)}: {error}") from error

    def _refusal(self, num_ranks: int, num_micro_batches: int) -> str:
        try:
            self._compute(num_ranks, num_micro_batches)
        except ValueError as error:
            return str(error)
        raise AssertionError(f"{self._case(num_ranks, num_micro_batches)} must be refused with ValueError")


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
