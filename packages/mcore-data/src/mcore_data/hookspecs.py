"""Hooks that mcore-data owns. Each takes no argument and returns a list of frozen specs."""

from mcore_data.specs import DatasetSpec, TokenizerSpec
from mcore_parallel.plugins import hookspec


@hookspec
def mcore_tokenizers() -> list[TokenizerSpec]:  # type: ignore[empty-body]
    """Tokenizers, chosen by ``--tokenizer-type``."""


@hookspec
def mcore_datasets() -> list[DatasetSpec]:  # type: ignore[empty-body]
    """Data sets, chosen by ``--dataset``."""
