"""Load a checkpoint into tensors that exist already, under any layout: each rank reads the cells its boxes touch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.arrays import ArraySpec, read_cell, read_specs
from mcore_ckpt.comm import Communicator
from mcore_ckpt.errors import (
    CheckpointError,
    DtypeMismatch,
    LoadFailed,
    MissingArray,
    ShapeMismatch,
    UnexpectedArray,
)
from mcore_ckpt.grid import Box, cell_box, cells_touching, intersect
from mcore_ckpt.layout import LocalArray, dtype_name, torch_dtype
from mcore_ckpt.manifest import read_manifest

NAMES_SHOWN = 5


@dataclass(frozen=True)
class LoadReport:
    """What a load did on this rank. ``missing`` and ``unexpected`` are the keys that the caller allowed to be so.

    ``bytes_read`` counts whole cells, ``bytes_needed`` the elements of this rank's boxes.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    cells_read: int
    bytes_read: int
    bytes_needed: int


@dataclass(frozen=True)
class _Request:
    """One stored array and this rank's boxes of it."""

    spec: ArraySpec
    boxes: tuple[LocalArray, ...]


def load_checkpoint(
    path: str | Path,
    arrays: Sequence[LocalArray],
    *,
    communicator: Communicator,
    strict: bool = True,
    allow_missing: tuple[str, ...] = (),
    allow_unexpected: tuple[str, ...] = (),
    cast: bool = False,
) -> LoadReport:
    """Fill the tensors of ``arrays`` in place from the checkpoint folder ``path``; collective.

    ``allow_missing``: globs of keys that the checkpoint may lack (their tensors stay as they are).
    ``allow_unexpected``: globs of keys that it may hold although no rank asks for them, e.g. ``"optimizer/*"``.
    ``strict=False`` allows both for all keys. ``cast``: convert between floating-point dtypes where they differ.
    After an error the tensors hold a mixture and must not be used.

    Raises:
        IncompleteCheckpoint, FormatTooNew: ``path`` is no checkpoint this version can read.
        MissingArray, UnexpectedArray, ShapeMismatch, DtypeMismatch: the checkpoint is not of this model.
        MissingChunk, CorruptChunk: its data is damaged; names array, chunk and file.
        LoadFailed: another rank had one of these errors; carries its text.
    """
    folder = Path(path)
    everything = ("*",)
    allow_missing = allow_missing if strict else everything
    allow_unexpected = allow_unexpected if strict else everything
    requests: list[_Request] = []
    missing: list[str] = []
    specs: dict[str, ArraySpec] = {}
    error: Exception | None = None
    try:
        read_manifest(folder)
        specs = read_specs(folder)
        requests, missing = _match(folder, specs, arrays, allow_missing, cast)
    except (CheckpointError, OSError) as caught:
        error = caught
    asked = _agree(communicator, error, sorted({array.key for array in arrays}))
    unexpected = sorted(set(specs).difference(*asked))
    refused = [key for key in unexpected if not _allowed(key, allow_unexpected)]
    if refused:
        raise UnexpectedArray(
            f"{folder} holds {_listed(refused)} that no rank asks for; the model differs from the one saved "
            "(or allow it: allow_unexpected)"
        )
    report = LoadReport(tuple(r.spec.key for r in requests), tuple(missing), tuple(unexpected), 0, 0, 0)
    try:
        report = _read_all(folder, requests, report)
    except (CheckpointError, OSError) as caught:
        error = caught
    _agree(communicator, error, None)
    return report


def _agree(communicator: Communicator, error: Exception | None, value: Any) -> list[Any]:
    """All ranks' values; raises this rank's error, or LoadFailed with the first other rank's."""
    outcomes = communicator.all_gather_object((value, str(error) if error is not None else None))
    if error is not None:
        raise error
    for rank, (_, reason) in enumerate(outcomes):
        if reason is not None:
            raise LoadFailed(f"rank {rank} could not load: {reason}")
    return [value for value, _ in outcomes]


def _match(
    folder: Path,
    specs: dict[str, ArraySpec],
    arrays: Sequence[LocalArray],
    allow_missing: tuple[str, ...],
    cast: bool,
) -> tuple[list[_Request], list[str]]:
    by_key: dict[str, list[LocalArray]] = {}
    for array in arrays:
        by_key.setdefault(array.key, []).append(array)
    missing = [key for key in by_key if key not in specs]
    refused = [key for key in missing if not _allowed(key, allow_missing)]
    if refused:
        raise MissingArray(
            f"{folder} lacks {_listed(refused)}; the model differs from the one saved (or allow it: allow_missing)"
        )
    requests = []
    for key, boxes in by_key.items():
        if key not in specs:
            continue
        for array in boxes:
            _check(specs[key], array, cast)
        requests.append(_Request(specs[key], tuple(boxes)))
    return requests, missing


def _check(spec: ArraySpec, array: LocalArray, cast: bool) -> None:
    if array.global_shape != spec.shape:
        raise ShapeMismatch(
            f"array {spec.key!r} has shape {list(spec.shape)} in the checkpoint but {list(array.global_shape)} here; "
            "the model differs from the one saved"
        )
    if array.dtype == spec.dtype:
        return
    floats = torch_dtype(spec.dtype).is_floating_point and array.tensor.dtype.is_floating_point
    if not (cast and floats):
        fix = "allow it with cast=True" if floats else "only floating-point dtypes can be cast"
        raise DtypeMismatch(f"array {spec.key!r} is {spec.dtype} in the checkpoint but {array.dtype} here; {fix}")


def _read_all(folder: Path, requests: Sequence[_Request], report: LoadReport) -> LoadReport:
    cells = num_bytes = needed = 0
    for request in requests:
        scratch = torch.empty(request.spec.cell, dtype=torch_dtype(request.spec.dtype))
        touched = {index for array in request.boxes for index in cells_touching(array.box, request.spec.cell)}
        for index in sorted(touched):
            _read_one(folder, request, index, scratch)
        cells += len(touched)
        num_bytes += len(touched) * request.spec.cell_bytes
        needed += sum(array.box.num_elements for array in request.boxes) * request.spec.itemsize
    return LoadReport(report.loaded, report.missing, report.unexpected, cells, num_bytes, needed)


def _read_one(folder: Path, request: _Request, index: tuple[int, ...], scratch: torch.Tensor) -> None:
    """Read one cell, straight into a tensor that it fits exactly, else through ``scratch``."""
    spec = request.spec
    box = cell_box(index, spec.cell, spec.shape)
    parts = [(array, part) for array in request.boxes if (part := intersect(array.box, box)) is not None]
    direct = _direct_target(parts[0][0], box, spec) if len(parts) == 1 else None
    cell = direct if direct is not None else scratch
    read_cell(folder, spec, index, cell.reshape(-1).view(torch.uint8).numpy())
    if direct is not None:
        return
    for array, part in parts:
        target = array.tensor.detach()[part.within(array.box)]
        target.copy_(cell[part.within(box)])


def _direct_target(array: LocalArray, box: Box, spec: ArraySpec) -> torch.Tensor | None:
    """The part of ``array`` that holds exactly the cell ``box``, if a file can be read into it as it is."""
    if intersect(array.box, box) != box or box.shape != spec.cell:
        return None
    target = array.tensor.detach()[box.within(array.box)]
    plain = target.is_contiguous() and target.device.type == "cpu" and dtype_name(target.dtype) == spec.dtype
    return target if plain else None


def _allowed(key: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, glob) for glob in globs)


def _listed(keys: Sequence[str]) -> str:
    more = len(keys) - NAMES_SHOWN
    return ", ".join(map(repr, keys[:NAMES_SHOWN])) + (f" and {more} more" if more > 0 else "")
