"""Built-in plugins of mcore-parallel, registered through the same hooks as anybody's. No torch."""

from mcore_parallel.pipeline.actions import v_flow
from mcore_parallel.plugins import hookimpl, lazy
from mcore_parallel.specs import OptimizerSpec, ScheduleSpec

_SCHEDULES = "mcore_parallel.pipeline.schedules"


@hookimpl
def mcore_pipeline_schedules() -> list[ScheduleSpec]:
    """The schedules that mcore ships."""
    return [*_one_chunk(), *_looped(), *_v_shaped(), _table()]


def _one_chunk() -> list[ScheduleSpec]:
    return [
        ScheduleSpec(
            "gpipe",
            plan=lazy(f"{_SCHEDULES}.gpipe:plan"),
            aliases=("GPipe", "afab"),
            summary="all forwards, then all backwards",
            bubble="(p-1)/(m+p-1) of the makespan",
            memory="m activations",
            paper="arXiv:1811.06965",
        ),
        ScheduleSpec(
            "1f1b",
            plan=lazy(f"{_SCHEDULES}.one_f_one_b:plan"),
            aliases=("1F1B", "pipedream-flush"),
            summary="one forward, one backward in turn",
            bubble="(p-1)/(m+p-1) of the makespan",
            memory="min(p-r, m) activations",
            paper="arXiv:2006.09503",
        ),
        ScheduleSpec(
            "zb-h1",
            plan=lazy(f"{_SCHEDULES}.zb_h1:plan"),
            splits_backward=True,
            aliases=("ZB-H1", "zbh1", "zb1p"),
            summary="1F1B with weight gradients put off into its gaps",
            bubble="(p-1)(F+I-W) of a rank's span",
            memory="p activations and deferred weight gradients together",
            paper="arXiv:2401.10241",
        ),
        ScheduleSpec(
            "zb-h2",
            plan=lazy(f"{_SCHEDULES}.zb_h2:plan"),
            splits_backward=True,
            aliases=("ZB-H2", "zbh2", "zb2p"),
            summary="ZB-H1 with twice the warm-up: no gap within a rank's span for F=I=W",
            bubble="(p-1)(F+I-2W) of a rank's span",
            memory="2p-1 activations and deferred weight gradients together",
            paper="arXiv:2401.10241",
        ),
    ]


def _looped() -> list[ScheduleSpec]:
    return [
        ScheduleSpec(
            "interleaved",
            plan=lazy(f"{_SCHEDULES}.interleaved:plan"),
            max_chunks=None,
            legal=lazy(f"{_SCHEDULES}.interleaved:legal"),
            options=("group_size",),
            aliases=("interleaved-1f1b", "interleaved_1f1b", "1f1b-interleaved", "1f1b-i", "Interleaved1F1B"),
            summary="1F1B over several chunks per rank, stages dealt round",
            bubble="(p-1)/(vm+p-1) of the makespan",
            memory="(v-1)g+2(p-r)-1 chunk activations",
            paper="arXiv:2104.04473",
        ),
        ScheduleSpec(
            "looped-bfs",
            plan=lazy(f"{_SCHEDULES}.looped_bfs:plan"),
            max_chunks=None,
            aliases=("looped_bfs", "bfs", "LoopedBFS"),
            summary="chunk by chunk over all micro-batches: weights gathered once per pass, for ZeRO and FSDP",
            bubble="(p-1)/(vm+p-1) of the makespan",
            memory="vm chunk activations",
            paper="arXiv:2211.05953",
        ),
    ]


def _v_shaped() -> list[ScheduleSpec]:
    return [
        ScheduleSpec(
            "zbv",
            plan=lazy(f"{_SCHEDULES}.zbv:plan"),
            min_chunks=2,
            max_chunks=2,
            flow=v_flow,
            splits_backward=True,
            aliases=("ZBV", "zb-v", "ZB-V", "ZBVZeroBubble"),
            summary="down the ranks and back: no gap within a rank's span for F=I=W, 1F1B's memory",
            bubble="2(p-1)(I-W) of a rank's span, in chunk times",
            memory="2p chunk activations and deferred weight gradients together",
            paper="arXiv:2401.10241, arXiv:2405.15362",
        ),
        ScheduleSpec(
            "dualpipev",
            plan=lazy(f"{_SCHEDULES}.dualpipev:plan"),
            min_chunks=2,
            max_chunks=2,
            flow=v_flow,
            legal=lazy(f"{_SCHEDULES}.dualpipev:legal"),
            splits_backward=True,
            aliases=("DualPipeV", "dualpipe-v", "dualpipe_v"),
            summary="a V with a forward beside each backward, to hide communication",
            bubble="(p-1)(F+I-W) of the makespan, in chunk times",
            memory="2p+1 chunk activations",
            paper="arXiv:2412.19437",
        ),
    ]


def _table() -> ScheduleSpec:
    return ScheduleSpec(
        "table",
        plan=lazy(f"{_SCHEDULES}.table:unconfigured_plan"),
        max_chunks=None,
        legal=lazy(f"{_SCHEDULES}.table:unconfigured_legal"),
        options=("table",),
        configure=lazy(f"{_SCHEDULES}.table:configure"),
        summary="any order, read from a CSV or YAML file (--pipeline-schedule-table)",
    )


@hookimpl
def mcore_optimizers() -> list[OptimizerSpec]:
    """The optimizers that mcore ships."""
    return [
        OptimizerSpec("adam", build=lazy("mcore_parallel.optim.builtin:build_adam"), slots=("exp_avg", "exp_avg_sq")),
        OptimizerSpec("sgd", build=lazy("mcore_parallel.optim.builtin:build_sgd"), slots=("momentum_buffer",)),
    ]
