"""Generation goes through the pipeline, and no layout changes the text."""

from __future__ import annotations

import io

import pytest
import tiny
import torch

from mcore_cli import generate, main
from mcore_cli.text_request import TextRequest
from mcore_data.tokenizers.build import build_tokenizer
from mcore_parallel.testing import run_ranks

MODEL = ["--num-layers", "4", "--hidden-size", "16", "--num-attention-heads", "4", "--seq-length", "32"]
RUN = ["--global-batch-size", "8", "--train-iters", "3", "--lr", "2e-2", "--save", "run", "--device", "cpu"]
DATA = ["--dataset", "mock", "--tokenizer-type", "ByteTokenizer"]


@pytest.fixture(scope="module", params=["gpt", "llama"])
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    extra = ["--ffn-hidden-size", "32"] if request.param == "llama" else []
    run = [*RUN[:-3], str(folder / "run"), *RUN[-2:]]
    assert main.run(["train", "--model", request.param, *MODEL, *extra, *DATA, *run]) == 0
    return str(folder / "run")


def _text(rank, world, load, parallel, request):
    """What the first rank would print under a layout."""
    from contextlib import contextmanager, redirect_stdout
    from unittest import mock

    from mcore_ckpt.find import open_checkpoint
    from mcore_cli.resolve import complete, override, run_tree

    tree = run_tree(tiny.fresh_manager())
    saved = tree.model_validate(open_checkpoint(load).state["config"])
    config = complete(override(saved, {"micro_batch_size": 1, "global_batch_size": 1, "load": load, **parallel}), world)

    @contextmanager
    def joined(_config):
        yield tiny.world_of(rank, world)

    out = io.StringIO()
    with mock.patch.object(generate, "join_world", joined), redirect_stdout(out):
        generate.run(config, request)
    return out.getvalue()


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (2, {"pipeline_model_parallel_size": 2}),
        (4, {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}),
        (2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv"}),
        (2, {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "E|ttt|t|L"}),
    ],
    ids=["pp2", "tp2-pp2", "zbv", "empty-ends"],
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_layout_writes_the_same_text(trained, world, parallel, temperature):
    request = TextRequest("ab", 12, temperature, 0.95, 7)
    (want,) = [_text(0, 1, trained, {}, request)]
    first, *others = run_ranks(_text, world, trained, parallel, request)
    assert first == want
    assert want.startswith("ab")
    assert set(others) == {""}


def test_a_text_needs_one_copy_of_the_model(trained, capsys):
    assert main.run(["generate", "--load", trained, "--prompt", "a", "--nproc-per-node", "4"]) == 2
    assert "4 rank(s) for tp x pp = 1" in capsys.readouterr().err


def test_an_empty_prompt_is_refused(trained, capsys):
    assert main.run(["generate", "--load", trained, "--prompt", "", "--device", "cpu"]) == 2
    assert "the prompt has no token" in capsys.readouterr().err


def test_characters_of_several_tokens_are_written_whole():
    tokenizer = build_tokenizer(
        tiny.tiny_config(tiny.GPT, tokenizer_type="ByteTokenizer", tokenizer_model=None).data, tiny.fresh_manager()
    )
    out = io.StringIO()
    writer = generate.TextWriter(tokenizer, out, list(b"a"))
    for byte in "é".encode():
        writer.add(byte)
        assert out.getvalue() in ("a", "aé")
    writer.end()
    assert out.getvalue() == "aé\n"
    assert torch.is_grad_enabled()
