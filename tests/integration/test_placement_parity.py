"""However layers are split over stages, the answer is that of one rank; stages without layers included."""

from __future__ import annotations

import pytest
import tiny

from mcore_parallel.testing import run_ranks
from mcore_parallel.testing.parity import BOUND_FLOAT64

FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
LAYOUT, CHUNKS, SCHEDULE = (
    "pipeline_model_parallel_layout",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_schedule",
)
PER_CHUNK = "num_layers_per_virtual_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
TABLE = """\
0F0,0F1,1F0,1F1,1B0,0B0,1B1,0B1
2F0,3F0,3B0,2B0,2F1,3F1,3B1,2B1
"""

# pipeline ranks and the split of 10 layers
SPLITS = [
    (4, {FIRST: 1}),
    (4, {LAST: 1}),
    (4, {FIRST: 2, LAST: 2}),
    (4, {FIRST: 1, SCHEDULE: "zb-h1"}),
    (2, {FIRST: 7, LAST: 3}),
    (2, {FIRST: 4, LAST: 6, CHUNKS: 2}),
    (4, {EMBEDDING: True, LOSS: True}),
    (2, {EMBEDDING: True, LOSS: True, PER_CHUNK: 3}),
    (4, {"pipeline_split": "auto"}),
    (3, {"pipeline_split": "auto", SCHEDULE: "zbv"}),
    (2, {"pipeline_split": "auto", CHUNKS: 3}),
    (2, {LAYOUT: "Et*9|tL"}),
    (4, {LAYOUT: "E|t*5|t*5|L"}),
    (4, {LAYOUT: "E|t*5|t*5|L", SCHEDULE: "zb-h1"}),
    (2, {LAYOUT: "E|t*6||t*4L"}),
    (2, {LAYOUT: "E|t*6||t*4L", SCHEDULE: "zbv"}),
    (2, {LAYOUT: "Et*4||t*6|L", SCHEDULE: "dualpipev"}),
]


@pytest.mark.parametrize("case", range(len(SPLITS)), ids=[f"pp{pp}-{list(s.values())}" for pp, s in SPLITS])
def test_the_split_does_not_change_the_answer(case):
    (pp, split), tied = SPLITS[case], case % 2 == 0
    config = tiny.tiny_config(
        tiny.GPT if tied else tiny.LLAMA,
        num_layers=10,
        pipeline_model_parallel_size=pp,
        untie_embeddings_and_output_weights=not tied,
        global_batch_size=2 * pp,
        **split,
    )
    report = run_ranks(tiny.parity_job, pp, config, True, BOUND_FLOAT64, limit=100)[0]
    assert report.failures == []


def test_a_table_does_not_change_the_answer(tmp_path):
    """Stages 0 and 1 on rank 0, 2 and 3 on rank 1: no built-in flow."""
    (tmp_path / "table.csv").write_text(TABLE)
    config = tiny.tiny_config(
        tiny.LLAMA,
        pipeline_model_parallel_size=2,
        pipeline_schedule_table=str(tmp_path / "table.csv"),
        global_batch_size=2,
    )
    report = run_ranks(tiny.parity_job, 2, config, True, BOUND_FLOAT64, limit=100)[0]
    assert report.failures == []
