"""Schedules read from CSV and YAML: what they say, and errors that name the cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_parallel.pipeline.actions import Place, ScheduleError, v_flow
from mcore_parallel.pipeline.compile import compile_forward, compile_schedule
from mcore_parallel.pipeline.schedules.table import TableError, read_table
from mcore_parallel.pipeline.verify import verify
from mcore_parallel.plugins import Registry, plugin_manager
from mcore_parallel.testing.conformance import ScheduleConformance

SCHEDULES = Registry("schedule", plugin_manager().collect("mcore_pipeline_schedules"))


def write(folder: Path, text: str, name: str = "plan.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def as_table(name: str, p: int, m: int, v: int) -> str:
    """A shipped schedule in the format of a table."""
    flow = SCHEDULES[name].flow(p, v)
    rows = SCHEDULES[name].actions(p, m, v)
    return "\n".join(
        ",".join(f"{flow.stages[Place(rank, a.chunk)]}{a.kind.value}{a.micro_batch}" for a in row)
        for rank, row in enumerate(rows)
    )


@pytest.mark.parametrize(("name", "v"), [("1f1b", 1), ("zb-h2", 1), ("interleaved", 3), ("zbv", 2), ("dualpipev", 2)])
def test_a_table_of_a_shipped_schedule_is_that_schedule(name: str, v: int, tmp_path: Path) -> None:
    sizes = {"num_ranks": 2, "num_micro_batches": 4}
    spec = SCHEDULES["table"].with_options(table=write(tmp_path, as_table(name, 2, 4, v)))
    plan = compile_schedule(spec, **sizes)
    assert plan == compile_schedule(SCHEDULES[name], **sizes, num_chunks=v)
    assert spec.splits_backward == (name in ("zb-h2", "zbv", "dualpipev"))
    assert (spec.min_chunks, spec.max_chunks) == (v, v)
    assert verify(compile_forward(spec, **sizes)).peak_live == (1, 1)


def test_csv_and_yaml_say_the_same(tmp_path: Path) -> None:
    comma = read_table(write(tmp_path, "# two ranks\n0F0, 0F1,,0B0,0B1\n\n1F0,1B0,1F1,1B1\n"))
    listed = read_table(write(tmp_path, "- [0F0, 0F1, 0B0, 0B1]\n- [1F0, 1B0, 1F1, 1B1]\n", "a.yaml"))
    texts = read_table(write(tmp_path, "- 0F0, 0F1, , 0B0, 0B1\n- 1F0,1B0,1F1,1B1\n", "b.yml"))
    assert comma.actions == listed.actions == texts.actions
    assert (comma.num_micro_batches, comma.flow.num_ranks, comma.flow.num_chunks) == (2, 2, 1)


def test_rows_decide_where_stages_live(tmp_path: Path) -> None:
    down_and_back = "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n"
    assert read_table(write(tmp_path, down_and_back)).flow == v_flow(2)
    other = read_table(write(tmp_path, "1F0,2F0,2B0,1B0\n0F0,3F0,3B0,0B0\n"))
    assert other.flow.places == (Place(1, 0), Place(0, 0), Place(0, 1), Place(1, 1))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("0F0,0X0\n", r"plan.csv:1, cell 2: '0X0' is no pass; write <stage>"),
        ("# first\n\n0F0\n1F0,1B0,banana\n", r"plan.csv:4, cell 3: 'banana' is no pass"),
        ("0F0,0B0\n0F1,0B1\n", r"plan.csv:2, cell 1: stage 0 is in the row of rank 1, and before that of rank 0"),
        ("0F0,0B0\n2F0,2B0\n", r"plan.csv: stage 1 is missing, although stage 2 is there"),
        ("0F0,0B0,2F0,2B0\n1F0,1B0\n", r"plan.csv: every rank must hold as many stages as the others.*2, 1"),
        ("# nothing\n", r"plan.csv: holds no passes"),
    ],
)
def test_errors_name_the_cell(text: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(TableError, match=error):
        read_table(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("- [0F0,\n   0Q0]\n", r"plan.yaml:2, cell 2: '0Q0' is no pass"),
        ("- 0F0, 0B0\n- {a: b}\n", r"plan.yaml:2: a row is a list of cells"),
        ("rank: 0F0\n", r"plan.yaml: a YAML table is a list"),
        ("- [0F0\n", r"plan.yaml: not YAML"),
    ],
)
def test_yaml_errors_name_the_cell(text: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(TableError, match=error):
        read_table(write(tmp_path, text, "plan.yaml"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"plan.txt: a schedule table is a .csv, .yaml or .yml file"):
        read_table(tmp_path / "plan.txt")
    with pytest.raises(TableError, match="none.csv: cannot be read"):
        read_table(tmp_path / "none.csv")


def test_a_wrong_order_is_for_the_verifier_to_find(tmp_path: Path) -> None:
    spec = SCHEDULES["table"].with_options(table=write(tmp_path, "0F0,0B0\n1F0\n"))
    with pytest.raises(ScheduleError, match="rank 0, position 1, B0: waits for B0 of rank 1, which never comes"):
        compile_schedule(spec, num_ranks=2, num_micro_batches=1)


def test_a_table_plans_one_case_alone(tmp_path: Path) -> None:
    path = write(tmp_path, "0F0,0B0\n1F0,1B0\n")
    spec = SCHEDULES["table"].with_options(table=path)
    text = f"the table {path} plans 2 ranks, 1 micro-batches and 1 model chunks per rank, got 4, 1 and 1"
    assert spec.why_illegal(4, 1) == text
    assert spec.why_illegal(2, 1) is None
    with pytest.raises(ValueError, match="plans 2 ranks.*got 3, 1 and 1"):
        compile_forward(spec, num_ranks=3, num_micro_batches=1)


def test_without_a_file_it_says_how_to_name_one() -> None:
    with pytest.raises(ValueError, match="needs a file.*name one with --pipeline-schedule-table"):
        compile_schedule(SCHEDULES["table"], num_ranks=2, num_micro_batches=1)


class TestTableConforms(ScheduleConformance):
    """A table of DualPipeV on two ranks and five micro-batches."""

    @pytest.fixture(autouse=True)
    def _table(self, tmp_path: Path) -> None:
        path = write(tmp_path, as_table("dualpipev", 2, 5, 2))
        self.spec = SCHEDULES["table"].with_options(table=path)  # type: ignore[misc]
