"""Keys and values of the positions seen so far, for generation."""

from __future__ import annotations

from torch import Tensor


class LayerCache:
    """Keys and values ``[t, b, g, d]`` of one layer, up to ``capacity`` positions."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v ``[s, b, g, d]`` and return all so far, ``[t, b, g, d]``.

        Raises:
            ValueError: more positions than the capacity.
        """
        end = self.length + k.shape[0]
        if end > self.capacity:
            raise ValueError(f"{end} positions exceed the KV cache's capacity of {self.capacity}")
        if self._keys is None or self._values is None:
            shape = (self.capacity, *k.shape[1:])
            self._keys, self._values = k.new_empty(shape), v.new_empty(shape)
        self._keys[self.length : end] = k
        self._values[self.length : end] = v
        self.length = end
        return self._keys[:end], self._values[:end]


class KVCache:
    """One :class:`LayerCache` per layer of a stage."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.layers = [LayerCache(capacity) for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Positions seen so far."""
        return self.layers[0].length if self.layers else 0
