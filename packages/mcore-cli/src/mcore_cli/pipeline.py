"""What the flags make of the pipeline: its schedule, the model chunks of each rank, the layers of each stage. No torch.

The rules call this before any rank starts, and the ranks call it again when they build their parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mcore_cli.config import RunConfig
from mcore_models.cost import part_costs
from mcore_parallel.config import ParallelConfig
from mcore_parallel.pipeline.actions import Flow
from mcore_parallel.pipeline.balance import LayerCosts
from mcore_parallel.pipeline.layout_string import stage_sizes
from mcore_parallel.pipeline.stage import LayerSplit, PlacementError, place_layers
from mcore_parallel.plugins import PluginManager, Registry
from mcore_parallel.specs import ScheduleSpec

PP = "--pipeline-model-parallel-size"
PER_CHUNK = "--num-layers-per-virtual-pipeline-stage"
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
LAYOUT = "--pipeline-model-parallel-layout"
TABLE_FILE = "--pipeline-schedule-table"
GROUP_SIZE = "group_size"
PLAIN, INTERLEAVED, TABLE = "1f1b", "interleaved", "table"

Schedules = Registry[ScheduleSpec]

PIPELINE_FIELDS = (
    "pipeline_model_parallel_size",
    "pipeline_schedule",
    "pipeline_schedule_table",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "microbatch_group_size_per_virtual_pipeline_stage",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
    "pipeline_split",
)


def one_stage() -> dict[str, Any]:
    """The fields of ``ParallelConfig`` that say how the pipeline is cut, as they are without a pipeline."""
    plain = ParallelConfig()
    return {name: getattr(plain, name) for name in PIPELINE_FIELDS}


@dataclass(frozen=True)
class PipelineShape:
    """The pipeline of a run; the options of its schedule are set in ``spec``."""

    spec: ScheduleSpec
    num_ranks: int
    num_chunks: int

    @property
    def flow(self) -> Flow:
        """Where the stages live."""
        return self.spec.flow(self.num_ranks, self.num_chunks)


def schedules_of(manager: PluginManager) -> Schedules:
    """The registered schedules."""
    return Registry("pipeline schedule", manager.collect("mcore_pipeline_schedules"))


def pipeline_shape(config: RunConfig, schedules: Schedules) -> PipelineShape:
    """The schedule and the chunks per rank that the flags ask for.

    Without a flag for virtual stages a rank holds as few chunks as the schedule takes (ZBV and DualPipeV: two). With
    one, 1F1B becomes interleaved 1F1B, as in Megatron.

    Raises:
        PlacementError: the flags contradict each other, give no whole number of chunks, or name a table that cannot be
            read.
        ValueError: no such schedule.
    """
    parallel = config.parallel
    chunks = requested_chunks(config)
    spec = schedules[parallel.pipeline_schedule]
    if parallel.pipeline_schedule_table is not None:
        spec = _table(spec, parallel.pipeline_schedule_table, schedules)
    elif spec.name == PLAIN and chunks is not None and chunks > 1:
        spec = schedules[INTERLEAVED]
    if GROUP_SIZE in spec.options:
        spec = spec.with_options(group_size=parallel.microbatch_group_size_per_virtual_pipeline_stage)
    num_chunks = spec.min_chunks if chunks is None else chunks
    return PipelineShape(spec, parallel.pipeline_model_parallel_size, num_chunks)


def _table(spec: ScheduleSpec, path: str, schedules: Schedules) -> ScheduleSpec:
    if spec.name not in (PLAIN, TABLE):
        raise PlacementError(
            f"--pipeline-schedule {spec.name} with {TABLE_FILE} {path}", "each says by itself what ranks do; keep one"
        )
    try:
        return schedules[TABLE].with_options(table=path)
    except ValueError as error:
        raise PlacementError(f"{TABLE_FILE} {path}", str(error)) from None


def requested_chunks(config: RunConfig) -> int | None:
    """Chunks per rank that a flag asks for; None if no flag does.

    Raises:
        PlacementError: two flags say it, or they give no whole number of chunks.
    """
    parallel, layers = config.parallel, config.model.num_layers
    given = {
        PER_CHUNK: parallel.num_layers_per_virtual_pipeline_stage,
        CHUNKS: parallel.num_virtual_stages_per_pipeline_rank,
        LAYOUT: parallel.pipeline_model_parallel_layout,
    }
    told = [f'{flag} "{value}"' if flag == LAYOUT else f"{flag} {value}" for flag, value in given.items() if value]
    if len(told) > 1:
        raise PlacementError(" with ".join(told), "each says by itself how many virtual stages a rank has; keep one")
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        return _chunks_of_layers(parallel, layers)
    if parallel.pipeline_model_parallel_layout is not None:
        return _chunks_of_layout(parallel)
    return parallel.num_virtual_stages_per_pipeline_rank


def stage_layers_of(config: RunConfig, shape: PipelineShape) -> tuple[range, ...]:
    """The global layer numbers of every stage, in the order of ``shape.flow.places``.

    Raises:
        PlacementError: the layers cannot be placed as the flags say.
    """
    return place_layers(config.model.num_layers, shape.flow, layer_split(config))


def layer_split(config: RunConfig) -> LayerSplit:
    """The split that the flags ask for."""
    parallel = config.parallel
    return LayerSplit(
        first=parallel.decoder_first_pipeline_num_layers,
        last=parallel.decoder_last_pipeline_num_layers,
        count_embedding=parallel.account_for_embedding_in_pipeline_split,
        count_loss=parallel.account_for_loss_in_pipeline_split,
        layout=parallel.pipeline_model_parallel_layout,
        costs=_costs(config) if parallel.pipeline_split == "auto" else None,
    )


def _costs(config: RunConfig) -> LayerCosts:
    assert config.model.vocab_size is not None, "the vocabulary is filled in before layers are placed by cost"
    parts = part_costs(config.model, seq_length=config.data.seq_length, vocab_size=config.model.vocab_size)
    return LayerCosts(parts.layers, embedding=parts.embedding, output=parts.output)


def _chunks_of_layers(parallel: ParallelConfig, layers: int) -> int:
    """Chunks per rank from the layers of one chunk; what is counted as a layer is one here too."""
    per_chunk, ranks = parallel.num_layers_per_virtual_pipeline_stage, parallel.pipeline_model_parallel_size
    assert per_chunk is not None
    own = {
        "--decoder-first-pipeline-num-layers": parallel.decoder_first_pipeline_num_layers is not None,
        "--decoder-last-pipeline-num-layers": parallel.decoder_last_pipeline_num_layers is not None,
        "--pipeline-split auto": parallel.pipeline_split == "auto",
    }
    uneven = [flag for flag, is_given in own.items() if is_given]
    if uneven:
        raise PlacementError(
            f"{PER_CHUNK} {per_chunk} with {', '.join(uneven)}",
            f"it makes all virtual stages equal; give {CHUNKS} instead",
        )
    counted = parallel.account_for_embedding_in_pipeline_split + parallel.account_for_loss_in_pipeline_split
    total = layers + counted
    if total % (ranks * per_chunk) == 0:
        return total // (ranks * per_chunk)
    extra = f" + {counted} counted" if counted else ""
    raise PlacementError(
        f"{PER_CHUNK} {per_chunk} with --num-layers {layers}{extra} over {PP} {ranks}",
        f"{total} layers are no whole number of virtual stages of {per_chunk} layers on each of {ranks} ranks, "
        "no layer is dropped",
        _nearest_per_chunk(total, counted, ranks=ranks, per_chunk=per_chunk),
    )


def _nearest_per_chunk(total: int, counted: int, *, ranks: int, per_chunk: int) -> str:
    unit = ranks * per_chunk
    layers = _around(total, lambda n: n > counted and n % unit == 0, highest=total + unit)
    found = ["--num-layers " + " or ".join(str(n - counted) for n in layers)]
    legal = _around(per_chunk, lambda n: total % (ranks * n) == 0, highest=total)
    if legal:
        found.append(f"{PER_CHUNK} " + " or ".join(map(str, legal)))
    sizes = _around(ranks, lambda n: total % (n * per_chunk) == 0, highest=total)
    if sizes:
        found.append(f"{PP} " + " or ".join(map(str, sizes)))
    return "; ".join(found)


def _chunks_of_layout(parallel: ParallelConfig) -> int:
    text, ranks = parallel.pipeline_model_parallel_layout, parallel.pipeline_model_parallel_size
    assert text is not None
    try:
        stages = len(stage_sizes(text))
    except ValueError as error:
        raise PlacementError(f'{LAYOUT} "{text}"', str(error)) from None
    if stages % ranks == 0:
        return stages // ranks
    below, above = stages // ranks * ranks, (stages // ranks + 1) * ranks
    counts = " or ".join(str(count) for count in (below, above) if count)
    sizes = " or ".join(str(n) for n in _around(ranks, lambda n: stages % n == 0, highest=stages))
    raise PlacementError(
        f'{LAYOUT} "{text}" over {PP} {ranks}',
        f"its {stages} stages are no whole number for each of {ranks} ranks",
        f"{counts} stages; {PP} {sizes}",
    )


def _around(number: int, is_legal: Callable[[int], bool], *, highest: int) -> list[int]:
    """The nearest legal positive numbers below and above ``number``, where there are some."""
    below = [n for n in range(1, min(number, highest + 1)) if is_legal(n)][-1:]
    above = [n for n in range(number + 1, highest + 1) if is_legal(n)][:1]
    return below + above
