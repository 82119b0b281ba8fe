"""Reader and writer of .bin/.idx: damage is named, empty things work, 64-bit arithmetic, interrupted writes."""

from __future__ import annotations

import pickle
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_data.indexed_dataset import IndexedDataset, IndexedDatasetError, byte_offsets, resolve_prefix
from mcore_data.indexed_writer import IndexedDatasetWriter, merge, token_dtype

GOLDEN = Path(__file__).parent / "golden_megatron" / "data"


@pytest.fixture
def sample(tmp_path):
    """A copy of the golden data set with many sequences per document; returns its prefix."""
    for suffix in (".bin", ".idx"):
        shutil.copy(GOLDEN / f"c_sent_u16{suffix}", tmp_path / f"c{suffix}")
    return tmp_path / "c"


def patch(prefix, offset, value, suffix=".idx"):
    path = Path(f"{prefix}{suffix}")
    raw = bytearray(path.read_bytes())
    raw[offset : offset + len(value)] = value
    path.write_bytes(raw)


SEQUENCES, ENTRIES = 176, 61
LENGTHS, POINTERS = 34, 34 + 4 * SEQUENCES
DOCUMENTS = POINTERS + 8 * SEQUENCES


@pytest.mark.parametrize(
    ("offset", "value", "field"),
    [
        (0, b"X", "magic"),
        (9, struct.pack("<Q", 2), "version"),
        (17, b"\x09", "dtype code"),
        (17, b"\x04", "byte offset of sequence 1"),
        (18, struct.pack("<Q", SEQUENCES + 1), "length"),
        (18, struct.pack("<Q", 2**63), "length"),
        (26, struct.pack("<Q", ENTRIES - 1), "length"),
        (26, struct.pack("<Q", 0), "document array"),
        (LENGTHS, struct.pack("<i", -1), "sequence lengths"),
        (LENGTHS, struct.pack("<i", 18), "byte offset of sequence 1"),
        (POINTERS + 8, struct.pack("<q", 40), "byte offset of sequence 1"),
        (DOCUMENTS, struct.pack("<q", 1), "document array"),
        (DOCUMENTS + 8, struct.pack("<q", 99), "document array"),
        (DOCUMENTS + 8 * (ENTRIES - 1), struct.pack("<q", SEQUENCES + 5), "document array"),
    ],
)
def test_damage_is_named(sample, offset, value, field):
    patch(sample, offset, value)
    with pytest.raises(IndexedDatasetError) as caught:
        IndexedDataset(sample)
    assert caught.value.field == field
    text = str(caught.value)
    assert text.startswith(f"{sample}.idx: {field}: expected ")
    assert ", found " in text
    assert text.count("; ") >= 1
    assert "\n" not in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


def test_wrong_last_length_is_a_wrong_bin_size(sample):
    patch(sample, POINTERS - 4, struct.pack("<i", 99))
    with pytest.raises(IndexedDatasetError, match=r"c\.bin: length: expected \d+ bytes, as c\.idx says, found 4552"):
        IndexedDataset(sample)


@pytest.mark.parametrize("size", [0, 1, 33, 34, 1000, 2633])
def test_truncated_index(sample, size):
    with open(f"{sample}.idx", "r+b") as file:
        file.truncate(size)
    with pytest.raises(
        IndexedDatasetError, match=r"c\.idx: (header|length): expected .*found \d+ bytes; the file is cut"
    ):
        IndexedDataset(sample)


@pytest.mark.parametrize("change", [-2, -1, 1, 2])
def test_bin_of_another_size(sample, change):
    with open(f"{sample}.bin", "r+b") as file:
        file.truncate(4552 + change)
    with pytest.raises(IndexedDatasetError, match=rf"c\.bin: length: expected 4552 bytes.*found {4552 + change}"):
        IndexedDataset(sample)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_file(sample, suffix):
    Path(f"{sample}{suffix}").unlink()
    with pytest.raises(IndexedDatasetError, match=rf"c\{suffix}: file: expected a file, found none"):
        IndexedDataset(sample)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_fuzzed_index_is_refused_or_still_consistent(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz")
    raw = bytearray((GOLDEN / "f_empty_u16.idx").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    keep = data.draw(st.integers(0, len(raw)) | st.just(len(raw)))
    (folder / "f.idx").write_bytes(bytes(raw[:keep]) + data.draw(st.binary(max_size=4)))
    shutil.copy(GOLDEN / "f_empty_u16.bin", folder / "f.bin")
    try:
        opened = IndexedDataset(folder / "f")
    except IndexedDatasetError:
        return
    assert sum(len(opened[index]) for index in range(len(opened))) == opened.num_tokens
    assert opened.num_tokens * opened.dtype.itemsize == 18
    assert opened.document_indices[-1] == len(opened)


@settings(max_examples=20, deadline=None)
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 65_499), max_size=5), max_size=3), max_size=8),
    dtype=st.sampled_from(["uint16", "int32", "int64"]),
)
def test_round_trip(tmp_path_factory, documents, dtype):
    prefix = tmp_path_factory.mktemp("trip") / "deep.er" / "data.v1"
    with IndexedDatasetWriter(prefix, np.dtype(dtype)) as writer:
        for sequences in documents:
            writer.add_document(sum(sequences, []), [len(tokens) for tokens in sequences])
    opened = IndexedDataset(prefix)
    bounds = opened.document_indices.tolist()
    got = [[opened[index].tolist() for index in range(*pair)] for pair in zip(bounds[:-1], bounds[1:], strict=True)]
    assert got == documents
    assert opened.num_documents == len(documents)
    assert resolve_prefix(prefix) == str(prefix)


def test_many_documents_at_once_equal_one_by_one(tmp_path):
    lengths = np.array([3, 0, 2, 0])
    tokens = np.arange(5, dtype=np.uint16)
    with IndexedDatasetWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_documents(tokens, lengths)
    with IndexedDatasetWriter(tmp_path / "b", np.uint16) as writer:
        writer.add_document([0, 1, 2], [3])
        writer.add_document([], [])
        writer.add_document([3, 4], [2])
        writer.add_document([], [])
    for suffix in (".bin", ".idx"):
        assert Path(f"{tmp_path / 'a'}{suffix}").read_bytes() == Path(f"{tmp_path / 'b'}{suffix}").read_bytes()
    assert IndexedDataset(tmp_path / "a").document_indices.tolist() == [0, 1, 1, 2, 2]


def test_read_parts_and_bounds(sample):
    data = IndexedDataset(sample)
    whole = data[3].tolist()
    assert data.read(3, 2, 5).tolist() == whole[2:5]
    assert data.read(3, 2).tolist() == whole[2:]
    assert data.read(3, 0, 10_000).tolist() == whole
    assert data.read(3, len(whole), 10_000).tolist() == []
    assert not data[3].flags.writeable
    with pytest.raises(IndexError, match="sequence 176 of 176"):
        data[176]
    copied = pickle.loads(pickle.dumps(data))
    assert copied[3].tolist() == whole
    assert len(pickle.dumps(data)) < 500


@pytest.mark.parametrize("dtype", [np.bool_, np.uint32, np.float16])
def test_dtype_without_code(tmp_path, dtype):
    with pytest.raises(ValueError, match="has no code in .idx files"):
        IndexedDatasetWriter(tmp_path / "a", dtype)
    assert list(tmp_path.iterdir()) == []


def test_token_that_does_not_fit(tmp_path):
    with (
        pytest.raises(ValueError, match="token 65536 does not fit uint16"),
        IndexedDatasetWriter(tmp_path / "a", np.uint16) as writer,
    ):
        writer.add_sequence([65_536])
    assert list(tmp_path.iterdir()) == []


def test_lengths_that_do_not_add_up(tmp_path):
    with (
        pytest.raises(ValueError, match="add up to 3, but the document has 2 tokens"),
        IndexedDatasetWriter(tmp_path / "a", np.uint16) as writer,
    ):
        writer.add_document([1, 2], [3])


def test_a_failure_keeps_the_old_files(sample):
    before = Path(f"{sample}.idx").read_bytes()

    def fail_halfway():
        with IndexedDatasetWriter(sample, np.uint16) as writer:
            writer.add_document([1], [1])
            raise KeyError

    with pytest.raises(KeyError):
        fail_halfway()
    assert Path(f"{sample}.idx").read_bytes() == before
    assert sorted(path.name for path in sample.parent.iterdir()) == ["c.bin", "c.idx"]


def test_killed_between_the_renames_leaves_no_pair(sample, monkeypatch):
    """An old index never stands beside new tokens."""
    import mcore_data.indexed_writer as module

    replaced = []

    def replace_once(source, target):
        if replaced:
            raise OSError("killed here")
        replaced.append(target)
        Path(source).rename(target)

    monkeypatch.setattr(module.os, "replace", replace_once)
    with pytest.raises(OSError, match="killed here"), IndexedDatasetWriter(sample, np.uint16) as writer:
        writer.add_document([1, 2, 3], [3])
    assert replaced == [Path(f"{sample}.bin")]
    with pytest.raises(IndexedDatasetError, match=r"c\.idx: file"):
        IndexedDataset(sample)


@pytest.mark.parametrize(("vocab", "name"), [(257, "uint16"), (65_499, "uint16"), (65_500, "int32"), (None, "int32")])
def test_token_dtype(vocab, name):
    assert token_dtype(vocab).name == name


def test_offsets_past_four_gigabytes():
    offsets = byte_offsets(np.full(4, 2**30, dtype=np.int32), 4)
    assert offsets.tolist() == [0, 2**32, 2 * 2**32, 3 * 2**32, 4 * 2**32]


def test_sequence_longer_than_the_format_allows(tmp_path):
    with IndexedDatasetWriter(tmp_path / "a", np.uint8) as writer:
        with pytest.raises(ValueError, match="2147483648 tokens does not fit the format"):
            writer.add_sequence(np.broadcast_to(np.uint8(1), 2**31))
        writer.add_sequence([1])


def test_nothing_to_merge(tmp_path):
    with pytest.raises(ValueError, match="at least one"):
        merge([], tmp_path / "m")


def test_merge_of_sparse_files_past_32_bits(tmp_path):
    """Lengths are made up and the tokens are a hole in the file: 2**31 + 2 bytes each without writing them."""
    length, count = 2**26, 4
    lengths = np.full(count, length, dtype=np.int32)
    for name in ("a", "b"):
        with open(tmp_path / f"{name}.bin", "wb") as file:
            file.truncate(length * count * 8)
        header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 5, count, count + 1)
        arrays = lengths.tobytes() + byte_offsets(lengths, 8)[:-1].tobytes() + np.arange(count + 1).tobytes()
        (tmp_path / f"{name}.idx").write_bytes(header + arrays)

    class NoCopy(IndexedDatasetWriter):
        def _copy_tokens(self, source):
            self._bin.stream.truncate((self.num_tokens + length * count) * 8)

    with NoCopy(tmp_path / "m", np.int64) as writer:
        writer.add_index(tmp_path / "a")
        writer.add_index(tmp_path / "b")
    merged = IndexedDataset(tmp_path / "m")
    assert merged.sequence_pointers.tolist() == [index * length * 8 for index in range(2 * count)]
    assert merged.document_indices.tolist() == list(range(2 * count + 1))
    assert merged.num_tokens == 2 * count * length


def test_prefix_resolution(tmp_path):
    with pytest.raises(ValueError, match="neither exists.*mcore data prepare"):
        resolve_prefix(tmp_path / "my")
    with IndexedDatasetWriter(tmp_path / "my_text_document", np.uint16) as writer:
        writer.add_document([1], [1])
    assert resolve_prefix(tmp_path / "my") == str(tmp_path / "my_text_document")
    assert resolve_prefix(tmp_path / "my_text_document.bin") == str(tmp_path / "my_text_document")
    with IndexedDatasetWriter(tmp_path / "my_code_document", np.uint16) as writer:
        writer.add_document([1], [1])
    with pytest.raises(ValueError, match="several.*my_code_document, .*my_text_document; name one"):
        resolve_prefix(tmp_path / "my")
    (tmp_path / "cut.bin").touch()
    with pytest.raises(ValueError, match="a write was interrupted"):
        resolve_prefix(tmp_path / "cut")
