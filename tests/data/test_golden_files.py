"""Megatron's golden .bin/.idx files: read, and written again byte for byte."""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from mcore_data.indexed_dataset import IndexedDataset, bin_path, idx_path
from mcore_data.indexed_writer import IndexedDatasetWriter, merge

GOLDEN = Path(__file__).parent / "golden_megatron"
FACTS = json.loads((GOLDEN / "indexed.json").read_text())


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_all_sixteen_are_covered():
    assert len(FACTS) == 16


@pytest.mark.parametrize("name", FACTS)
def test_read(name):
    facts, data = FACTS[name], IndexedDataset(GOLDEN / "data" / name)
    assert data.dtype.name == facts["dtype"]
    assert len(data) == facts["num_sequences"]
    assert data.sequence_lengths.tolist() == facts["sequence_lengths"]
    assert data.document_indices.tolist() == facts["document_indices"]
    assert data.num_documents == len(facts["document_indices"]) - 1
    assert data.sequence_pointers[:8].tolist() == facts["sequence_pointers_head"]
    assert data.sequence_pointers[-1] == facts["sequence_pointers_last"]
    modes = None if data.sequence_modes is None else data.sequence_modes.tolist()
    assert modes == facts.get("sequence_modes")
    sequences = facts["sequences"]
    if isinstance(sequences, dict):
        assert [data[i].tolist() for i in range(3)] == sequences["first"]
        assert data[-1].tolist() == data[len(data) - 1].tolist() == sequences["last"]
    else:
        assert np.allclose(np.concatenate([data[i] for i in range(len(data))]), sum(sequences, []), rtol=1e-7)
        assert [len(data[i]) for i in range(len(data))] == [len(tokens) for tokens in sequences]
    if facts["all_tokens_crc32_int64le"] is not None:
        assert zlib.crc32(data.tokens(0, data.num_tokens).astype("<i8").tobytes()) == facts["all_tokens_crc32_int64le"]


@pytest.mark.parametrize("name", FACTS)
def test_write_again(name, tmp_path):
    facts, data = FACTS[name], IndexedDataset(GOLDEN / "data" / name)
    with IndexedDatasetWriter(tmp_path / name, data.dtype, modes=data.sequence_modes is not None) as writer:
        bounds = data.document_indices.tolist()
        for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
            for index in range(begin, end):
                mode = 0 if data.sequence_modes is None else int(data.sequence_modes[index])
                writer.add_sequence(data[index].tolist(), mode=mode)
            writer.end_document()
    assert sha256(bin_path(tmp_path / name)) == facts["bin_sha256"]
    assert sha256(idx_path(tmp_path / name)) == facts["idx_sha256"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.bin", f"{name}.idx"]


def test_merge(tmp_path):
    merge([GOLDEN / "data" / name for name in ("c_sent_u16", "f_empty_u16", "h_bytes_u16")], tmp_path / "m")
    assert sha256(bin_path(tmp_path / "m")) == FACTS["m_merged_u16"]["bin_sha256"]
    assert sha256(idx_path(tmp_path / "m")) == FACTS["m_merged_u16"]["idx_sha256"]


def test_merge_with_modes_keeps_them(tmp_path):
    merge([GOLDEN / "data" / "e_modes_i32"] * 2, tmp_path / "m")
    assert IndexedDataset(tmp_path / "m").sequence_modes.tolist() == [1, 0, 2, 0, -1] * 2


def test_merge_refuses_another_dtype(tmp_path):
    with pytest.raises(ValueError, match=r"b_i32 \(int32\) into .*m \(uint16\)"):
        merge([GOLDEN / "data" / "a_u16", GOLDEN / "data" / "b_i32"], tmp_path / "m")
    assert list(tmp_path.iterdir()) == []
