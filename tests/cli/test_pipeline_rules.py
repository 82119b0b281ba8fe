"""The pipeline's shape from flags: what the flags mean, and what is refused before any rank starts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mcore_cli.pipeline import pipeline_shape, requested_chunks, schedules_of, stage_layers_of
from mcore_cli.rules.check import find_problems
from mcore_cli.rules.pipeline import pipeline_rules
from mcore_parallel.pipeline.compile import compile_forward, compile_schedule

PP, CHUNKS = "pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"
PER_CHUNK, GROUP = "num_layers_per_virtual_pipeline_stage", "microbatch_group_size_per_virtual_pipeline_stage"
LAYOUT, FIRST, LAST = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
)
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
SCHEDULE, TABLE = "pipeline_schedule", "pipeline_schedule_table"
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

# rule, fields that break it (8 layers, global batch 16 of micro-batches of 2), words of the message, repair
CASES: list[tuple[str, dict[str, Any], list[str], dict[str, Any]]] = [
    (
        "pipeline-shape",
        {PP: 2, CHUNKS: 2, PER_CHUNK: 2},
        ["--num-layers-per-virtual-pipeline-stage 2 with", "keep one"],
        {PER_CHUNK: None},
    ),
    (
        "pipeline-shape",
        {PP: 2, CHUNKS: 2, LAYOUT: "Ett|tt|tt|ttL"},
        ['layout "Ett|tt|tt|ttL"', "keep one"],
        {CHUNKS: None},
    ),
    (
        "pipeline-shape",
        {PP: 2, PER_CHUNK: 3},
        ["--num-layers 8", "of 3 layers on each of 2 ranks", "6 or 12", "2 or 4"],
        {PER_CHUNK: 2},
    ),
    ("pipeline-shape", {PP: 2, PER_CHUNK: 2, FIRST: 2}, ["makes all virtual stages equal"], {FIRST: None}),
    (
        "pipeline-shape",
        {PP: 2, PER_CHUNK: 2, "pipeline_split": "auto"},
        ["--pipeline-split auto"],
        {"pipeline_split": "even"},
    ),
    (
        "pipeline-shape",
        {PP: 2, LAYOUT: "Ett|t|t*5L"},
        ["3 stages are no whole number", "2 or 4 stages"],
        {LAYOUT: "Ett|t*6L"},
    ),
    ("pipeline-shape", {PP: 2, LAYOUT: "Ett|t*6"}, ["L, the output layer", "stands 0 times"], {LAYOUT: "Ett|t*6L"}),
    (
        "virtual-stages-alone",
        {CHUNKS: 2},
        ["no effect with one rank", "nearest: --pipeline-model-parallel-size 2"],
        {CHUNKS: None},
    ),
    (
        "virtual-stages-alone",
        {PER_CHUNK: 8},
        ["--num-layers-per-virtual-pipeline-stage 8", "no effect"],
        {PER_CHUNK: None},
    ),
    (
        "layers-per-stage",
        {PP: 4, "num_layers": 10},
        [
            "--num-layers 10",
            "8 or 12",
            "2 or 5",
            '"Ett|tt|(ttt|)*1'.replace("(ttt|)*1", "ttt|tttL"),
            "--pipeline-split auto",
        ],
        {"pipeline_split": "auto"},
    ),
    (
        "layers-per-stage",
        {PP: 4, "num_layers": 10, LAST: 2},
        ["must share the remaining 8 layers", "1 or 4"],
        {LAST: 1},
    ),
    (
        "layers-per-stage",
        {LAST: 1},
        ["one rank holds all 8 layers", "nearest: --decoder-last-pipeline-num-layers 8"],
        {LAST: 8},
    ),
    ("layers-per-stage", {PP: 2, FIRST: 7, LAST: 2}, ["together the two ranks must hold all 8 layers"], {LAST: 1}),
    ("layers-per-stage", {PP: 2, FIRST: 3, LOSS: True}, ["each says by itself", "--account-for-loss"], {LOSS: False}),
    ("layers-per-stage", {PP: 2, EMBEDDING: True}, ["8 layers and 1 more", "7 or 9"], {LOSS: True}),
    ("layers-per-stage", {PP: 2, LAYOUT: "Ett|t*7L"}, ["places 9 layers, not 8", '"Et*4|t*4L"'], {"num_layers": 9}),
    (
        "no-effect",
        {LOSS: True},
        ["--account-for-loss-in-pipeline-split with", "one rank holds every layer"],
        {LOSS: False},
    ),
    ("no-effect", {"pipeline_split": "auto"}, ["--pipeline-split auto with"], {"pipeline_split": "even"}),
    (
        "no-effect",
        {PP: 2, GROUP: 2},
        ["--microbatch-group-size-per-virtual-pipeline-stage 2", "in groups"],
        {GROUP: None},
    ),
    (
        "no-effect",
        {PP: 2, CHUNKS: 2, SCHEDULE: "looped-bfs", GROUP: 2},
        ["looped-bfs (2 virtual stages per rank", "in groups"],
        {SCHEDULE: "1f1b"},
    ),
    (
        "schedule-chunks",
        {PP: 2, SCHEDULE: "zbv", CHUNKS: 4},
        ["zbv needs exactly 2 model chunks per rank, got 4", "nearest: --num-virtual-stages-per-pipeline-rank 2"],
        {CHUNKS: None},
    ),
    (
        "schedule-chunks",
        {PP: 2, SCHEDULE: "dualpipev", PER_CHUNK: 4},
        ["got 1", "(--num-layers-per-virtual-pipeline-stage 4)"],
        {PER_CHUNK: 2},
    ),
    (
        "schedule-chunks",
        {PP: 2, SCHEDULE: "gpipe", CHUNKS: 2},
        ["gpipe needs exactly 1 model chunk per rank, got 2"],
        {SCHEDULE: "looped-bfs"},
    ),
    (
        "schedule-chunks",
        {PP: 2, SCHEDULE: "interleaved"},
        ["1 or more virtual stages per rank, and none are asked for", "give --num-virtual-stages-per-pipeline-rank"],
        {CHUNKS: 2},
    ),
    (
        "virtual-stages-alone",
        {SCHEDULE: "zbv"},
        ["2 virtual stages per rank with --pipeline-model-parallel-size 1"],
        {SCHEDULE: "zb-h1"},
    ),
    (
        "pipeline-schedule",
        {PP: 4, SCHEDULE: "dualpipev", "global_batch_size": 6},
        ["= 3 micro-batches", "nearest: --global-batch-size 16", "or 1f1b or zb-h1 or zb-h2 or zbv"],
        {"global_batch_size": 16},
    ),
    (
        "pipeline-schedule",
        {PP: 4, CHUNKS: 2, GROUP: 3},
        ["--microbatch-group-size-per-virtual-pipeline-stage 3", "nearest group size that works: 4"],
        {GROUP: 4},
    ),
    (
        "pipeline-schedule",
        {PP: 2, SCHEDULE: "table"},
        ["name one with --pipeline-schedule-table"],
        {SCHEDULE: "1f1b"},
    ),
    (
        "pipeline-shape",
        {PP: 2, SCHEDULE: "zb-h1", TABLE: "t.csv"},
        ["--pipeline-schedule zb-h1 with --pipeline-schedule-table t.csv", "keep one"],
        {TABLE: None},
    ),
    ("pipeline-shape", {PP: 2, TABLE: "no.csv"}, ["--pipeline-schedule-table no.csv", "cannot be read"], {TABLE: None}),
    (
        "recompute-layers",
        {**FULL, PP: 4, FIRST: 2, LAST: 2, "recompute_num_layers": 3},
        ["3 with 2 layers"],
        {"recompute_num_layers": 2},
    ),
]


@pytest.mark.parametrize(("rule", "broken", "words", "repair"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_rule(rule, broken, words, repair, small, manager, known_flags, flags_in) -> None:
    ranks = broken.get(PP, 1)
    problems = find_problems(small(ranks, **broken), ranks, manager)
    told = [problem for problem in problems if problem.startswith(f"[{rule}] ")]
    assert len(told) == 1, problems
    assert [word for word in words if word not in told[0]] == []
    assert flags_in(told[0]) <= known_flags
    assert find_problems(small(ranks, **{**broken, **repair}), ranks, manager) == []


@pytest.mark.parametrize("purpose", ["verify", "eval"])
def test_layers_are_placed_for_every_purpose(purpose, small, manager) -> None:
    assert find_problems(small(4, num_layers=10, **{PP: 4}), 4, manager, purpose) != []
    assert find_problems(small(4, num_layers=10, pipeline_split="auto", **{PP: 4}), 4, manager, purpose) == []


def write_table(folder: Any, *rows: str) -> str:
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    return "table.csv"


def test_a_table_is_proven_before_the_run(small, manager, tmp_path) -> None:
    config = small(
        2, global_batch_size=4, **{PP: 2, TABLE: write_table(tmp_path, "0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1")}
    )
    assert find_problems(config, 2, manager) == []
    assert pipeline_shape(config, schedules_of(manager)).spec.name == "table"
    told = find_problems(small(2, **{PP: 2, TABLE: "table.csv"}), 2, manager)
    assert len(told) == 1
    assert "plans 2 ranks, 2 micro-batches and 1 model chunks per rank, got 2, 8 and 1" in told[0]
    assert "nearest: --global-batch-size 4;" in told[0]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["0F0,0F1,0B0,0B1", "1F0,1B0,1B1,1F1"], ["rank 1", "B1"]),
        (["0F0,0F1,0B0,0B1", "1F0,1B0,1F1"], ["rank", "B1"]),
    ],
)
def test_a_broken_table_says_where(rows, words, small, manager, tmp_path) -> None:
    config = small(2, global_batch_size=4, **{PP: 2, TABLE: write_table(tmp_path, *rows)})
    told = find_problems(config, 2, manager)
    assert len(told) == 1
    assert told[0].startswith("[pipeline-schedule] ")
    assert [word for word in words if word not in told[0]] == []
    assert "use another --pipeline-schedule" in told[0]


def test_virtual_stages_make_1f1b_interleaved(small, manager) -> None:
    schedules = schedules_of(manager)
    for fields in ({CHUNKS: 2}, {PER_CHUNK: 2}, {LAYOUT: "Et|tt|tt|tttL"}, {CHUNKS: 2, SCHEDULE: "1F1B"}):
        shape = pipeline_shape(small(2, **{PP: 2, **fields}), schedules)
        assert (shape.spec.name, shape.num_chunks, shape.num_ranks) == ("interleaved", 2, 2)
    assert pipeline_shape(small(2, **{PP: 2, CHUNKS: 1}), schedules).spec.name == "1f1b"
    assert pipeline_shape(small(2, **{PP: 2, SCHEDULE: "zbv"}), schedules).num_chunks == 2
    bound = pipeline_shape(small(2, **{PP: 2, CHUNKS: 2, GROUP: 4}), schedules).spec.bound
    assert dict(bound) == {"group_size": 4}


@pytest.mark.parametrize("vpp", [None, 2])
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8])
def test_few_micro_batches_run_or_are_refused(count: int, pp: int, vpp: int | None, small, manager) -> None:
    """Whatever the rules let pass has a proven plan, for training and for evaluation; what they refuse they help."""
    for spec in schedules_of(manager):
        if spec.configure is not None:
            continue
        fields = {PP: pp, CHUNKS: vpp, SCHEDULE: spec.name, "global_batch_size": 2 * count}
        config = small(pp, **fields)
        told = find_problems(config, pp, manager)
        shape = pipeline_shape(config, schedules_of(manager))
        sizes = {"num_ranks": pp, "num_micro_batches": count, "num_chunks": shape.num_chunks}
        if told:
            assert len(told) == 1
            assert told[0].startswith(("[pipeline-schedule] ", "[schedule-chunks] "))
            assert "nearest: " in told[0]
        else:
            assert compile_schedule(shape.spec, **sizes).num_micro_batches == count
        if not told or told[0].startswith("[pipeline-schedule] "):
            assert find_problems(config, pp, manager, "eval") == []
            assert compile_forward(shape.spec, **sizes).num_micro_batches == count


def sizes(config: Any, manager: Any) -> list[int]:
    return [len(layers) for layers in stage_layers_of(config, pipeline_shape(config, schedules_of(manager)))]


def test_flags_place_layers(small, manager) -> None:
    assert sizes(small(2, **{PP: 2}), manager) == [4, 4]
    assert sizes(small(4, **{PP: 4, FIRST: 1, LAST: 1}), manager) == [1, 3, 3, 1]
    assert sizes(small(2, **{PP: 2, EMBEDDING: True, LOSS: True}), manager) == [4, 4]
    assert sizes(small(2, num_layers=7, **{PP: 2, LOSS: True}), manager) == [4, 3]
    assert sizes(small(2, **{PP: 2, LAYOUT: "Et*5|tttL"}), manager) == [5, 3]


def test_auto_gives_the_stage_with_a_dear_output_layer_fewer_layers(small, manager) -> None:
    config = small(4, pipeline_split="auto", vocab_size=4096, **{PP: 4})
    placed = sizes(config, manager)
    assert sum(placed) == 8
    assert placed[-1] < min(placed[:-1])
    assert sizes(small(4, pipeline_split="auto", vocab_size=8, **{PP: 4}), manager) == [2, 2, 2, 2]
    with pytest.raises(AssertionError):
        sizes(small(4, pipeline_split="auto", **{PP: 4}), manager)


def test_chunks_follow_from_any_of_three_flags(small) -> None:
    assert requested_chunks(small(2, **{PP: 2})) is None
    assert requested_chunks(small(2, **{PP: 2, CHUNKS: 3})) == 3
    assert requested_chunks(small(2, **{PP: 2, PER_CHUNK: 2})) == 2
    assert requested_chunks(small(2, num_layers=7, **{PP: 2, PER_CHUNK: 2, LOSS: True})) == 2
    assert requested_chunks(small(2, **{PP: 2, LAYOUT: "Et|tt|tt|tttL"})) == 2
    assert requested_chunks(small(2, num_layers=4, **{PP: 2, PER_CHUNK: 2})) == 1


def test_every_refused_chunk_size_names_sizes_that_work(small, manager) -> None:
    """80 layers on 16 ranks in chunks of 2: a floor division would train 64 of them."""
    told = find_problems(small(16, num_layers=80, global_batch_size=32, **{PP: 16, PER_CHUNK: 2}), 16, manager)
    assert len(told) == 1
    assert "80 layers are no whole number of virtual stages of 2 layers on each of 16 ranks" in told[0]
    found = re.search(
        r"nearest: --num-layers (\d+) or (\d+); --num-layers-per-virtual-pipeline-stage (\d+) or", told[0]
    )
    assert found is not None
    assert [int(number) % 32 for number in found.groups()[:2]] == [0, 0]
    assert 80 % (16 * int(found[3])) == 0


def test_every_rule_is_tested(manager) -> None:
    assert {rule.name for rule in pipeline_rules(manager)} <= {case[0] for case in CASES}
