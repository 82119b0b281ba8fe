"""A schedule read from a table, CSV or YAML: one row per rank, one cell per pass. No torch.

A cell is ``<stage><pass><micro-batch>``: ``0F3`` is stage 0's forward of micro-batch 3. Passes are ``F``, ``B`` (whole
backward), ``I`` (input gradient) and ``W`` (weight gradient); stages count in model order from 0. Rows stand in the
order of the ranks; empty cells and, in CSV, lines that start with ``#`` are skipped. A rank holds the stages that its
row names, its chunks in their order, so any placement can be written: looped, a V, or another.

CSV::

    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1

YAML holds the same as a list of rows, a row being a list of cells or one text with commas.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import yaml

from mcore_parallel.pipeline.actions import Action, Flow, Kind, Place
from mcore_parallel.specs import ScheduleSpec

_CELL = re.compile(r"(\d+)([FBIW])(\d+)")


class TableError(ValueError):
    """A table cannot be read; the text names file, line, cell and reason."""


class Cell(NamedTuple):
    """One pass of the table and where it stands: line and, within its row, cell; both from 1."""

    stage: int
    kind: Kind
    micro_batch: int
    line: int
    column: int


@dataclass(frozen=True)
class Table:
    """A whole schedule as it was read."""

    path: str
    actions: tuple[tuple[Action, ...], ...]
    flow: Flow
    num_micro_batches: int

    def legal(self, num_ranks: int, num_micro_batches: int, num_chunks: int) -> str | None:
        """Why the table cannot run these sizes: it plans one case alone."""
        flow, given = self.flow, (num_ranks, num_micro_batches, num_chunks)
        if given == (flow.num_ranks, self.num_micro_batches, flow.num_chunks):
            return None
        return (
            f"the table {self.path} plans {flow.num_ranks} ranks, {self.num_micro_batches} micro-batches and "
            f"{flow.num_chunks} model chunks per rank, got {num_ranks}, {num_micro_batches} and {num_chunks}"
        )

    def _flow_of(self, num_ranks: int, num_chunks: int) -> Flow:
        if (num_ranks, num_chunks) != (self.flow.num_ranks, self.flow.num_chunks):
            raise ValueError(self.legal(num_ranks, self.num_micro_batches, num_chunks))
        return self.flow

    def spec(self) -> ScheduleSpec:
        """The schedule that runs this table."""
        chunks = self.flow.num_chunks
        return ScheduleSpec(
            "table",
            plan=lambda num_ranks, num_micro_batches, num_chunks=chunks: [list(actions) for actions in self.actions],
            min_chunks=chunks,
            max_chunks=chunks,
            flow=self._flow_of,
            legal=lambda num_ranks, num_micro_batches, num_chunks=chunks: self.legal(
                num_ranks, num_micro_batches, num_chunks
            ),
            splits_backward=any(action.kind is Kind.INPUT_GRAD for actions in self.actions for action in actions),
            summary=f"the table {self.path}",
        )


def configure(*, table: str | Path) -> ScheduleSpec:
    """The schedule in the file ``table``.

    Raises:
        TableError: see :func:`read_table`.
    """
    return read_table(table).spec()


def unconfigured_plan(num_ranks: int, num_micro_batches: int, *, num_chunks: int) -> list[list[Action]]:
    """What the schedule plans without a table: nothing.

    Raises:
        ValueError: always.
    """
    raise ValueError(unconfigured_legal(num_ranks, num_micro_batches, num_chunks=num_chunks))


def unconfigured_legal(num_ranks: int, num_micro_batches: int, *, num_chunks: int) -> str:
    """Why the schedule cannot run without a table."""
    return (
        f"the schedule 'table' needs a file to read the passes of {num_ranks} ranks and {num_micro_batches} "
        "micro-batches from; name one with --pipeline-schedule-table"
    )


def read_table(path: str | Path) -> Table:
    """Read a ``.csv``, ``.yaml`` or ``.yml`` file.

    Whether the schedule is complete and can run is for :func:`mcore_parallel.pipeline.verify.verify` to say.

    Raises:
        TableError: the file cannot be read, a cell is not a pass, a stage is missing or stands in two rows, or ranks
            hold different numbers of stages.
    """
    path = Path(path)
    readers = {".csv": _read_csv, ".yaml": _read_yaml, ".yml": _read_yaml}
    if path.suffix.lower() not in readers:
        raise TableError(f"{path}: a schedule table is a .csv, .yaml or .yml file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: cannot be read: {error}") from error
    rows = [[_parse(path, *cell) for cell in row] for row in readers[path.suffix.lower()](path, text)]
    if not any(rows):
        raise TableError(f"{path}: holds no passes")
    flow = _flow(path, rows)
    actions = tuple(
        tuple(Action(cell.kind, cell.micro_batch, _chunk(flow, cell.stage)) for cell in row) for row in rows
    )
    return Table(str(path), actions, flow, 1 + max(cell.micro_batch for row in rows for cell in row))


Raw = tuple[str, int, int]
"""Text, line and cell number of a cell."""


def _read_csv(path: Path, text: str) -> Iterator[list[Raw]]:
    reader = csv.reader(text.splitlines())
    for row in reader:
        if row and not row[0].lstrip().startswith("#"):
            yield [(cell.strip(), reader.line_num, column) for column, cell in enumerate(row, 1) if cell.strip()]


def _read_yaml(path: Path, text: str) -> Iterator[list[Raw]]:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise TableError(f"{path}: not YAML: {error}") from error
    if not isinstance(root, yaml.SequenceNode):
        raise TableError(f"{path}: a YAML table is a list with one row per rank")
    for row in root.value:
        line = row.start_mark.line + 1
        if isinstance(row, yaml.ScalarNode):
            cells = [(cell.strip(), line, column) for column, cell in enumerate(row.value.split(","), 1)]
        elif isinstance(row, yaml.SequenceNode) and all(isinstance(cell, yaml.ScalarNode) for cell in row.value):
            cells = [(cell.value, cell.start_mark.line + 1, column) for column, cell in enumerate(row.value, 1)]
        else:
            raise TableError(f"{path}:{line}: a row is a list of cells or one text with commas")
        yield [cell for cell in cells if cell[0]]


def _parse(path: Path, text: str, line: int, column: int) -> Cell:
    match = _CELL.fullmatch(text)
    if match is None:
        raise TableError(
            f"{path}:{line}, cell {column}: {text!r} is no pass; write <stage><F, B, I or W><micro-batch>, as 0F3"
        )
    return Cell(int(match[1]), Kind(match[2]), int(match[3]), line, column)


def _flow(path: Path, rows: list[list[Cell]]) -> Flow:
    owner: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for cell in row:
            if owner.setdefault(cell.stage, rank) != rank:
                raise TableError(
                    f"{path}:{cell.line}, cell {cell.column}: stage {cell.stage} is in the row of rank {rank}, "
                    f"and before that of rank {owner[cell.stage]}; a stage lives on one rank"
                )
    missing = next((stage for stage in range(len(owner)) if stage not in owner), None)
    if missing is not None:
        raise TableError(f"{path}: stage {missing} is missing, although stage {max(owner)} is there")
    held = [[stage for stage in sorted(owner) if owner[stage] == rank] for rank in range(len(rows))]
    if len({len(stages) for stages in held}) > 1:
        counts = ", ".join(str(len(stages)) for stages in held)
        raise TableError(f"{path}: every rank must hold as many stages as the others, the rows name {counts}")
    return Flow(tuple(Place(owner[stage], held[owner[stage]].index(stage)) for stage in sorted(owner)))


def _chunk(flow: Flow, stage: int) -> int:
    return flow.places[stage].chunk
