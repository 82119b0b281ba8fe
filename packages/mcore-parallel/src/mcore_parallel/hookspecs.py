"""Hooks that mcore-parallel owns. Each takes no argument and returns a list of frozen specs."""

from mcore_parallel.plugins import hookspec
from mcore_parallel.specs import OptimizerSpec, ScheduleSpec


@hookspec
def mcore_pipeline_schedules() -> list[ScheduleSpec]:  # type: ignore[empty-body]
    """Pipeline schedules, chosen by ``--pipeline-schedule``."""


@hookspec
def mcore_optimizers() -> list[OptimizerSpec]:  # type: ignore[empty-body]
    """Optimizers, chosen by ``--optimizer``."""
