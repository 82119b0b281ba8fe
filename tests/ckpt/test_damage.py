"""Damaged or unfitting checkpoints: found, and named by array, chunk and file; on all ranks."""

from __future__ import annotations

import pytest
import torch

from mcore_ckpt.arrays import cell_file
from mcore_ckpt.comm import DistributedCommunicator, SingleCommunicator
from mcore_ckpt.errors import (
    CorruptChunk,
    DtypeMismatch,
    IncompleteCheckpoint,
    LoadFailed,
    MissingArray,
    MissingChunk,
    ShapeMismatch,
    UnexpectedArray,
)
from mcore_ckpt.grid import GridRule
from mcore_ckpt.inspect import describe, verify
from mcore_ckpt.layout import LocalArray
from mcore_ckpt.load import load_checkpoint
from mcore_ckpt.save import save_checkpoint
from mcore_parallel.testing import run_ranks

TINY = GridRule(parts=4, smallest=64, largest=512)
SINGLE = SingleCommunicator()


@pytest.fixture
def folder(tmp_path, tensors, whole_arrays):
    return save_checkpoint(tmp_path, 1, whole_arrays(tensors), state={}, communicator=SINGLE, rule=TINY)


def empty_like(tensors):
    return {name: torch.zeros_like(t) for name, t in tensors.items()}


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path):
    path.write_bytes(b"")


def flip_data(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def flip_checksum(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 128
    path.write_bytes(content)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "scratch"])
@pytest.mark.parametrize(
    ("damage", "kind", "reason"),
    [
        (truncate, CorruptChunk, "has 339 bytes instead of 340"),
        (lengthen, CorruptChunk, "has 341 bytes instead of 340"),
        (empty, CorruptChunk, "has 0 bytes instead of 340"),
        (flip_data, CorruptChunk, "is corrupt"),
        (flip_checksum, CorruptChunk, "is corrupt"),
        (lambda path: path.unlink(), MissingChunk, "is missing"),
    ],
)
def test_a_damaged_chunk_is_named(damage, kind, reason, direct, folder, tensors, whole_arrays):
    path = cell_file(folder, "model/matrix", (2, 0))
    damage(path)
    got = empty_like(tensors)
    if not direct:
        got["matrix"] = torch.zeros(7, 48).t()
    with pytest.raises(kind, match=rf"chunk \[2, 0\] of array 'model/matrix' .*{reason}") as caught:
        load_checkpoint(folder, whole_arrays(got), communicator=SINGLE)
    assert (caught.value.array, caught.value.chunk, caught.value.file) == ("model/matrix", (2, 0), path)
    assert "\n" not in str(caught.value)
    assert verify(folder) == [str(caught.value)]


def test_a_chunk_put_in_anothers_place_is_found_by_verify(folder):
    one, other = (cell_file(folder, "model/matrix", (i, 0)) for i in (1, 2))
    one.write_bytes(other.read_bytes())
    assert verify(folder) == ["chunk [1, 0] of array 'model/matrix' is not the one that was saved"]


def test_a_lost_part_file_is_found_by_verify(folder):
    (folder / "parts" / "000000.json").unlink()
    assert verify(folder) == [f"{folder}/parts/000000.json is missing or changed"]


def test_an_uncommitted_folder_is_not_loaded(folder, tensors, whole_arrays):
    (folder / "COMMIT").unlink()
    with pytest.raises(IncompleteCheckpoint, match="COMMIT is missing"):
        load_checkpoint(folder, whole_arrays(tensors), communicator=SINGLE)
    with pytest.raises(IncompleteCheckpoint, match="COMMIT is missing"):
        load_checkpoint(folder.parent, whole_arrays(tensors), communicator=SINGLE)


def test_an_array_that_is_not_there_is_an_error_unless_allowed(folder, tensors, whole_arrays):
    got = {**empty_like(tensors), "extra": torch.full((3,), 7.0)}
    with pytest.raises(MissingArray, match="lacks 'model/extra'; .*allow_missing"):
        load_checkpoint(folder, whole_arrays(got), communicator=SINGLE)
    with pytest.raises(MissingArray, match="model/extra"):
        load_checkpoint(folder, whole_arrays(got), communicator=SINGLE, allow_missing=("optimizer/*",))
    for how in ({"allow_missing": ("model/ex*",)}, {"strict": False}):
        report = load_checkpoint(folder, whole_arrays(got), communicator=SINGLE, **how)
        assert report.missing == ("model/extra",)
        assert torch.equal(got["matrix"], tensors["matrix"])
        assert (got["extra"] == 7).all(), "what the checkpoint lacks stays as it was"


def test_an_array_that_nobody_asks_for_is_an_error_unless_allowed(folder, tensors, whole_arrays):
    got = empty_like(tensors)
    del got["vector"]
    with pytest.raises(UnexpectedArray, match="holds 'model/vector' that no rank asks for"):
        load_checkpoint(folder, whole_arrays(got), communicator=SINGLE)
    for how in ({"allow_unexpected": ("*/vector",)}, {"strict": False}):
        report = load_checkpoint(folder, whole_arrays(got), communicator=SINGLE, **how)
        assert report.unexpected == ("model/vector",)
        assert report.loaded == tuple(f"model/{name}" for name in got)


def test_shapes_and_dtypes_must_agree(folder, tensors, whole_arrays):
    got = {**empty_like(tensors), "vector": torch.zeros(34, dtype=torch.float64)}
    with pytest.raises(ShapeMismatch, match=r"'model/vector' has shape \[33\] in the checkpoint but \[34\] here"):
        load_checkpoint(folder, whole_arrays(got), communicator=SINGLE, strict=False)
    got = {**empty_like(tensors), "matrix": torch.zeros(48, 7, dtype=torch.bfloat16), "half": torch.zeros(16, 5)}
    with pytest.raises(DtypeMismatch, match="is float32 in the checkpoint but bfloat16 here; allow it with cast=True"):
        load_checkpoint(folder, whole_arrays(got), communicator=SINGLE, strict=False)
    load_checkpoint(folder, whole_arrays(got), communicator=SINGLE, cast=True)
    assert torch.equal(got["matrix"], tensors["matrix"].bfloat16())
    assert torch.equal(got["half"], tensors["half"].float())
    got = {**empty_like(tensors), "counts": torch.zeros(5)}
    with pytest.raises(DtypeMismatch, match="only floating-point dtypes can be cast"):
        load_checkpoint(folder, whole_arrays(got), communicator=SINGLE, cast=True)


def half(tensors, communicator):
    """Rank 0 asks for the upper half of the matrix and everything else, rank 1 for the lower half."""
    top = communicator.rank * 24
    matrix = LocalArray("model/matrix", (48, 7), (top, 0), (24, 7), tensors["matrix"][top : top + 24], (0,))
    rest = {name: t for name, t in tensors.items() if name != "matrix"} if communicator.rank == 0 else {}
    return matrix, rest


def load_half(communicator, folder, tensors, whole_arrays):
    got = empty_like(tensors)
    matrix, rest = half(got, communicator)
    report = load_checkpoint(folder, [matrix, *whole_arrays(rest)], communicator=communicator)
    return report, got["matrix"]


def test_a_rank_reads_only_what_it_needs(run_threads, folder, tensors, whole_arrays):
    (first, upper), (second, lower) = run_threads(load_half, 2, folder, tensors, whole_arrays)
    assert second.loaded == ("model/matrix",), "arrays of other ranks are not unexpected"
    assert (second.cells_read, second.bytes_read, second.bytes_needed) == (2, 24 * 7 * 4, 24 * 7 * 4)
    assert first.cells_read == describe(folder).num_cells - 2
    assert torch.equal(upper[:24], tensors["matrix"][:24])
    assert torch.equal(lower[24:], tensors["matrix"][24:])


def test_a_chunk_that_one_rank_cannot_read_is_an_error_on_all(run_threads, folder, tensors, whole_arrays):
    flip_data(cell_file(folder, "model/matrix", (3, 0)))
    first, second = run_threads(load_half, 2, folder, tensors, whole_arrays)
    assert isinstance(second, CorruptChunk)
    assert isinstance(first, LoadFailed)
    assert str(first) == f"rank 1 could not load: {second}"


def _load_on_ranks(rank, world, folder, tensors):
    got = empty_like(tensors)
    matrix, rest = half(got, DistributedCommunicator())
    others = [LocalArray(f"model/{n}", tuple(t.shape), (0,) * t.dim(), tuple(t.shape), t) for n, t in rest.items()]
    try:
        load_checkpoint(folder, [matrix, *others], communicator=DistributedCommunicator())
    except ValueError as error:
        return type(error).__name__
    return "loaded"


def test_real_ranks_agree_about_a_damaged_chunk(folder, tensors):
    assert run_ranks(_load_on_ranks, 2, folder, tensors) == ["loaded", "loaded"]
    cell_file(folder, "model/matrix", (0, 0)).unlink()
    assert run_ranks(_load_on_ranks, 2, folder, tensors) == ["MissingChunk", "LoadFailed"]
