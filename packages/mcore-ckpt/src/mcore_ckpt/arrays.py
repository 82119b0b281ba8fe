"""Logical arrays as zarr v3 on a file system: the metadata documents and the chunk files. No torch.

The documents and the chunk bytes are written here rather than by zarr-python: one 16 MiB chunk costs a fourth of the
time, every file can be made durable, and a bad chunk is reported by array, index and file. What is written is plain
zarr v3 (codecs ``bytes`` little-endian and ``crc32c``, every chunk stored), which zarr-python opens as it is;
:mod:`mcore_ckpt.zarr_view` teaches it the registered dtype ``bfloat16``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from mcore_ckpt.errors import CheckpointError, CorruptChunk, MissingChunk
from mcore_ckpt.files import write_file
from mcore_ckpt.grid import cells_touching, whole

Bytes = npt.NDArray[np.uint8]

METADATA = "zarr.json"
ATTRIBUTES = "mcore_ckpt"
CRC_BYTES = 4

# A float array reads NaN, not zero, where zarr-python finds a chunk file gone: lost data must not look like data.
FILL_VALUES: Mapping[str, Any] = {
    "bool": False,
    "uint8": 0,
    "int8": 0,
    "int16": 0,
    "int32": 0,
    "int64": 0,
    "float16": "NaN",
    "bfloat16": "NaN",
    "float32": "NaN",
    "float64": "NaN",
}
ITEM_SIZES: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}


def codecs() -> list[dict[str, Any]]:
    """The chunk codecs of every array: little-endian values, then a CRC-32C of them."""
    return [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]


def itemsize(dtype: str) -> int:
    """Bytes of one element of the zarr dtype ``dtype``.

    Raises:
        CheckpointError: no checkpoint holds that dtype.
    """
    if dtype not in ITEM_SIZES:
        raise CheckpointError(f"dtype {dtype!r} cannot be stored (known: {', '.join(sorted(ITEM_SIZES))})")
    return ITEM_SIZES[dtype]


def check_key(key: str) -> str:
    """Return ``key`` if it is a safe zarr path: relative, no empty, dotted-only or reserved part.

    Raises:
        CheckpointError: it could leave the checkpoint's folder or collide with zarr's own names.
    """
    parts = key.split("/")
    reserved = any(not part.strip(".") or part.startswith("__") or part == METADATA for part in parts)
    if reserved or set(key) & {"\\", "\0", "\n"}:
        raise CheckpointError(f"array key {key!r} is no valid path inside a checkpoint; use names like 'model/weight'")
    return key


@dataclass(frozen=True)
class ArraySpec:
    """One stored array: key, global shape, zarr dtype name and cell (chunk) shape."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    cell: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return itemsize(self.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements, without padding or checksums."""
        return math.prod(self.shape) * self.itemsize

    @property
    def cell_bytes(self) -> int:
        """Bytes of one stored cell, padding included, without its checksum."""
        return math.prod(self.cell) * self.itemsize

    @property
    def num_cells(self) -> int:
        """Cells of the whole array; 0 when it has no elements."""
        return math.prod(-(-n // c) for n, c in zip(self.shape, self.cell, strict=True))

    def indices(self) -> Iterator[tuple[int, ...]]:
        """All cell indices in order."""
        return cells_touching(whole(self.shape), self.cell)

    def document(self) -> dict[str, Any]:
        """The array's ``zarr.json``."""
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.cell)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": FILL_VALUES[self.dtype],
            "codecs": codecs(),
            "attributes": {},
            "storage_transformers": [],
        }


def parse_spec(key: str, document: Mapping[str, Any]) -> ArraySpec:
    """The spec that ``document`` (an array's ``zarr.json``) describes.

    Raises:
        CheckpointError: it uses something this version does not read (other codecs, another grid or dtype).
    """
    check_key(key)
    try:
        grid, encoding = document["chunk_grid"], document["chunk_key_encoding"]
        readable = document["codecs"] == codecs() and grid["name"] == "regular"
        readable = readable and encoding == {"name": "default", "configuration": {"separator": "/"}}
        dtype = document["data_type"]
        shape, cell = tuple(document["shape"]), tuple(grid["configuration"]["chunk_shape"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"the metadata of array {key!r} is not zarr v3 array metadata: {error!r}") from None
    if not readable or len(shape) != len(cell) or any(n < 1 for n in cell):
        raise CheckpointError(
            f"array {key!r} is not stored as mcore stores arrays (codecs bytes and crc32c on a regular grid); "
            "convert it, or load a checkpoint that mcore wrote"
        )
    itemsize(dtype)
    return ArraySpec(key, shape, dtype, cell)


def hierarchy(specs: Sequence[ArraySpec], attributes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """All metadata documents by path relative to the root (``""`` is the root group), consolidated at the root."""
    nodes: dict[str, dict[str, Any]] = {}
    for spec in specs:
        parts = check_key(spec.key).split("/")
        parents = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
        if spec.key in nodes or any(nodes.get(parent, {}).get("node_type") == "array" for parent in parents):
            raise CheckpointError(f"array key {spec.key!r} is or lies in another array's folder; rename one")
        for parent in parents:
            nodes.setdefault(parent, _group({}))
        nodes[spec.key] = spec.document()
    root = _group({ATTRIBUTES: dict(attributes)})
    root["consolidated_metadata"] = {"kind": "inline", "must_understand": False, "metadata": nodes}
    return {"": root, **nodes}


def _group(attributes: dict[str, Any]) -> dict[str, Any]:
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def read_specs(folder: Path) -> dict[str, ArraySpec]:
    """The arrays of the checkpoint in ``folder``, from the root document alone."""
    root = json.loads((folder / METADATA).read_bytes())
    nodes = root["consolidated_metadata"]["metadata"]
    return {key: parse_spec(key, node) for key, node in nodes.items() if node["node_type"] == "array"}


def cell_file(folder: Path, key: str, index: Sequence[int]) -> Path:
    """The file of one cell: zarr's default chunk key, ``KEY/c/0/3``."""
    return folder.joinpath(key, "c", *map(str, index))


def write_cell(folder: Path, spec: ArraySpec, index: Sequence[int], data: Bytes) -> tuple[Path, int]:
    """Write one whole cell with its checksum; returns its file and the checksum.

    ``data``: all ``spec.cell_bytes`` bytes. A part of a cell is never written.
    """
    assert data.nbytes == spec.cell_bytes, f"{data.nbytes} bytes for a cell of {spec.cell_bytes}"
    checksum = google_crc32c.value(data)
    path = cell_file(folder, spec.key, index)
    write_file(path, data, checksum.to_bytes(CRC_BYTES, "little"))
    return path, checksum


def read_cell(folder: Path, spec: ArraySpec, index: Sequence[int], out: Bytes) -> int:
    """Read one whole cell into ``out`` (``spec.cell_bytes`` bytes) and check it; returns its checksum.

    Raises:
        MissingChunk: its file is gone.
        CorruptChunk: its file has another length, or the checksum does not match.
    """
    path = cell_file(folder, spec.key, index)
    try:
        with open(path, "rb", buffering=0) as file:
            length = os.fstat(file.fileno()).st_size
            if length != spec.cell_bytes + CRC_BYTES:
                reason = f"has {length} bytes instead of {spec.cell_bytes + CRC_BYTES}"
                raise CorruptChunk(spec.key, index, path, reason)
            done, view = 0, memoryview(out.data)
            while done < out.nbytes:
                count = file.readinto(view[done:])
                if not count:
                    raise CorruptChunk(spec.key, index, path, f"ended after {done} bytes while it was read")
                done += count
            stored = file.read(CRC_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise MissingChunk(spec.key, index, path, "is missing") from None
    checksum = google_crc32c.value(out)
    if stored != checksum.to_bytes(CRC_BYTES, "little"):
        found = int.from_bytes(stored, "little")
        raise CorruptChunk(spec.key, index, path, f"is corrupt (stored crc32c {found:08x}, computed {checksum:08x})")
    return int(checksum)
