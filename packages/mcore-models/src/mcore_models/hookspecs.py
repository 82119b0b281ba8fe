"""Hooks that mcore-models owns. Each takes no argument and returns a list of frozen specs."""

from mcore_models.specs import KernelSpec, ModelSpec
from mcore_parallel.plugins import hookspec


@hookspec
def mcore_kernels() -> list[KernelSpec]:  # type: ignore[empty-body]
    """Kernel sets, chosen by ``--transformer-impl``."""


@hookspec
def mcore_models() -> list[ModelSpec]:  # type: ignore[empty-body]
    """Model families, chosen by ``--model``."""
