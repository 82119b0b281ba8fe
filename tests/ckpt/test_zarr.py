"""What is written is zarr v3: zarr-python opens it, reads every value bit for bit, and agrees about the metadata."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
import torch
import zarr
from zarr.codecs import BytesCodec, Crc32cCodec

from mcore_ckpt.arrays import FILL_VALUES, ArraySpec, hierarchy, parse_spec, read_specs
from mcore_ckpt.comm import SingleCommunicator
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.grid import GridRule
from mcore_ckpt.layout import LocalArray, as_bytes, torch_dtype
from mcore_ckpt.load import load_checkpoint
from mcore_ckpt.save import save_checkpoint
from mcore_ckpt.zarr_view import open_group

SINGLE = SingleCommunicator()
RULE = GridRule(parts=4, smallest=64, largest=300)


def random_bits(shape, dtype, seed):
    """Every bit pattern, NaNs with payloads and -0.0 included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.bool)
    count = int(torch.tensor(shape).prod()) * torch.empty((), dtype=dtype).element_size()
    bits = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
    return bits.view(dtype).view(shape)


def save(root, tensors):
    arrays = [LocalArray(f"model/{n}", tuple(t.shape), (0,) * t.dim(), tuple(t.shape), t, (0,)) for n, t in tensors]
    return save_checkpoint(root, 1, arrays, state={}, communicator=SINGLE, rule=RULE)


def same_bits(array, tensor):
    return np.ascontiguousarray(array).tobytes() == as_bytes(tensor).tobytes()


@pytest.mark.parametrize("name", sorted(FILL_VALUES))
def test_every_dtype_survives_bit_for_bit(name, tmp_path):
    dtype = torch_dtype(name)
    tensors = {shape: random_bits(shape, dtype, len(shape)) for shape in [(37, 5), (16, 8), (101,), (3, 4, 5), (1,)]}
    folder = save(tmp_path, [("x".join(map(str, shape)), t) for shape, t in tensors.items()])
    group = open_group(folder)
    for shape, tensor in tensors.items():
        array = group["model/" + "x".join(map(str, shape))]
        assert array.shape == shape
        assert array.dtype == (np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name))
        assert same_bits(array[...], tensor)
    got = {shape: torch.zeros_like(t) for shape, t in tensors.items()}
    arrays = [
        LocalArray("model/" + "x".join(map(str, shape)), shape, (0,) * len(shape), shape, t) for shape, t in got.items()
    ]
    load_checkpoint(folder, arrays, communicator=SINGLE)
    assert all(same_bits(got[shape].view(torch.uint8).numpy(), tensor) for shape, tensor in tensors.items())


@pytest.mark.parametrize("value", [0.0, -0.0, float("nan"), float("-inf")])
def test_arrays_of_one_value_have_all_their_chunks(value, tmp_path):
    """zarr-python's own writer leaves out chunks that equal the fill value; then a lost file looks like data."""
    tensor = torch.full((40, 4), value)
    folder = save(tmp_path, [("w", tensor)])
    files = [path for path in (folder / "model/w/c").rglob("*") if path.is_file()]
    assert len(files) == read_specs(folder)["model/w"].num_cells > 1
    assert same_bits(open_group(folder)["model/w"][...], tensor)
    got = torch.ones(40, 4)
    load_checkpoint(folder, [LocalArray("model/w", (40, 4), (0, 0), (40, 4), got)], communicator=SINGLE)
    assert same_bits(got.numpy(), tensor)


def test_a_lost_chunk_reads_as_nan_not_as_zero_in_other_readers(tmp_path):
    folder = save(tmp_path, [("w", torch.ones(40, 4))])
    (folder / "model/w/c/0/0").unlink()
    values = open_group(folder)["model/w"][...]
    assert np.isnan(values[:10]).all()
    assert (values[10:] == 1).all()


def test_other_readers_see_a_flipped_bit(tmp_path):
    folder = save(tmp_path, [("w", torch.ones(40, 4))])
    path = folder / "model/w/c/0/0"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="checksum"):
        open_group(folder)["model/w"][...]


def test_scalars_and_arrays_without_elements(tmp_path):
    folder = save_checkpoint(
        tmp_path,
        1,
        [
            LocalArray("model/scalar", (), (), (), torch.tensor(2.5)),
            LocalArray("model/none", (0, 4), (0, 0), (0, 4), torch.zeros(0, 4), (0,)),
        ],
        state={},
        communicator=SINGLE,
    )
    group = open_group(folder)
    assert float(group["model/scalar"][...]) == 2.5
    assert group["model/none"].shape == (0, 4)
    scalar = torch.tensor(0.0)
    arrays = [
        LocalArray("model/scalar", (), (), (), scalar),
        LocalArray("model/none", (0, 4), (0, 0), (0, 4), torch.zeros(0, 4)),
    ]
    load_checkpoint(folder, arrays, communicator=SINGLE)
    assert scalar == 2.5


@pytest.mark.parametrize("name", sorted(set(FILL_VALUES) - {"bfloat16"}))
def test_our_metadata_is_what_zarr_writes(name, tmp_path):
    spec = ArraySpec("w", (40, 4), name, (10, 4))
    zarr.create_array(
        str(tmp_path / "w"),
        shape=spec.shape,
        chunks=spec.cell,
        dtype=name,
        fill_value=np.nan if FILL_VALUES[name] == "NaN" else 0,
        serializer=BytesCodec(endian="little"),
        compressors=[Crc32cCodec()],
        filters=None,
    )
    theirs = json.loads((tmp_path / "w" / "zarr.json").read_text())
    ours = spec.document()
    for document in (theirs, ours):
        for codec in document["codecs"]:
            if codec.get("configuration") == {} or (name in ("bool", "uint8", "int8") and codec["name"] == "bytes"):
                codec.pop("configuration", None)  # bytes have no order: zarr leaves it out
    assert ours == theirs
    assert parse_spec("w", spec.document()) == spec


def test_consolidated_and_single_documents_agree(tmp_path):
    folder = save(tmp_path, [("a", torch.zeros(3)), ("b", torch.zeros(4))])
    nodes = json.loads((folder / "zarr.json").read_text())["consolidated_metadata"]["metadata"]
    assert sorted(nodes) == ["model", "model/a", "model/b"]
    for key, node in nodes.items():
        assert json.loads((folder / key / "zarr.json").read_text()) == node
    alone = zarr.open_group(str(folder), mode="r", use_consolidated=False)
    assert sorted(alone["model"].array_keys()) == ["a", "b"]
    assert zarr.open_array(str(folder / "model" / "a"), mode="r").shape == (3,)


def test_foreign_arrays_are_refused(tmp_path):
    document = ArraySpec("w", (4,), "float32", (4,)).document()
    other_grid = {"name": "other", "configuration": {"chunk_shape": [4]}}
    for change in ({"codecs": [{"name": "bytes"}]}, {"chunk_grid": other_grid}):
        with pytest.raises(CheckpointError, match="'w' is not stored as mcore stores arrays"):
            parse_spec("w", {**document, **change})
    with pytest.raises(CheckpointError, match="dtype 'complex64' cannot be stored"):
        parse_spec("w", {**document, "data_type": "complex64"})
    with pytest.raises(CheckpointError, match="no valid path"):
        parse_spec("../w", document)
    with pytest.raises(CheckpointError, match="not zarr v3 array metadata"):
        parse_spec("w", {})


@pytest.mark.parametrize("keys", [("a", "a/b"), ("a/b", "a")])
def test_an_array_is_not_another_ones_folder(keys):
    with pytest.raises(CheckpointError, match="another array's folder"):
        hierarchy([ArraySpec(key, (4,), "float32", (4,)) for key in keys], {})
