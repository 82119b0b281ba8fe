"""The rank grid: named axes over consecutive integers. Pure arithmetic, no torch.

A mesh is slowest axis first. Megatron's default rank order ``tp-cp-dp-pp`` (fastest first) is therefore the mesh
``(pp, dp, cp, tp)``. A second factorisation of the same ranks is a *view*, never a second grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

DEFAULT_ORDER = ("pp", "dp", "cp", "tp")
TP_PP_DP_ORDER = ("dp", "pp", "cp", "tp")


class Mesh:
    """Named axes over ``world_size`` ranks; ``grid[i, j, ...]`` is the rank at those coordinates."""

    def __init__(self, names: tuple[str, ...], grid: npt.NDArray[np.int64]) -> None:
        if len(set(names)) != len(names) or len(names) != grid.ndim:
            raise ValueError(f"a mesh needs one distinct name per axis, got {names} for {grid.ndim} axes")
        self.names = names
        self.grid = grid

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(self.grid.size)

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name to axis size, slowest first."""
        return dict(zip(self.names, self.grid.shape, strict=True))

    def size(self, *names: str) -> int:
        """Product of the sizes of ``names``."""
        return math.prod(self.grid.shape[self._index(name)] for name in names)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of ``rank`` on every axis."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        where = np.argwhere(self.grid == rank)[0]
        return {name: int(i) for name, i in zip(self.names, where, strict=True)}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at ``coordinates`` (every axis must be given)."""
        return int(self.grid[tuple(coordinates[name] for name in self.names)])

    def groups(self, *names: str) -> npt.NDArray[np.int64]:
        """All groups along ``names`` together: ``[num_groups, group_size]``, members in mesh order."""
        along = sorted(self._index(name) for name in names)
        others = [i for i in range(self.grid.ndim) if i not in along]
        return self.grid.transpose(others + along).reshape(-1, self.size(*names) if names else 1)

    def group(self, rank: int, *names: str) -> tuple[int, ...]:
        """The ranks that share all coordinates with ``rank`` but those of ``names``."""
        at = self.coordinates(rank)
        pick = tuple(slice(None) if name in names else at[name] for name in self.names)
        return tuple(int(r) for r in np.atleast_1d(self.grid[pick]).ravel())

    def view(self, carved: tuple[str, ...], into: Mapping[str, int]) -> Mesh:
        """The same ranks with the product of the axes ``carved`` refactored as ``into`` (slowest first).

        Raises:
            ValueError: the sizes of ``into`` do not multiply to the product of ``carved``.
        """
        if math.prod(into.values()) != self.size(*carved):
            raise ValueError(
                f"view {dict(into)} has {math.prod(into.values())} ranks, {'x'.join(carved)} has {self.size(*carved)}"
            )
        along = sorted(self._index(name) for name in carved)
        others = [i for i in range(self.grid.ndim) if i not in along]
        shape = [self.grid.shape[i] for i in others] + list(into.values())
        names = tuple(self.names[i] for i in others) + tuple(into)
        return Mesh(names, self.grid.transpose(others + along).reshape(shape))

    def _index(self, name: str) -> int:
        try:
            return self.names.index(name)
        except ValueError:
            raise ValueError(f"mesh has no axis {name!r} (it has {', '.join(self.names)})") from None


def build_mesh(
    world_size: int, *, tp: int = 1, pp: int = 1, cp: int = 1, order: tuple[str, ...] = DEFAULT_ORDER
) -> Mesh:
    """The dense grid of ``world_size`` ranks; dp is what is left.

    Raises:
        ValueError: ``tp * pp * cp`` does not divide the world size.
    """
    model = tp * pp * cp
    if world_size < 1 or world_size % model:
        raise ValueError(
            f"a world of {world_size} ranks does not divide into tp {tp} x pp {pp} x cp {cp} = {model} ranks a replica"
        )
    sizes = {"tp": tp, "pp": pp, "cp": cp, "dp": world_size // model}
    return Mesh(order, np.arange(world_size, dtype=np.int64).reshape([sizes[name] for name in order]))
