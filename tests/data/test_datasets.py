"""Data sets by name, the quick start's corpus, and what is found out before a run starts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mcore_data.config import DataConfig
from mcore_data.datasets import build_gpt, build_mock, build_stdlib, check_data, dataset_registry
from mcore_data.indexed_dataset import IndexedDataset
from mcore_data.indexed_writer import IndexedDatasetWriter
from mcore_data.stdlib_corpus import default_cache_folder, stdlib_files, stdlib_folder, stdlib_prefix
from mcore_data.testing import check_dataset
from mcore_data.tokenizers.plain import ByteTokenizer
from mcore_parallel.plugins import plugin_manager

BYTE = ByteTokenizer()
SMALL = 400_000


@pytest.fixture(scope="module")
def manager():
    return plugin_manager()


@pytest.fixture
def data(tmp_path):
    """100 documents of 20 tokens below 200."""
    with IndexedDatasetWriter(tmp_path / "my_text_document", np.uint16) as writer:
        for document in range(100):
            writer.add_document([document + number for number in range(20)], [20])
    return str(tmp_path / "my")


def test_builtins_are_registered(manager):
    assert {"gpt", "stdlib", "mock"} <= set(dataset_registry(manager).names())


def test_gpt(data, manager, tmp_path):
    config = DataConfig(data_path=[data], seq_length=8, data_cache_path=str(tmp_path / "cache"))
    build = dataset_registry(manager)["gpt"].build
    train, valid, test = build(config, tokenizer=BYTE, num_samples=(500, 10, 0), seed=1)
    assert len(train) >= 500
    assert len(valid) >= 10
    assert test is None
    check_dataset(train, seq_length=8, vocab_size=200)
    assert len(list((tmp_path / "cache").iterdir())) == 2
    again = build_gpt(config, tokenizer=BYTE, num_samples=(500, 0, 0), seed=1)[0]
    other = build_gpt(config, tokenizer=BYTE, num_samples=(500, 0, 0), seed=2)[0]
    rows = [np.stack([source[index].tokens for index in range(20)]) for source in (train, again, other)]
    assert np.array_equal(rows[0], rows[1])
    assert not np.array_equal(rows[0], rows[2])


def test_gpt_blend(data, tmp_path):
    config = DataConfig(data_path=["0.25", data, "0.75", data], seq_length=8, split="1")
    train, _, _ = build_gpt(config, tokenizer=BYTE, num_samples=(100, 0, 0), seed=1)
    assert train.drawn == [25, 75]
    assert train.members[0].indexed is train.members[1].indexed
    check_dataset(train, seq_length=8, vocab_size=200)


def test_eod_mask_loss_reaches_the_samples(tmp_path):
    with IndexedDatasetWriter(tmp_path / "d", np.uint16) as writer:
        writer.add_document([1, 256, 2, 256, 3], [5])
    fields = {"data_path": [str(tmp_path / "d")], "seq_length": 4, "split": "1"}
    for flag, expected in ((True, [1, 0, 1, 0]), (False, [1, 1, 1, 1])):
        config = DataConfig(**fields, eod_mask_loss=flag)
        train, _, _ = build_gpt(config, tokenizer=BYTE, num_samples=(1, 0, 0), seed=1)
        assert train[0].loss_mask.tolist() == expected


def test_mock():
    config = DataConfig(dataset="mock", seq_length=8)
    train, valid, test = build_mock(config, tokenizer=BYTE, num_samples=(5, 0, 3), seed=1)
    assert (len(train), valid, len(test)) == (5, None, 3)
    check_dataset(train, seq_length=8, vocab_size=257)
    assert not np.array_equal(train[0].tokens, test[0].tokens)


@pytest.fixture
def small_library(tmp_path, monkeypatch):
    """A stand-in for the standard library, with folders that must be passed over."""
    import mcore_data.stdlib_corpus as module

    folder = tmp_path / "lib"
    for name in ("a.py", "pkg/b.py", "pkg/c.py", "test/t.py", "pkg/tests/t.py", "site-packages/s.py", "encodings/e.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\n" * 50)
    (folder / "pkg" / "latin.py").write_bytes(b"# \xe9\n")
    (folder / "pkg" / "empty.py").touch()
    monkeypatch.setattr(module, "stdlib_folder", lambda: folder)
    return folder


def test_stdlib_files_skip_tests_and_packages(small_library):
    names = [name for name, _ in stdlib_files(small_library)]
    assert sorted(names) == ["a.py", "pkg/b.py", "pkg/c.py", "pkg/empty.py", "pkg/latin.py"]
    assert names == [name for name, _ in stdlib_files(small_library)]
    limited = stdlib_files(small_library, 700)
    assert 0 < sum(size for _, size in limited) <= 700
    assert [file for file in stdlib_files(small_library) if file in limited] == limited


def test_stdlib_corpus_is_made_once(small_library, tmp_path):
    cache = tmp_path / "cache"
    prefix = stdlib_prefix(BYTE, cache)
    indexed = IndexedDataset(prefix)
    texts = sorted(bytes(indexed[index][:-1].tolist()).decode() for index in range(len(indexed)))
    assert texts == sorted(f"# {name}\n" * 50 for name in ("a.py", "pkg/b.py", "pkg/c.py"))
    assert all(indexed[index][-1] == 256 for index in range(len(indexed)))
    made = Path(f"{prefix}.bin").stat().st_mtime_ns
    assert stdlib_prefix(BYTE, cache) == prefix
    assert Path(f"{prefix}.bin").stat().st_mtime_ns == made
    # Another tokenizer or other sources are another corpus.
    assert stdlib_prefix(ByteTokenizer(fingerprint="other"), cache) != prefix
    (small_library / "d.py").write_text("new")
    assert stdlib_prefix(BYTE, cache) != prefix
    assert not [path.name for path in cache.iterdir() if path.name.startswith(".") and path.is_dir()]


def test_stdlib_default_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_folder() == tmp_path / "mcore"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_folder() == tmp_path / ".cache" / "mcore"


def test_stdlib_refusals(small_library, tmp_path):
    with pytest.raises(ValueError, match="needs an end-of-document token"):
        stdlib_prefix(ByteTokenizer(eod=None), tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written .*--data-cache-path"):
        stdlib_prefix(BYTE, tmp_path / "file")
    shutil.rmtree(small_library)
    with pytest.raises(ValueError, match="no Python sources"):
        stdlib_prefix(BYTE, tmp_path)


RACER = """
import mcore_data.stdlib_corpus as module
from mcore_data.tokenizers.plain import ByteTokenizer
files = module.stdlib_files(module.stdlib_folder(), 400_000)
module.stdlib_files = lambda folder: files
print(module.stdlib_prefix(ByteTokenizer()))
"""


def test_stdlib_corpus_by_several_processes_at_once(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", RACER]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) for _ in range(3)]
    printed = {racer.communicate()[0].strip() for racer in racers}
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert len(printed) == 1
    indexed = IndexedDataset(printed.pop())
    files = stdlib_files(stdlib_folder(), SMALL)
    assert indexed.num_tokens == sum(size + 1 for _, size in files if size)
    assert sorted(path.suffix for path in (tmp_path / "mcore").iterdir()) == ["", ".lock"]


def test_stdlib_data_set(small_library, tmp_path):
    config = DataConfig(dataset="stdlib", seq_length=16, split="2,1", data_cache_path=str(tmp_path / "cache"))
    train, valid, test = build_stdlib(config, tokenizer=BYTE, num_samples=(40, 4, 0), seed=1)
    check_dataset(train, seq_length=16, vocab_size=257)
    assert BYTE.decode(valid[0].tokens.tolist()).count("#") >= 1
    assert test is None


@pytest.mark.parametrize(
    ("fields", "vocab_size", "num_samples", "found"),
    [
        ({}, None, (1, 0, 0), []),
        ({}, 257, (1, 1, 0), []),
        ({"split": "1"}, None, (1, 0, 0), []),
        ({}, 256, (1, 0, 0), ["ByteTokenizer has 257 ids, but the model's --vocab-size is 256; raise it to 257"]),
        ({"split": "100,0,0"}, None, (1, 1, 0), ["--split gives the valid split no share"]),
        ({"split": "x"}, None, (1, 0, 0), ["--split 'x'"]),
        ({"split": "999,1,0"}, None, (1, 1, 1), ["the valid split of .* is empty", "the test split no share"]),
        ({"data_path": []}, None, (1, 0, 0), ["--data-path is empty"]),
        ({"data_path": ["/nowhere/x"]}, None, (1, 0, 0), ["--data-path /nowhere/x: no /nowhere/x.idx"]),
        ({"data_path": ["0", "/nowhere/x", "1", "DATA"]}, None, (1, 0, 0), []),
        ({"data_path": ["0.1", "DATA", "DATA", "DATA"]}, None, (1, 0, 0), ["mixes weighted"]),
        ({"dataset": "gtp"}, None, (1, 0, 0), ["unknown dataset 'gtp'; did you mean 'gpt'"]),
        ({"dataset": "mock"}, None, (1, 0, 0), ["--data-path has no effect with --dataset mock"]),
        ({"dataset": "stdlib"}, None, (1, 0, 0), ["--data-path has no effect with --dataset stdlib"]),
        ({"tokenizer_type": "GPT2BPETokenizer"}, None, (1, 0, 0), ["GPT2BPETokenizer needs --vocab-file"]),
        (
            {"tokenizer_type": "NullTokenizer", "tokenizer_model": "99"},
            None,
            (1, 0, 0),
            [r"token 100 at position 1639 is not in the model's vocabulary of 100"],
        ),
        (
            {"tokenizer_type": "None", "split": "0", "data_path": ["/nowhere/x"]},
            None,
            (1, 0, 0),
            ["unknown tokenizer 'None'", "--split '0'"],
        ),
    ],
)
def test_check_data(data, manager, fields, vocab_size, num_samples, found):
    fields = {"data_path": [data], "seq_length": 8, "tokenizer_type": "ByteTokenizer", **fields}
    fields["data_path"] = [data if item == "DATA" else item for item in fields["data_path"]]
    problems = check_data(DataConfig(**fields), vocab_size, num_samples=num_samples, manager=manager)
    assert len(problems) == len(found), problems
    for problem, match in zip(problems, found, strict=True):
        assert re.search(match, problem), problem
        assert "\n" not in problem


def test_check_data_names_a_truncated_index(data, manager):
    with open(f"{data}_text_document.idx", "r+b") as file:
        file.truncate(100)
    config = DataConfig(data_path=[data], tokenizer_type="ByteTokenizer")
    problems = check_data(config, None, manager=manager)
    assert len(problems) == 1
    assert "my_text_document.idx: length: expected" in problems[0]


def test_check_data_refuses_values_that_are_no_ids(tmp_path, manager):
    with IndexedDatasetWriter(tmp_path / "f", np.float32) as writer:
        writer.add_document([0.5], [1])
    config = DataConfig(data_path=[str(tmp_path / "f")], split="1", tokenizer_type="ByteTokenizer")
    assert "holds float32 values, not token ids" in check_data(config, None, manager=manager)[0]


def test_check_data_of_the_quick_start(manager):
    assert check_data(DataConfig(dataset="stdlib"), None, num_samples=(1, 1, 1), manager=manager) == []
    problems = check_data(DataConfig(dataset="stdlib", split="1"), None, num_samples=(1, 1, 0), manager=manager)
    assert problems == ["--split 1 gives the valid split no share, but 1 of its samples are needed"]
