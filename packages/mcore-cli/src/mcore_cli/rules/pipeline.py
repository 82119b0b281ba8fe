"""Rules of the pipeline: virtual stages, layers on stages, and what its schedule can run. No torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mcore_cli.config import RunConfig
from mcore_cli.pipeline import (
    CHUNKS,
    GROUP_SIZE,
    LAYOUT,
    PER_CHUNK,
    PP,
    TABLE,
    TABLE_FILE,
    PipelineShape,
    Schedules,
    pipeline_shape,
    requested_chunks,
    schedules_of,
    stage_layers_of,
)
from mcore_cli.rules.engine import Context, Rule, Violation
from mcore_parallel.pipeline.compile import compile_schedule
from mcore_parallel.pipeline.stage import AUTO, EMBEDDING, LOSS, PlacementError
from mcore_parallel.plugins import PluginManager

GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
SCHEDULE = "--pipeline-schedule"
# How far to look for a number of micro-batches that a schedule takes.
FARTHEST = 4096

ShapeRule = Callable[[Context, PipelineShape], Violation | None]


def flags_agree(schedules: Schedules, context: Context) -> Violation | None:
    """The flags give one schedule and a whole number of virtual stages."""
    try:
        _shape(schedules, context)
    except PlacementError as error:
        return Violation("pipeline-shape", error.values, error.reason, "change one of them", error.nearest)
    return None


def schedule_takes_chunks(context: Context, shape: PipelineShape) -> Violation | None:
    """A schedule runs so many model chunks per rank, and no other number; where it takes several, one is chosen."""
    spec, chunks = shape.spec, shape.num_chunks
    few, many = spec.min_chunks, spec.max_chunks
    if not _in_range(shape):
        return Violation(
            "schedule-chunks",
            f"{SCHEDULE} {spec.name} with {_chunks_text(context, shape)}",
            spec.why_illegal(shape.num_ranks, FARTHEST, chunks) or "it takes another number",
            f"change it, or {SCHEDULE}",
            f"{CHUNKS} {few if chunks < few else many}",
        )
    if few == many or shape.num_ranks == 1 or requested_chunks(context.config) is not None or spec.name == TABLE:
        return None
    return Violation(
        "schedule-chunks",
        f"{SCHEDULE} {spec.name} with {PP} {shape.num_ranks}",
        f"it takes {few} {'or more' if many is None else f'to {many}'} virtual stages per rank, and none are asked for",
        f"give {CHUNKS} (or {PER_CHUNK}, or {LAYOUT})",
        f"{CHUNKS} 2",
    )


def virtual_needs_pipeline(context: Context, shape: PipelineShape) -> Violation | None:
    """Virtual stages are dealt round the ranks of a pipeline: with one rank there is nothing to gain."""
    parallel = context.config.parallel
    flags = (
        (PER_CHUNK, parallel.num_layers_per_virtual_pipeline_stage),
        (
            CHUNKS,
            parallel.num_virtual_stages_per_pipeline_rank,
        ),
    )
    given = [f"{flag} {value}" for flag, value in flags if value is not None]
    if shape.num_ranks > 1 or (shape.num_chunks == 1 and not given):
        return None
    return Violation(
        "virtual-stages-alone",
        f"{', '.join(given) or _chunks_text(context, shape)} with {PP} {shape.num_ranks}",
        "virtual stages take turns on the ranks of a pipeline, and have no effect with one rank",
        f"set {PP} above 1, or drop them",
        f"{PP} 2",
    )


def layers_are_placed(context: Context, shape: PipelineShape) -> Violation | None:
    """Every layer lives on exactly one stage."""
    try:
        stage_layers_of(_with_a_vocabulary(context.config), shape)
    except PlacementError as error:
        even = not (error.values.startswith(AUTO) or LAYOUT in error.values)
        return Violation(
            "layers-per-stage",
            error.values,
            error.reason,
            f"change one of them{f', or use {AUTO}' if even else ''}",
            error.nearest,
        )
    return None


def split_has_effect(context: Context, shape: PipelineShape) -> Violation | None:
    """One stage holds everything: there is nothing to balance."""
    parallel = context.config.parallel
    flags = {
        EMBEDDING: parallel.account_for_embedding_in_pipeline_split,
        LOSS: parallel.account_for_loss_in_pipeline_split,
        AUTO: parallel.pipeline_split == "auto",
    }
    given = [flag for flag, is_given in flags.items() if is_given]
    if shape.num_ranks > 1 or not given:
        return None
    return Violation(
        "no-effect",
        f"{', '.join(given)} with {PP} 1",
        "no effect here, one rank holds every layer",
        f"drop it, or set {PP} above 1",
        f"{PP} 2",
    )


def group_size_has_effect(context: Context, shape: PipelineShape) -> Violation | None:
    """A group size belongs to schedules that run micro-batches through several chunks in groups."""
    size = context.config.parallel.microbatch_group_size_per_virtual_pipeline_stage
    if size is None or (GROUP_SIZE in shape.spec.options and shape.num_chunks > 1):
        return None
    return Violation(
        "no-effect",
        f"{GROUP} {size} with {SCHEDULE} {shape.spec.name} ({_chunks_text(context, shape)})",
        "no effect here, this does not run micro-batches through several virtual stages in groups",
        f"drop it, or give {CHUNKS} above 1 with {SCHEDULE} 1f1b",
    )


def recompute_fits(context: Context, shape: PipelineShape) -> Violation | None:
    """A stage cannot recompute more layers than it has."""
    asked = context.config.parallel.recompute_num_layers
    try:
        held = max(len(layers) for layers in stage_layers_of(_with_a_vocabulary(context.config), shape))
    except PlacementError:
        return None  # told by layers_are_placed
    if asked is None or asked <= max(1, held):
        return None
    return Violation(
        "recompute-layers",
        f"--recompute-num-layers {asked} with {held} layers on the largest stage",
        "it cannot exceed the layers of a stage",
        "lower --recompute-num-layers",
        str(max(1, held)),
    )


def schedule_runs(schedules: Schedules, context: Context, shape: PipelineShape) -> Violation | None:
    """The schedule can run this many micro-batches on this many ranks, and its plan is proven."""
    count, step = context.num_micro_batches, context.samples_per_micro_step
    if count is None or step is None or schedule_takes_chunks(context, shape) is not None:
        return None

    def reason(micro_batches: int) -> str | None:
        return shape.spec.why_illegal(shape.num_ranks, micro_batches, shape.num_chunks)

    why, fix, nearest = reason(count), "", ""
    if why is not None:
        legal = _legal_around(count, lambda n: reason(n) is None)
        nearest = " or ".join(f"--global-batch-size {n * step}" for n in legal)
        fix = "change --global-batch-size or --micro-batch-size"
        others = _others(schedules, context, shape, count)
        fix += f", or use {SCHEDULE} {' or '.join(others)}" if others else ""
    else:
        why = _why_not_proven(shape, count)
        fix = f"correct it, or use another {SCHEDULE}"
    if why is None:
        return None
    size = context.config.parallel.microbatch_group_size_per_virtual_pipeline_stage
    given = "" if size is None else f", {GROUP} {size}"
    return Violation(
        "pipeline-schedule",
        f"{SCHEDULE} {shape.spec.name} with {PP} {shape.num_ranks}, {_chunks_text(context, shape)} and "
        f"--global-batch-size {context.config.train.global_batch_size} = {count} micro-batches{given}",
        why,
        fix,
        nearest,
    )


def _why_not_proven(shape: PipelineShape, count: int) -> str | None:
    try:
        compile_schedule(shape.spec, num_ranks=shape.num_ranks, num_micro_batches=count, num_chunks=shape.num_chunks)
    except ValueError as error:
        return str(error)
    return None


def _others(schedules: Schedules, context: Context, shape: PipelineShape, count: int) -> list[str]:
    """The schedules that can run this instead."""
    chunks = requested_chunks(context.config)
    return [
        spec.name
        for spec in schedules
        if spec.name != shape.spec.name
        and (chunks is not None or spec.min_chunks == spec.max_chunks)
        and spec.why_illegal(shape.num_ranks, count, chunks) is None
    ]


def _in_range(shape: PipelineShape) -> bool:
    few, many = shape.spec.min_chunks, shape.spec.max_chunks
    return few <= shape.num_chunks and (many is None or shape.num_chunks <= many)


def _legal_around(number: int, is_legal: Callable[[int], bool]) -> list[int]:
    below = next((n for n in range(min(number - 1, FARTHEST), 0, -1) if is_legal(n)), None)
    above = next((n for n in range(number + 1, number + FARTHEST) if is_legal(n)), None)
    return [n for n in (below, above) if n is not None]


def _chunks_text(context: Context, shape: PipelineShape) -> str:
    parallel = context.config.parallel
    text = f"{shape.num_chunks} virtual stage{'s' if shape.num_chunks > 1 else ''} per rank"
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        return f"{text} ({PER_CHUNK} {parallel.num_layers_per_virtual_pipeline_stage})"
    if parallel.num_virtual_stages_per_pipeline_rank is not None:
        return f"{text} ({CHUNKS} {parallel.num_virtual_stages_per_pipeline_rank})"
    return f"{text} ({LAYOUT})" if parallel.pipeline_model_parallel_layout is not None else text


def _with_a_vocabulary(config: RunConfig) -> RunConfig:
    # Whether layers can be placed does not depend on what they cost, and the tokenizer is not built yet.
    vocabulary = config.model.vocab_size or 1
    return config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": vocabulary})})


def _shape(schedules: Schedules, context: Context) -> PipelineShape | None:
    """The shape to judge; None if there is no such schedule, which the rules of names tell."""
    if context.config.parallel.pipeline_schedule not in schedules:
        return None
    return pipeline_shape(context.config, schedules)


def _judge(rule: ShapeRule, schedules: Schedules, context: Context) -> Violation | None:
    try:
        shape = _shape(schedules, context)
    except PlacementError:
        return None  # told by flags_agree
    if shape is None or (rule is not schedule_takes_chunks and not _in_range(shape)):
        return None  # told by the rules of names, or by schedule_takes_chunks: there is no such pipeline to judge
    try:
        return rule(context, shape)
    except PlacementError:
        raise
    except ValueError as error:  # a schedule table for other sizes says so when it is asked for its flow
        table = context.config.parallel.pipeline_schedule_table
        values = f"{SCHEDULE} {shape.spec.name}" if table is None else f"{TABLE_FILE} {table}"
        return Violation("pipeline-schedule", values, str(error), "use sizes that it is made for")


def pipeline_rules(manager: PluginManager, *, backward: bool = True) -> tuple[Rule, ...]:
    """The rules with the registered schedules; without ``backward``, those of running forward passes alone."""
    schedules = schedules_of(manager)
    judged: list[tuple[str, ShapeRule]] = [
        ("schedule-chunks", schedule_takes_chunks),
        ("virtual-stages-alone", virtual_needs_pipeline),
        ("layers-per-stage", layers_are_placed),
        ("no-effect", split_has_effect),
        ("no-effect", group_size_has_effect),
        ("recompute-layers", recompute_fits),
    ]
    if backward:
        judged.append(("pipeline-schedule", partial(schedule_runs, schedules)))
    return (
        Rule("pipeline-shape", partial(flags_agree, schedules)),
        *(Rule(name, partial(_judge, rule, schedules)) for name, rule in judged),
    )
