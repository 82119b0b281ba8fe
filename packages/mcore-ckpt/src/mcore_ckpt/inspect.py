"""What a checkpoint holds, from its metadata alone, and whether its data is whole. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mcore_ckpt.arrays import ArraySpec, read_cell, read_specs
from mcore_ckpt.errors import ChunkError
from mcore_ckpt.manifest import PARTS, digest, read_manifest


@dataclass(frozen=True)
class Description:
    """A checkpoint's step, its ``state``, its arrays (key, shape, dtype, cell) and the ranks that wrote it."""

    path: Path
    step: int
    state: Mapping[str, Any]
    arrays: tuple[ArraySpec, ...]
    world_size: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements of all arrays."""
        return sum(spec.num_bytes for spec in self.arrays)

    @property
    def num_cells(self) -> int:
        """Chunk files."""
        return sum(spec.num_cells for spec in self.arrays)


def describe(path: str | Path) -> Description:
    """Describe the checkpoint folder ``path`` without reading any array data.

    Raises:
        IncompleteCheckpoint, FormatTooNew: it is no checkpoint this version can read.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    arrays = tuple(spec for _, spec in sorted(read_specs(folder).items()))
    return Description(folder, manifest.step, manifest.state, arrays, manifest.world_size)


def verify(path: str | Path) -> list[str]:
    """Read every chunk and part file of a checkpoint; returns one line per problem, none when it is whole.

    Raises:
        IncompleteCheckpoint, FormatTooNew: it is no checkpoint this version can read.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    problems: list[str] = []
    written: dict[tuple[str, str], int] = {}
    for name, expected in manifest.files.items():
        if not name.startswith(f"{PARTS}/"):
            continue
        file = folder / name
        if not file.is_file() or digest(content := file.read_bytes()) != expected:
            problems.append(f"{file} is missing or changed")
            continue
        for key, cells in json.loads(content)["cells"].items():
            written.update(((key, index), checksum) for index, checksum in cells.items())
    for spec in read_specs(folder).values():
        problems += _verify_array(folder, spec, written)
    return problems


def _verify_array(folder: Path, spec: ArraySpec, written: Mapping[tuple[str, str], int]) -> list[str]:
    problems = []
    buffer = np.empty(spec.cell_bytes, dtype=np.uint8)
    for index in spec.indices():
        try:
            checksum = read_cell(folder, spec, index, buffer)
        except ChunkError as error:
            problems.append(str(error))
            continue
        if written.get((spec.key, ".".join(map(str, index))), checksum) != checksum:
            problems.append(f"chunk {list(index)} of array {spec.key!r} is not the one that was saved")
    return problems
