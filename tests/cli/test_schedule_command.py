"""``mcore schedule``: schedules on paper."""

from __future__ import annotations

import re

import pytest

from mcore_cli.commands.schedule import read_times
from mcore_cli.compare import Case, compare
from mcore_cli.errors import UserError
from mcore_cli.pipeline import schedules_of

CASE = ("--pp", "4", "--micro-batches", "8")


def table(text: str) -> dict[str, list[str]]:
    """Rows of a printed table by their first column."""
    return {line.split()[0]: re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.strip()}


def test_every_schedule_is_listed(mcore, manager) -> None:
    outcome = mcore("schedule", "list")
    assert outcome.code == 0
    heads = [line.split(":")[0] for line in outcome.out.splitlines() if not line.startswith(" ")]
    assert heads == schedules_of(manager).names()
    assert "    model chunks per rank: 2\n    bubble: " in outcome.out.split("zbv: ")[1]


def test_compare_gives_the_closed_forms(mcore) -> None:
    rows = table(mcore("schedule", "compare", *CASE).out)
    assert rows["1f1b"][1:5] == ["1", "33", "27.3%", "27.3%"]
    assert rows["gpipe-example"][1:5] == ["1", "33", "27.3%", "27.3%"]
    assert (rows["1f1b"][5], rows["gpipe-example"][5]) == ("4", "8")
    assert rows["interleaved"][3] == f"{100 * 3 / (2 * 8 + 3):.1f}%"


def test_compare_orders_schedules_by_time_on_equal_work(manager) -> None:
    rows, _ = compare(schedules_of(manager), Case(4, 8, num_chunks=2))
    times = {row.name: row.makespan for row in rows}
    assert [row.makespan for row in rows] == sorted(times.values())
    assert times["zbv"] < times["zb-h1"] < times["interleaved"] < times["1f1b"] == times["gpipe"]
    # Equal work: what is left when the bubble is taken off is the same under every schedule.
    assert {round(row.makespan * (1 - row.bubble_makespan), 9) for row in rows} == {24.0}


def test_compare_says_why_not(mcore) -> None:
    outcome = mcore("schedule", "compare", "--pp", "4", "--micro-batches", "3", "--vpp", "3")
    assert outcome.code == 0
    assert "not zbv: zbv needs exactly 2 model chunks per rank, got 3" in outcome.out
    assert "not dualpipev: " in outcome.out
    assert "zbv" not in table(outcome.out.split("4 ranks")[0])


def test_times_and_latency_count(mcore) -> None:
    slow = table(mcore("schedule", "compare", *CASE, "--times", "2,2,2").out)
    assert slow["1f1b"][2] == "66"
    far = table(mcore("schedule", "compare", *CASE, "--latency", "1").out)
    assert float(far["1f1b"][2]) > 33


@pytest.mark.parametrize("text", ["1,2", "1,2,3,4", "a,b,c", "-1,1,1", "nan,1,1", "inf,1,1", "0,0,0", ""])
def test_bad_times_are_told(text: str) -> None:
    with pytest.raises(UserError, match="must be three numbers"):
        read_times(text)


def test_times_are_numbers() -> None:
    assert read_times("1, 2.5,0") == (1.0, 2.5, 0.0)


def test_show_draws_a_timeline(mcore) -> None:
    outcome = mcore("schedule", "show", "1f1b", "--pp", "2", "--micro-batches", "2", "--times", "1,0.5,0.5")
    assert outcome.code == 0
    first, second, figures = outcome.out.splitlines()
    assert re.sub(r"[-.]", "", first) == "rank 0 F0F1B0B1"
    assert re.sub(r"[-.]", "", second) == "rank 1 F0B0F1B1"
    assert "makespan 6, bubble 33.3% of the makespan" in figures


@pytest.mark.parametrize("name", ["ZBV", "zbv"])
def test_show_writes_pictures(name: str, mcore, tmp_path) -> None:
    outcome = mcore("schedule", "show", name, *CASE, "--out", "zbv.svg")
    assert outcome.code == 0
    assert outcome.out.endswith("wrote zbv.svg\n")
    svg = (tmp_path / "zbv.svg").read_text()
    assert "zbv: 4 ranks, 8 micro-batches, 2 chunks per rank" in svg
    assert svg.count("<title>rank 3: forward, chunk 1") == 8
    mcore("schedule", "show", name, *CASE, "--out", "zbv.PNG")
    assert (tmp_path / "zbv.PNG").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ["needs NAME", "--table FILE"]),
        (("1f1b",), ["--pp is missing", "--micro-batches is missing"]),
        (("2f2b", *CASE), ["unknown pipeline schedule '2f2b'"]),
        (("zbv", *CASE, "--vpp", "3"), ["exactly 2 model chunks per rank, got 3"]),
        (("dualpipev", "--pp", "4", "--micro-batches", "7"), ["8"]),
        (("interleaved", *CASE, "--group-size", "3"), ["nearest group size that works: 4"]),
        (("1f1b", *CASE, "--group-size", "4"), ["1f1b takes no group_size"]),
        (("1f1b", *CASE, "--vpp", "2"), ["exactly 1 model chunk per rank, got 2"]),
        (("1f1b", *CASE, "--out", "picture.jpg"), ["--out picture.jpg", ".svg or .png"]),
        (("1f1b", *CASE, "--out", "nowhere/picture.svg"), ["nowhere/picture.svg", "No such file"]),
        (("1f1b", "--table", "t.csv"), ["keep one"]),
        (("--table", "t.csv"), ["t.csv: cannot be read"]),
        (("1f1b", "--pp", "0", "--micro-batches", "8"), ["0 is not in the range"]),
    ],
)
def test_show_tells_mistakes(arguments: tuple[str, ...], words: list[str], mcore) -> None:
    outcome = mcore("schedule", "show", *arguments)
    assert outcome.code == 2
    assert [word for word in words if word not in outcome.err] == []
    assert "Traceback" not in outcome.err


def test_show_reads_tables(mcore, tmp_path) -> None:
    (tmp_path / "t.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    outcome = mcore("schedule", "show", "--table", "t.csv")
    assert outcome.code == 0
    assert "makespan 9" in outcome.out
    refused = mcore("schedule", "show", "--table", "t.csv", "--pp", "3")
    assert refused.code == 2
    assert "plans 2 ranks" in refused.err
