"""Preparation: same bytes for any worker count, odd input, kills, and an independent count of what was written."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mcore_data.indexed_dataset import IndexedDataset
from mcore_data.prepare import Progress, prepare
from mcore_data.sources import ITEM_BYTES, expand_inputs, read_documents, work_items
from mcore_data.tokenizers.plain import ByteTokenizer, NullTokenizer

BYTE = ByteTokenizer()


def write_lines(path, texts, *, end="\n"):
    path.write_bytes("".join(json.dumps({"text": text}) + end for text in texts).encode())
    return path


def documents(prefix):
    """Documents of a data set, read from the bytes without the package's own reader."""
    index = Path(f"{prefix}.idx").read_bytes()
    magic, version, code, sequences, entries = struct.unpack_from("<9sQBQQ", index)
    assert (magic, version, code) == (b"MMIDIDX\0\0", 1, 8)
    assert len(index) == 34 + 12 * sequences + 8 * entries
    lengths = struct.unpack_from(f"<{sequences}i", index, 34)
    bounds = struct.unpack_from(f"<{entries}q", index, 34 + 12 * sequences)
    raw = Path(f"{prefix}.bin").read_bytes()
    tokens = list(struct.unpack(f"<{len(raw) // 2}H", raw))
    found, at = [], 0
    for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
        size = sum(lengths[begin:end])
        found.append(tokens[at : at + size])
        at += size
    assert at == len(tokens)
    return found


def ids(text):
    return [*text.encode(), 256]


def test_json_lines(tmp_path):
    texts = ["one", "", "  ", "zwei ü", "three\r\n<|endoftext|>", "\U0001f6a2"]
    write_lines(tmp_path / "a.jsonl", texts)
    report = prepare([tmp_path / "a.jsonl"], tmp_path / "out", BYTE, append_eod=True)
    assert report.prefixes == (str(tmp_path / "out_text_document"),)
    assert documents(report.prefixes[0]) == [ids(text) if text else [] for text in texts]
    assert (report.documents, report.empty_documents, report.dtype) == (6, 1, "uint16")
    assert report.tokens == sum(len(ids(text)) for text in texts if text)
    data = IndexedDataset(report.prefixes[0])
    assert (data.num_documents, len(data), data.num_tokens) == (6, 5, report.tokens)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.jsonl",
        "out_text_document.bin",
        "out_text_document.idx",
    ]


def test_without_end_of_document(tmp_path):
    write_lines(tmp_path / "a.jsonl", ["one", "two"])
    report = prepare([tmp_path / "a.jsonl"], tmp_path / "out", BYTE)
    assert documents(report.prefixes[0]) == [list(b"one"), list(b"two")]


@pytest.mark.parametrize(
    ("raw", "expected", "blank"),
    [
        (b'{"text": "a"}\n\n{"text": "b"}\n', ["a", "b"], 1),
        (b'{"text": "a"}\r\n  \r\n{"text": "b"}', ["a", "b"], 1),
        (b'\xef\xbb\xbf{"text": "a"}', ["a"], 0),
        (b'{"text": "half \\ud83d pair, whole \\ud83d\\udea2"}', ["half \ufffd pair, whole \U0001f6a2"], 0),
        (b'{"other": 1, "text": "\\u0000"}\n', ["\0"], 0),
    ],
)
def test_odd_json(tmp_path, raw, expected, blank):
    (tmp_path / "a.jsonl").write_bytes(raw)
    report = prepare([tmp_path / "a.jsonl"], tmp_path / "out", BYTE, append_eod=True)
    assert documents(report.prefixes[0]) == [ids(text) for text in expected]
    assert report.blank_lines == blank


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (b"{", r"a\.jsonl:3: not JSON"),
        (b"\xff", r"a\.jsonl:3: not JSON"),
        (b"[1]", r"a\.jsonl:3: expected an object, found list"),
        (b'{"body": "x"}', r"a\.jsonl:3: no key 'text' \(the object has 'body'\); see --json-keys"),
        (b'{"text": 3}', r"a\.jsonl:3: 'text' must be a string, found int"),
    ],
)
def test_bad_lines_are_named_and_leave_nothing(tmp_path, line, match):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}\n')
    with pytest.raises(ValueError, match=match):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", BYTE)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_error_of_the_tokenizer_names_the_place(tmp_path):
    write_lines(tmp_path / "a.jsonl", ["1 2", "3 x"])
    with pytest.raises(ValueError, match=r"a\.jsonl:1-2: NullTokenizer takes numbers"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", NullTokenizer(10))


def test_folder_in_sorted_order_without_binary_and_hidden_files(tmp_path):
    tree = tmp_path / "tree"
    for name, raw in {
        "b.txt": b"second",
        "a/z.md": "erste ü".encode(),
        "a/image.png": b"\x89PNG\0\1",
        "a/latin.txt": b"\xe9t\xe9",
        "c.json": b'{\n "not": "lines"}',
        "d.jsonl": b'{"text": "from json"}\n',
        "empty.txt": b"",
        ".git/config": b"hidden",
        ".hidden": b"hidden",
    }.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(raw)
    report = prepare([tree], tmp_path / "out", BYTE, append_eod=True)
    expected = ["erste ü", "second", '{\n "not": "lines"}', "from json"]
    assert documents(report.prefixes[0]) == [*(ids(text) for text in expected), []]
    assert (report.skipped_files, report.empty_documents) == (2, 1)


def test_inputs_keep_their_order_and_listed_files_must_be_text(tmp_path):
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.txt").write_text("a")
    report = prepare([tmp_path / "b.txt", tmp_path / "a.txt"], tmp_path / "out", BYTE)
    assert documents(report.prefixes[0]) == [[98], [97]]
    (tmp_path / "x.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"x\.txt: not UTF-8 text"):
        prepare([tmp_path / "a.txt", tmp_path / "x.txt"], tmp_path / "out2", BYTE)
    assert not list(tmp_path.glob("*out2*"))


def test_several_keys(tmp_path):
    rows = [{"text": "a", "code": "x = 1"}, {"text": "", "code": "y"}]
    (tmp_path / "a.json").write_text("\n".join(map(json.dumps, rows)))
    report = prepare([tmp_path / "a.json"], tmp_path / "out", BYTE, json_keys=("code", "text"), append_eod=True)
    assert [Path(prefix).name for prefix in report.prefixes] == ["out_code_document", "out_text_document"]
    assert documents(report.prefixes[0]) == [ids("x = 1"), ids("y")]
    assert documents(report.prefixes[1]) == [ids("a"), []]
    assert (report.documents, report.empty_documents) == (4, 1)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """About 5 MB in JSON lines, gzipped lines and a folder, so that several work items exist."""
    folder = tmp_path_factory.mktemp("large")
    draw = random.Random(1)

    def text(size):
        piece = "".join(draw.choices("ab cdé\n", k=100))
        return (piece * (size // 100))[: draw.randrange(size)]

    write_lines(folder / "a.jsonl", [text(4000) for _ in range(700)])
    raw = "".join(json.dumps({"text": text(4000)}) + "\n" for _ in range(700))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(raw.encode()))
    (folder / "tree").mkdir()
    for number in range(60):
        (folder / "tree" / f"{number}.txt").write_text(text(60_000), encoding="utf-8")
    return [folder / "a.jsonl", folder / "tree", folder / "b.jsonl.gz"]


def test_same_bytes_for_any_number_of_workers(large, tmp_path):
    reports, seen = [], {}
    for workers in (1, 3):
        progress: list[Progress] = []
        report = prepare(
            large, tmp_path / str(workers), BYTE, append_eod=True, workers=workers, on_progress=progress.append
        )
        reports.append(dataclasses.replace(report, prefixes=()))
        seen[workers] = [Path(f"{report.prefixes[0]}{suffix}").read_bytes() for suffix in (".bin", ".idx")]
        assert len(progress) > 4
        done = [step.bytes_done for step in progress]
        assert done == sorted(done)
        assert done[-1] == progress[-1].bytes_total == sum(path.stat().st_size for path, _ in expand_inputs(large))
        assert (progress[-1].documents, progress[-1].tokens) == (report.documents, report.tokens)
    assert seen[1] == seen[3]
    assert reports[0] == reports[1]
    assert reports[0].documents == 1460


def test_work_items_are_small(large):
    items = list(work_items(expand_inputs(large)))
    assert max(item.source_bytes for item in items) < 2 * ITEM_BYTES
    assert sum(len(read_documents(item, ["text"]).texts["text"]) for item in items) == 1460


def test_a_worker_reports_its_error(tmp_path):
    write_lines(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(ValueError, match=r"a\.jsonl:1-1: NullTokenizer takes numbers"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", NullTokenizer(10), workers=2)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_damaged_gzip(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 10_000)[:-20])
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz: damaged gzip file"):
        prepare([tmp_path / "a.jsonl.gz"], tmp_path / "out", BYTE)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"json_keys": ()}, "--json-keys"),
        ({"json_keys": ("a", "a")}, "different keys"),
        ({"json_keys": ("a/b",)}, "part of a file name"),
        ({"json_keys": ("code",)}, "is a text file, which only has the key 'text'"),
        ({"workers": 0}, "--workers 0"),
    ],
)
def test_bad_arguments(tmp_path, options, match):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match=match):
        prepare([tmp_path / "a.txt"], tmp_path / "out", BYTE, **options)


def test_bad_inputs(tmp_path):
    with pytest.raises(ValueError, match=r"--input .*nowhere: no such file or folder"):
        prepare([tmp_path / "nowhere"], tmp_path / "out", BYTE)
    with pytest.raises(ValueError, match="no files found"):
        prepare([tmp_path], tmp_path / "out", BYTE)
    with pytest.raises(ValueError, match="no files found"):
        prepare([], tmp_path / "out", BYTE)
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="no documents in the input \\(2 blank lines"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", BYTE)
    with pytest.raises(ValueError, match="--append-eod: ByteTokenizer has no end-of-document token"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", ByteTokenizer(eod=None), append_eod=True)


def test_only_empty_documents_give_a_readable_data_set(tmp_path):
    write_lines(tmp_path / "a.jsonl", ["", ""])
    report = prepare([tmp_path / "a.jsonl"], tmp_path / "out", BYTE, append_eod=True)
    data = IndexedDataset(report.prefixes[0])
    assert (data.num_documents, len(data), data.num_tokens, report.tokens) == (2, 0, 0, 0)


KILLED = """
import sys
from mcore_data.prepare import prepare
from mcore_data.tokenizers.plain import ByteTokenizer
while True:
    for source in sys.argv[2:]:
        prepare([source], sys.argv[1], ByteTokenizer(), append_eod=True)
        print("done", flush=True)
"""


def test_killed_at_random_moments(tmp_path):
    """After any kill the final names hold one whole preparation or no index at all."""
    sizes = {}
    for name, count in (("a", 300), ("b", 500)):
        texts = [f"{name} {number}" * 40 for number in range(count)]
        write_lines(tmp_path / f"{name}.jsonl", texts)
        sizes[count] = sum(len(ids(text)) for text in texts)
    command = [
        sys.executable,
        "-c",
        KILLED,
        str(tmp_path / "out"),
        str(tmp_path / "a.jsonl"),
        str(tmp_path / "b.jsonl"),
    ]
    draw, whole = random.Random(7), 0
    for _ in range(4):
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        time.sleep(draw.uniform(0.0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        if not (tmp_path / "out_text_document.idx").exists():
            continue
        data = IndexedDataset(tmp_path / "out_text_document")
        whole += 1
        assert sizes[data.num_documents] == data.num_tokens
    report = prepare([tmp_path / "a.jsonl"], tmp_path / "out", BYTE, append_eod=True)
    assert IndexedDataset(report.prefixes[0]).num_documents == 300
    assert whole >= 1
