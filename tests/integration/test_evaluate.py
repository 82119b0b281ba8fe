"""``mcore eval``: data that has a validation split alone, on any layout."""

from __future__ import annotations

import math
import re

import pytest
import tiny
import torch

from mcore_cli import evaluate, main
from mcore_cli.build import build_validation
from mcore_data.datasets import dataset_registry
from mcore_data.prepare import prepare
from mcore_data.tokenizers.build import build_tokenizer
from mcore_parallel.axis import single_layout


@pytest.fixture
def corpus(tmp_path):
    config = tiny.tiny_config(tiny.GPT, tokenizer_type="ByteTokenizer", tokenizer_model=None)
    text = tmp_path / "text.jsonl"
    text.write_text("".join(f'{{"text": "document number {i} of this corpus"}}\n' for i in range(40)))
    tokenizer = build_tokenizer(config.data, tiny.fresh_manager())
    prepare([text], tmp_path / "a", tokenizer, append_eod=True, workers=1)
    return tmp_path / "a_text_document"


def test_a_validation_split_alone_is_enough(corpus):
    config = tiny.tiny_config(
        tiny.GPT,
        dataset="gpt",
        data_path=[str(corpus)],
        split="0,1,0",
        tokenizer_type="ByteTokenizer",
        tokenizer_model=None,
        eval_iters=2,
    )
    manager = tiny.fresh_manager()
    assert "gpt" in dataset_registry(manager).names()
    loader = build_validation(config, build_tokenizer(config.data, manager), single_layout(), manager=manager)
    assert sum(len(batch.tokens) for batch in loader.micro_batches(0)) == 8
    loader.close()


def test_eval_of_a_trained_run(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = ["--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "8"]
    data = ["--data-path", str(corpus), "--tokenizer-type", "ByteTokenizer"]
    batch = ["--global-batch-size", "4", "--train-iters", "2", "--save", "run", "--device", "cpu"]
    assert main.run(["train", *model, *data, *batch, "--lr", "1e-2"]) == 0
    capsys.readouterr()
    for split in ("0,1,0", "1,1,1"):
        assert main.run(["eval", "--load", "run", "--split", split, "--eval-iters", "2"]) == 0
        out = capsys.readouterr().out
        loss, perplexity = (float(x) for x in re.search(r"loss ([\d.]+), perplexity ([\d.]+)", out).groups())
        assert perplexity == pytest.approx(math.exp(loss), rel=1e-3)
        assert loss < math.log(257) + 1
        assert "64 validation tokens" in out


def test_perplexity_of_a_hopeless_model_is_infinite():
    assert evaluate.perplexity(800.0) == math.inf
    assert evaluate.perplexity(0.0) == 1.0
    assert torch.isfinite(torch.tensor(evaluate.perplexity(700.0), dtype=torch.float64))
