"""Built-in plugins of mcore-parallel, registered through the same hooks as anybody's. No torch."""

from mcore_parallel.plugins import hookimpl, lazy
from mcore_parallel.specs import OptimizerSpec, ScheduleSpec


@hookimpl
def mcore_pipeline_schedules() -> list[ScheduleSpec]:
    """The schedules that mcore ships."""
    return [
        ScheduleSpec(
            "1f1b",
            plan=lazy("mcore_parallel.pipeline.schedules.one_f_one_b:plan"),
            summary="one forward, one backward: bubble (p-1)/(m+p-1), at most p live activations",
        )
    ]


@hookimpl
def mcore_optimizers() -> list[OptimizerSpec]:
    """The optimizers that mcore ships."""
    return [
        OptimizerSpec("adam", build=lazy("mcore_parallel.optim.builtin:build_adam"), slots=("exp_avg", "exp_avg_sq")),
        OptimizerSpec("sgd", build=lazy("mcore_parallel.optim.builtin:build_sgd"), slots=("momentum_buffer",)),
    ]
