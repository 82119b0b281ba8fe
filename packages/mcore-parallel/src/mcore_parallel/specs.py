"""Frozen specs that plugins of mcore-parallel return. This module imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mcore_parallel.pipeline.actions import Action, Flow, looped_flow


@dataclass(frozen=True)
class ScheduleSpec:
    """A pipeline schedule: a pure function from sizes to each rank's list of compute actions.

    ``plan(num_ranks, num_micro_batches)`` returns one list of :class:`~mcore_parallel.pipeline.actions.Action` per
    rank. It also gets the keyword ``num_chunks`` (model chunks per rank) unless the schedule takes one chunk alone, and
    the options that :meth:`with_options` bound.

    ``min_chunks``, ``max_chunks``: how many chunks a rank may hold (``max_chunks=None``: any number above).
    ``flow(num_ranks, num_chunks)``: where the stages live. ``legal``, called as ``plan`` is: why the schedule cannot
    run these sizes, with the nearest that it can, or None. ``options``: names of further keywords (``group_size``);
    with ``configure``, that function makes of them the spec to use instead of ``plan`` and ``legal`` getting them.
    ``splits_backward``: whether plans hold input-gradient and weight-gradient passes.
    ``aliases``: other names that users know it by. ``bubble``, ``memory``, ``paper``: for people.
    """

    name: str
    plan: Callable[..., Any]
    min_chunks: int = 1
    max_chunks: int | None = 1
    flow: Callable[[int, int], Flow] = looped_flow
    legal: Callable[..., str | None] | None = None
    options: tuple[str, ...] = ()
    configure: Callable[..., ScheduleSpec] | None = None
    bound: tuple[tuple[str, Any], ...] = ()
    splits_backward: bool = False
    aliases: tuple[str, ...] = ()
    summary: str = ""
    bubble: str = ""
    memory: str = ""
    paper: str = ""

    def with_options(self, **options: Any) -> ScheduleSpec:
        """This schedule with ``options`` set, for good; None counts as not given.

        Raises:
            ValueError: an option that the schedule does not take, or a value that it refuses.
        """
        given = {name: value for name, value in options.items() if value is not None}
        unknown = sorted(set(given).difference(self.options))
        if unknown:
            takes = ", ".join(self.options) or "no options"
            raise ValueError(f"{self.name} takes no {', '.join(unknown)} (it takes {takes})")
        if not given:
            return self
        if self.configure is not None:
            return self.configure(**given)
        return replace(self, bound=tuple({**dict(self.bound), **given}.items()))

    def why_illegal(self, num_ranks: int, num_micro_batches: int, num_chunks: int | None = None) -> str | None:
        """Why the schedule cannot run these sizes, with the nearest legal ones; None if it can.

        ``num_chunks``: model chunks per rank, by default the fewest that the schedule takes.
        """
        chunks = self.min_chunks if num_chunks is None else num_chunks
        if num_ranks < 1 or num_micro_batches < 1:
            return (
                f"{self.name} needs at least one rank and one micro-batch, "
                f"got {num_ranks} ranks and {num_micro_batches} micro-batches"
            )
        if chunks < self.min_chunks or (self.max_chunks is not None and chunks > self.max_chunks):
            return f"{self.name} needs {self._chunk_words()} per rank, got {chunks}"
        return None if self.legal is None else self._call(self.legal, num_ranks, num_micro_batches, chunks)

    def actions(self, num_ranks: int, num_micro_batches: int, num_chunks: int | None = None) -> list[list[Action]]:
        """Each rank's compute actions.

        Raises:
            ValueError: the sizes are illegal; the text of :meth:`why_illegal`.
        """
        reason = self.why_illegal(num_ranks, num_micro_batches, num_chunks)
        if reason is not None:
            raise ValueError(reason)
        chunks = self.min_chunks if num_chunks is None else num_chunks
        plan: list[list[Action]] = self._call(self.plan, num_ranks, num_micro_batches, chunks)
        return plan

    def _call(self, function: Callable[..., Any], num_ranks: int, num_micro_batches: int, chunks: int) -> Any:
        keywords = dict(self.bound)
        if (self.min_chunks, self.max_chunks) != (1, 1):
            keywords["num_chunks"] = chunks
        return function(num_ranks, num_micro_batches, **keywords)

    def _chunk_words(self) -> str:
        few, many = self.min_chunks, self.max_chunks
        if few == many:
            return f"exactly {few} model chunk{'s' if few > 1 else ''}"
        return f"at least {few} model chunks" if many is None else f"{few} to {many} model chunks"


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer: ``build(groups, config)`` returns a ``torch.optim.Optimizer`` over flat shards.

    With ``config``, a pydantic model of the optimizer's own settings, those become flags and a section of recipes under
    ``name``, and ``build`` gets the section as the keyword ``settings``.

    ``groups`` are torch parameter groups (``params``, ``weight_decay``, ``lr``); ``config`` the ``OptimizerConfig``.
    ``slots`` are the names of its per-element state tensors, in the words of its ``state`` entries.
    """

    name: str
    build: Callable[..., Any]
    slots: tuple[str, ...] = ()
    config: type | None = None
