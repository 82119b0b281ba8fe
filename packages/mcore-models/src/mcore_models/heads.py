"""How attention heads are cut over tp: which query heads and which KV heads a rank holds. Pure integers, no torch."""

from __future__ import annotations

from dataclasses import dataclass


def head_violations(*, num_heads: int, num_kv_heads: int, tp: int) -> list[str]:
    """Why these query and KV heads cannot be cut over ``tp`` ranks, one text per rule; empty when they can."""
    where = f"{num_heads} query heads with {num_kv_heads} KV heads at tensor-model-parallel-size {tp}"
    found = []
    if num_heads % num_kv_heads:
        found.append(f"{where}: query heads must be a multiple of KV heads; change one")
    if num_heads % tp:
        found.append(f"{where}: tp must divide the query heads; legal sizes: {_legal_sizes(num_heads, num_kv_heads)}")
    elif num_kv_heads % tp and tp % num_kv_heads:
        found.append(
            f"{where}: tp must divide the KV heads or be a multiple of them; "
            f"legal sizes: {_legal_sizes(num_heads, num_kv_heads)}"
        )
    return found


def _legal_sizes(num_heads: int, num_kv_heads: int) -> str:
    sizes = (
        t for t in range(1, num_heads + 1) if num_heads % t == 0 and (num_kv_heads % t == 0 or t % num_kv_heads == 0)
    )
    return ", ".join(map(str, sizes))


@dataclass(frozen=True)
class HeadSplit:
    """The heads of tp rank ``tp_rank`` of ``tp``: ``n/tp`` query heads, and ``g/tp`` KV heads or one shared KV head.

    Raises:
        ValueError: the heads do not divide; the text names heads, KV heads and tp.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    tp: int = 1
    tp_rank: int = 0

    def __post_init__(self) -> None:
        found = head_violations(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, tp=self.tp)
        if found:
            raise ValueError("; ".join(found))

    @property
    def local_heads(self) -> int:
        """Query heads of this rank (``n/tp``)."""
        return self.num_heads // self.tp

    @property
    def local_kv_heads(self) -> int:
        """KV heads of this rank: ``g/tp``, or 1 where ranks share one."""
        return max(1, self.num_kv_heads // self.tp)

    @property
    def first_head(self) -> int:
        """Global number of this rank's first query head."""
        return self.tp_rank * self.local_heads

    @property
    def first_kv_head(self) -> int:
        """Global number of this rank's first KV head."""
        return self.tp_rank * self.num_kv_heads // self.tp

    @property
    def shares_kv_head(self) -> bool:
        """Whether other tp ranks hold this rank's KV head too."""
        return self.num_kv_heads < self.tp

    @property
    def query_rows(self) -> int:
        """Rows of q in this rank's fused weight."""
        return self.local_heads * self.head_size

    @property
    def kv_rows(self) -> int:
        """Rows of k (and of v) in this rank's fused weight."""
        return self.local_kv_heads * self.head_size

    @property
    def qkv_rows(self) -> int:
        """Rows of this rank's fused weight, ``[q | k | v]``."""
        return self.query_rows + 2 * self.kv_rows
