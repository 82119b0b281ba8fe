"""An axis of the mesh as one rank sees it, and the layout that holds all of them. Made once at start; no globals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from mcore_parallel.mesh import Mesh
from mcore_parallel.traffic import TrafficRecorder


@dataclass(frozen=True)
class Axis:
    """The ranks along one (or several merged) mesh axes that contain this rank.

    ``rank`` is this rank's index in ``ranks``; ``group`` the process group, None at size 1.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int = 0
    group: dist.ProcessGroup | None = None
    recorder: TrafficRecorder = field(default_factory=TrafficRecorder)

    @property
    def size(self) -> int:
        """Number of ranks along the axis."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first along the axis."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank is the last along the axis."""
        return self.rank == self.size - 1

    def record(self, op: str, tensor: torch.Tensor) -> None:
        """Report an operation whose whole buffer is ``tensor``."""
        if self.recorder.enabled:
            self.recorder.record(
                op,
                axis=self.name,
                num_bytes=tensor.numel() * tensor.element_size(),
                shape=tuple(tensor.shape),
                group=self.ranks,
            )


class Layout:
    """All axes of one rank. Axes must be created in the same order on every rank (process groups are collective)."""

    def __init__(self, mesh: Mesh, rank: int, *, timeout: timedelta = timedelta(minutes=10)) -> None:
        self.mesh = mesh
        self.rank = rank
        self.recorder = TrafficRecorder()
        self.timeout = timeout
        self._axes: dict[str, Axis] = {}
        self._groups: dict[tuple[bool, tuple[int, ...]], dist.ProcessGroup] = {}

    def axis(self, *names: str) -> Axis:
        """The axis made before under ``names`` merged, e.g. ``axis("tp")`` or ``axis("dp", "cp")``."""
        key = "_".join(names)
        try:
            return self._axes[key]
        except KeyError:
            raise ValueError(f"axis {key!r} was not made at start (made: {', '.join(self._axes)})") from None

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Every axis, in the order in which they were made (the same on every rank)."""
        return tuple(self._axes.values())

    def add(self, *names: str, mesh: Mesh | None = None) -> Axis:
        """Make the axis ``names`` of the mesh (or of a view of it) with its process group."""
        return self.add_groups("_".join(names), (mesh or self.mesh).groups(*names).tolist())

    def add_groups(self, name: str, groups: Iterable[Sequence[int]]) -> Axis:
        """Make an axis from explicit rank groups. A rank in none of them gets an axis of itself alone."""
        mine = Axis(name, (self.rank,), recorder=self.recorder)
        for ranks in groups:
            members = tuple(int(r) for r in ranks)
            group = self._process_group(name, members)
            if self.rank in members:
                mine = Axis(name, members, members.index(self.rank), group, self.recorder)
        self._axes[name] = mine
        return mine

    def _process_group(self, name: str, members: tuple[int, ...]) -> dist.ProcessGroup | None:
        if len(members) == 1:
            return None
        if members == tuple(range(self.mesh.world_size)):
            return dist.group.WORLD
        if self.rank not in members:
            return None
        # Only members take part, or every rank would wait for every other once per group of the world. The groups of
        # one axis are disjoint and axes are made in one order, so no two groups wait for each other in a circle.
        # Axes of equal members (dp, and dp with cp at cp 1) share a group; that of messages between stages is its own.
        key = (name == "pp", members)
        if key not in self._groups:
            self._groups[key] = dist.new_group(list(members), timeout=self.timeout, use_local_synchronization=True)
        return self._groups[key]


def build_layout(
    mesh: Mesh,
    rank: int,
    *,
    kv_heads: int = 0,
    ends: tuple[int, int] = (0, -1),
    timeout: timedelta = timedelta(minutes=10),
) -> Layout:
    """The axes that training uses: tp, pp, dp, cp, dp_cp, world, embedding (first and last stage), kv_copy.

    ``kv_heads``: number of KV heads; when fewer than tp, ``kv_copy`` is the axis of tp ranks that share one. ``ends``:
    the pipeline ranks of the first and the last stage; equal where both live on one rank, and nothing is exchanged.
    """
    layout = Layout(mesh, rank, timeout=timeout)
    for names in (("tp",), ("pp",), ("dp",), ("cp",), ("dp", "cp")):
        layout.add(*names)
    layout.add_groups("world", [range(mesh.world_size)])
    first, last = ends
    layout.add_groups("embedding", [list(dict.fromkeys((g[first], g[last]))) for g in mesh.groups("pp").tolist()])
    copies = num_kv_copies(mesh.size("tp"), kv_heads)
    layout.add("kv_copy", mesh=mesh.view(("tp",), {"kv": mesh.size("tp") // copies, "kv_copy": copies}))
    return layout


def num_kv_copies(tp: int, kv_heads: int) -> int:
    """How many tp ranks share one KV head: 1 unless there are fewer KV heads than tp ranks."""
    return tp // kv_heads if 0 < kv_heads < tp else 1


def single_layout(kv_heads: int = 0) -> Layout:
    """The layout of one rank, without any process group."""
    from mcore_parallel.mesh import build_mesh

    return build_layout(build_mesh(1), 0, kv_heads=kv_heads)
