"""What the plugin registers. mcore reads this module at every start, so it imports no torch."""

from mcore_parallel.plugins import hookimpl, lazy
from mcore_parallel.specs import OptimizerSpec, ScheduleSpec


@hookimpl
def mcore_pipeline_schedules() -> list[ScheduleSpec]:
    """``--pipeline-schedule gpipe-example``."""
    return [
        ScheduleSpec(
            "gpipe-example",
            plan=lazy("mcore_plugin_example.gpipe:plan"),
            summary="all forwards, then all backwards: bubble (p-1)/(m+p-1), m live activations",
        )
    ]


@hookimpl
def mcore_optimizers() -> list[OptimizerSpec]:
    """``--optimizer sign_sgd``."""
    return [OptimizerSpec("sign_sgd", build=lazy("mcore_plugin_example.sign_sgd:build_sign_sgd"))]
