"""One split of one or several indexed data sets: how many samples each member gives, with Megatron's sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mcore_data.blend import BlendedDataset, normalise
from mcore_data.gpt_dataset import GPTDataset, SampleDataset, SampleRules
from mcore_data.indexed_dataset import IndexedDataset
from mcore_data.splits import Share, split_range

SURPLUS = 0.005


@dataclass(frozen=True)
class SplitRequest:
    """A split to build: its name, its share of every data set, and the samples wanted (None: one epoch)."""

    name: str
    share: Share
    num_samples: int | None


def split_tokens(indexed: IndexedDataset, share: Share) -> int:
    """Tokens of a data set that fall into ``share``."""
    if share is None:
        return 0
    begin, end = split_range(share, len(indexed))
    return int(np.sum(indexed.sequence_lengths[begin:end], dtype=np.int64))


def empty_split(indexed: IndexedDataset, request: SplitRequest) -> str | None:
    """Why ``request`` cannot be cut from this data set, or None if it can."""
    if request.share is None:
        return f"--split gives the {request.name} split no share, but {request.num_samples} of its samples are needed"
    begin, end = split_range(request.share, len(indexed))
    if split_tokens(indexed, request.share):
        return None
    found = f"documents {begin}..{end - 1} of it hold no tokens" if end > begin else "it gets no document"
    return (
        f"the {request.name} split of {indexed.prefix} ({len(indexed)} documents) is empty: {found}; "
        f"change --split, give more documents, or ask for no {request.name} samples"
    )


@dataclass(frozen=True)
class Mixture:
    """Members with optional weights, and how their samples are cut.

    Args:
        members: the data sets, in the order given.
        weights: shares of samples; None takes the members in proportion to their size.
        rules: how samples are cut and masked.
        surplus: how much more than its share each member of a weighted blend is asked for.
        keep_partial: see ``GPTDataset``.
        cache_folder: see ``GPTDataset``.
    """

    members: Sequence[IndexedDataset]
    weights: Sequence[float] | None
    rules: SampleRules
    surplus: float = SURPLUS
    keep_partial: bool = False
    cache_folder: str | None = None

    def build(self, request: SplitRequest) -> SampleDataset:
        """The samples of one split.

        One member without weight gives its own samples. Weighted members are repeated by epochs as their share needs.
        Unweighted members are used for one epoch; if that is too little (Megatron would end early), they are
        repeated, weighted by their tokens.

        Raises:
            ValueError: the split is empty in a member, or a weighted blend is asked for one epoch.
        """
        members, weights = self._without_zero_weights()
        for member in members:
            problem = empty_split(member, request)
            if problem is not None:
                raise ValueError(problem)
        if weights is None and len(members) == 1:
            return self._member(members[0], request, request.num_samples)
        if weights is None:
            return self._unweighted(members, request)
        if request.num_samples is None:
            raise ValueError("a weighted blend needs a number of samples")
        return self._weighted(members, weights, request, request.num_samples)

    def _without_zero_weights(self) -> tuple[list[IndexedDataset], list[float] | None]:
        if self.weights is None:
            return list(self.members), None
        normalise(self.weights)
        kept = [(member, weight) for member, weight in zip(self.members, self.weights, strict=True) if weight > 0]
        return [member for member, _ in kept], [weight for _, weight in kept]

    def _member(self, indexed: IndexedDataset, request: SplitRequest, num_samples: int | None) -> GPTDataset:
        assert request.share is not None
        return GPTDataset(
            indexed,
            split_range(request.share, len(indexed)),
            self.rules,
            num_samples=num_samples,
            keep_partial=self.keep_partial,
            cache_folder=self.cache_folder,
        )

    def _weighted(
        self, members: Sequence[IndexedDataset], weights: Sequence[float], request: SplitRequest, size: int
    ) -> BlendedDataset:
        # Megatron normalises here and the blend does it again, which can move the last bit and with it a tie.
        shares: list[float] = normalise(weights).tolist()
        targets = [math.ceil(size * share) for share in shares]
        built = [
            self._member(member, request, math.ceil(target * (1 + self.surplus)))
            for member, target in zip(members, targets, strict=True)
        ]
        return self._blend(built, shares, request, sum(targets))

    def _unweighted(self, members: Sequence[IndexedDataset], request: SplitRequest) -> BlendedDataset:
        built = [self._member(member, request, None) for member in members]
        available = sum(len(member) for member in built)
        if request.num_samples is None:
            return BlendedDataset(built, None, None)
        if request.num_samples > available:
            tokens = [float(split_tokens(member, request.share)) for member in members]
            return self._weighted(members, tokens, request, request.num_samples)
        return self._blend(built, [float(len(member)) for member in built], request, request.num_samples)

    def _blend(
        self, members: list[GPTDataset], weights: Sequence[float], request: SplitRequest, size: int
    ) -> BlendedDataset:
        blend = BlendedDataset(members, weights, size)
        # Rounding can draw more from a member than its share; Megatron ends with an error there, we add an epoch.
        for position, (member, drawn) in enumerate(zip(members, blend.drawn, strict=True)):
            if drawn > len(member):
                blend.members[position] = self._member(member.indexed, request, drawn)
        return blend
