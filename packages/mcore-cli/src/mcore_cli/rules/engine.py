"""Rules of a run as data: small named checks over the whole tree, all reported together. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from mcore_cli.config import RunConfig
from mcore_cli.resolve import model_parallel_size


@dataclass(frozen=True)
class Violation:
    """One broken rule: the values that break it, the rule itself, the nearest legal values and what to do."""

    rule: str
    values: str
    reason: str
    fix: str
    nearest: str = ""

    def __str__(self) -> str:
        nearest = f"; nearest: {self.nearest}" if self.nearest else ""
        return f"[{self.rule}] {self.values}: {self.reason}{nearest}; {self.fix}"


@dataclass(frozen=True)
class Context:
    """What rules look at: the tree, the number of ranks, and the names that plugins registered by kind."""

    config: RunConfig
    world_size: int = 1
    known: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def data_parallel_size(self) -> int | None:
        """Replicas of the model (dp); None if the ranks do not divide."""
        size = model_parallel_size(self.config)
        return self.world_size // size if self.world_size % size == 0 else None

    @property
    def samples_per_micro_step(self) -> int | None:
        """Samples of one micro-batch on all replicas."""
        replicas = self.data_parallel_size
        return None if replicas is None else self.config.train.micro_batch_size * replicas

    @property
    def num_micro_batches(self) -> int | None:
        """Micro-batches of one step on each replica; None if the global batch does not divide."""
        step, batch = self.samples_per_micro_step, self.config.train.global_batch_size
        return None if not step or batch is None or batch % step else batch // step


@dataclass(frozen=True)
class Rule:
    """A named rule: ``check`` returns a :class:`Violation`, or None if the tree obeys or the rule does not apply."""

    name: str
    check: Callable[[Context], Violation | None]


def violations(context: Context, rules: Iterable[Rule]) -> list[Violation]:
    """Every violation of ``rules``, in their order."""
    found = (rule.check(context) for rule in rules)
    return [violation for violation in found if violation is not None]


def divisors(number: int) -> list[int]:
    """All divisors of ``number``, ascending."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})


def nearest_multiples(number: int, of: int) -> str:
    """The positive multiples of ``of`` around ``number``, as text: ``4 or 8``."""
    below, above = number // of * of, (number // of + 1) * of
    return f"{below} or {above}" if below > 0 else str(above)


def nearest_divisors(number: int, of: int) -> str:
    """The divisors of ``of`` around ``number``, as text: ``2 or 4``."""
    all_divisors = divisors(of)
    below = [i for i in all_divisors if i <= number][-1:]
    above = [i for i in all_divisors if i > number][:1]
    return " or ".join(str(i) for i in below + above)
