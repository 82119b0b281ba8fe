"""Typical mistakes, typed at the command line: exit code 2, no traceback, and only flags that exist."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mcore_cli import launch
from mcore_cli.commands import run_options

Q = ("train", "quickstart")

# arguments, words that the message must hold
MISTAKES: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    ((*Q, "--nproc-per-node", "6", "--tensor-model-parallel-size", "4"), ("6 ranks", "4 or 8")),
    ((*Q, "--tensor-model-parallel-size", "2"), ("1 rank", "2 ranks")),
    (
        (*Q, "--nproc-per-node", "3", "--tensor-model-parallel-size", "3"),
        ("--num-attention-heads 8", "4 KV heads", "3"),
    ),
    ((*Q, "--num-attention-heads", "7"), ("--hidden-size 128", "7")),
    ((*Q, "--nproc-per-node", "3", "--pipeline-model-parallel-size", "3"), ("--num-layers 8", "6 or 9")),
    ((*Q, "--global-batch-size", "33"), ("33", "32 or 34")),
    ((*Q, "--micro-batch-size", "0"), ("--micro-batch-size '0'", "greater than or equal to 1")),
    ((*Q, "--micro-batch-size", "-2"), ("-2",)),
    ((*Q, "--lr", "nan"), ("--lr 'nan'", "finite")),
    ((*Q, "--lr", "inf"), ("finite",)),
    ((*Q, "--lr", "fast"), ("--lr 'fast'", "number")),
    ((*Q, "--seq-length", "12.5"), ("--seq-length '12.5'", "integer")),
    ((*Q, "--max-position-embeddings", "64"), ("64", "128")),
    ((*Q, "--context-parallel-size", "2", "--nproc-per-node", "2"), ("not available", "use 1")),
    ((*Q, "--sequence-parallel"), ("--no-sequence-parallel",)),
    ((*Q, "--lr-decay-style", "cosin"), ("constant, linear, cosine", "did you mean cosine?")),
    ((*Q, "--optimizer", "adamw"), ("did you mean adam?",)),
    ((*Q, "--model", "lama"), ("did you mean llama?",)),
    ((*Q, "--lr-warmup-fraction", "none", "--lr-warmup-iters", "200"), ("200", "199")),
    ((*Q, "--train-samples", "640"), ("--train-iters", "--train-samples 640")),
    ((*Q, "--recompute-granularity", "full"), ("--recompute-method",)),
    ((*Q, "--vocab-size", "100"), ("100", "257")),
    ((*Q, "--load", "nowhere"), ("nowhere", "--auto-resume")),
    ((*Q, "--num-layer", "3"), ("unknown flag --num-layer", "--num-layers")),
    ((*Q, "--cpu-optimizer"), ("unknown flag --cpu-optimizer",)),
    ((*Q, "--data-path", "data/my"), ("--data-path",)),
    ((*Q, "--dataset", "gpt"), ("--data-path",)),
    ((*Q, "--dataset", "gpt", "--data-path", "nowhere"), ("nowhere",)),
    ((*Q, "--vocab-file", "v.json"), ("--vocab-file",)),
    ((*Q, "--split", "1,x"), ("--split",)),
    ((*Q, "--nproc-per-node", "0"), ("--nproc-per-node '0'",)),
    ((*Q, "extra"), ("unexpected extra argument",)),
    (("train",), ("--train-iters", "--data-path")),
    (("train", "gpt2-small"), ("--data-path", "--vocab-file")),
    (("train", "quickstrat"), ("did you mean quickstart?",)),
    (("trian",), ("did you mean train?",)),
    (("train", "quickstart", "--name", "../up"), ("--name '../up'",)),
    (("verify", "quickstart", "--tensor-model-parallel-size", "3"), ("3",)),
    (("eval",), ("--load",)),
    (("eval", "--load", "nowhere"), ("nowhere",)),
    (("eval", "--load", "nowhere", "--lr", "3"), ("unknown flag --lr",)),
    (("generate", "--prompt", "a"), ("--load",)),
    (("generate", "--load", "nowhere", "--prompt", "a"), ("nowhere",)),
    (("generate", "--load", "x", "--prompt", "a", "--greedy", "--top-p", "0.5"), ("--greedy", "--top-p")),
    (("generate", "--load", "x", "--prompt", "a", "--temperature", "0"), ("--temperature", "--greedy")),
    (("generate", "--load", "x", "--prompt", "a", "--top-p", "1.5"), ("--top-p 1.5",)),
    (("generate", "--load", "x", "--prompt", "a", "--seed", "3", "--greedy"), ("--greedy with --seed", "not drawn")),
    (
        ("data", "prepare", "--input", "nowhere", "--output-prefix", "x", "--tokenizer-type", "ByteTokenizer"),
        ("nowhere",),
    ),
    (("data", "prepare", "--input", "nowhere", "--output-prefix", "x"), ("--tokenizer-type",)),
    (("data", "prepare", "--inputs", "nowhere", "--output-prefix", "x"), ("unknown flag --inputs", "--input?")),
    (("data", "inspect", "nowhere"), ("nowhere",)),
    (("recipes", "show", "llama"), ("no recipe 'llama'",)),
]


@pytest.fixture(scope="module")
def help_text() -> str:
    """Help of every command, from one process."""
    code = (
        "from mcore_cli.main import run\n"
        "for c in (['train'], ['verify'], ['eval'], ['generate'], ['data', 'prepare'], ['data', 'inspect']):\n"
        "    try:\n        run([*c, '--help'])\n"
        "    except SystemExit:\n        pass\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=[" ".join(case[0][-3:]) for case in MISTAKES])
def test_a_mistake_is_told(arguments, words, mcore, help_text, flags_in, monkeypatch) -> None:
    monkeypatch.setattr(launch, "run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    outcome = mcore(*arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    assert [word for word in words if word not in outcome.err] == []
    typed = {word.split("=")[0] for word in arguments if word.startswith("--")}
    assert flags_in(outcome.err) - typed <= flags_in(help_text)


def test_mistakes_of_all_kinds_are_told_together(mcore) -> None:
    outcome = mcore(
        *Q, "--bogus", "3", "--lr", "x", "--tensor-model-parallel-size", "3", "--load", "nowhere", "--split", "no"
    )  # fmt: skip
    lines = outcome.err.splitlines()
    assert lines[0] == f"{len(lines) - 1} errors:"
    for words in ("unknown flag --bogus", "--lr 'x'", "[world-size]", "[heads-per-rank]", "[load]", "--split"):
        assert any(words in line for line in lines), words


def test_the_process_exits_with_2_and_a_line() -> None:
    command = [sys.executable, "-m", "mcore_cli", "train", "quickstart", "--lrr", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: unknown flag --lrr; did you mean --lr?\n")


def test_under_a_launcher_only_the_first_rank_tells(mcore, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    waited: list[float] = []
    monkeypatch.setattr(run_options.time, "sleep", waited.append)
    for rank, told in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        outcome = mcore(*Q, "--tensor-model-parallel-size", "3")
        assert outcome.code == 2
        assert ("[world-size] 2 ranks" in outcome.err) == told
        assert bool(waited) != told


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--hidden-size", "99999999999999999999"), ("--hidden-size", "at most")),
        (("--nproc-per-node", "100000"), ("--nproc-per-node", "1024")),
        (("--seed", "99999999999999999999999"), ("--seed", "at most")),
        (("--save", ""), ("--save", "at least 1 character")),
        (("--split", "nan,1,1", "--dataset", "stdlib"), ("--split", "969,30,1")),
        (("--split", "-1,1,1", "--dataset", "stdlib"), ("--split", "969,30,1")),
    ],
)
def test_absurd_values_are_told_at_once(mcore, flags, words):
    outcome = mcore("train", "quickstart", *flags)
    assert outcome.code == 2
    assert all(word in outcome.err for word in words)
    assert "Traceback" not in outcome.err


def test_a_save_folder_that_cannot_be_made(mcore, tmp_path):
    (tmp_path / "file").write_text("")
    outcome = mcore("train", "quickstart", "--save", str(tmp_path / "file" / "x"))
    assert outcome.code == 2
    assert f"{tmp_path}/file is no folder" in outcome.err


def test_verify_refuses_what_has_no_say(mcore):
    outcome = mcore("verify", "quickstart", "--load", "nope", "--eval-iters", "5")
    assert outcome.code == 2
    assert "--eval-iters, --load: mcore verify takes one step from fresh weights" in outcome.err


@pytest.mark.parametrize(("rank", "world"), [("5", "2"), ("-1", "2")])
def test_a_rank_outside_its_world(mcore, monkeypatch, rank, world):
    for name, value in {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    outcome = mcore("train", "quickstart")
    assert outcome.code == 2
    assert f"rank {rank} of {world}" in outcome.err
