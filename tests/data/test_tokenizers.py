"""Tokenizers: round trips, end of document, special text, files that are missing or do not fit."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from mcore_data.config import DataConfig
from mcore_data.specs import TokenizerSpec
from mcore_data.testing import check_tokenizer
from mcore_data.tokenizers.build import build_tokenizer, tokenizer_registry
from mcore_parallel.plugins import plugin_manager

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt2-tiny"
GPT2 = {"vocab_file": str(EXAMPLE / "vocab.json"), "merge_file": str(EXAMPLE / "merges.txt")}


@pytest.fixture(scope="module")
def manager():
    return plugin_manager()


@pytest.fixture(scope="module")
def build(manager):
    return lambda **fields: build_tokenizer(DataConfig(**fields), manager)


@pytest.fixture(scope="module")
def gpt2(build):
    return build(**GPT2)


@pytest.fixture(scope="module")
def byte(build):
    return build(tokenizer_type="ByteTokenizer")


def write_tokenizer_json(path, specials=("<s>", "</s>"), *, add_bos=True):
    """A byte-level tokenizer.json with special tokens, a post-processor that adds BOS, truncation and padding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(specials))
    if specials and add_bos:
        first = specials[0]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, backend.token_to_id(first))]
        )
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(path))
    return backend


def test_builtins_are_registered(manager):
    registry = tokenizer_registry(manager)
    assert {"ByteTokenizer", "GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer"} <= set(registry.names())
    assert all(isinstance(spec, TokenizerSpec) and spec.summary for spec in registry)


def test_conformance(byte, gpt2, build, tmp_path):
    check_tokenizer(byte)
    check_tokenizer(gpt2)
    write_tokenizer_json(tmp_path / "tokenizer.json")
    check_tokenizer(build(tokenizer_model=str(tmp_path / "tokenizer.json")))
    null = build(tokenizer_type="NullTokenizer", tokenizer_model="50")
    check_tokenizer(null, ("", "1 2 3", "49 0"))


@settings(max_examples=40, deadline=None)
@given(text=st.text())
def test_any_text_comes_back(byte, gpt2, text):
    assert byte.decode(byte.encode(text)) == text
    ids = gpt2.encode(text)
    assert gpt2.decode(ids) == text
    assert gpt2.eod not in ids


def test_byte_tokenizer(byte):
    assert (byte.vocab_size, byte.eod, byte.name) == (257, 256, "ByteTokenizer")
    assert byte.encode("aé") == [97, 0xC3, 0xA9]
    assert byte.decode([97, 256, 0xC3, 300, -1]) == "a\ufffd"


def test_gpt2_example_pair(gpt2):
    assert gpt2.name == "GPT2BPETokenizer"
    assert gpt2.vocab_size == len(json.loads((EXAMPLE / "vocab.json").read_text(encoding="utf-8"))) == 1024
    assert gpt2.eod == 1023
    assert len(gpt2.encode("    return self.name")) < 10
    assert gpt2.decode([*gpt2.encode("a b"), 1023, 5000]) == "a b"


def test_gpt2_equals_the_transformers_library(gpt2):
    """The same files give the same ids elsewhere (ordinary text, where no special token is in the way)."""
    reference = tokenizers.ByteLevelBPETokenizer(GPT2["vocab_file"], GPT2["merge_file"])
    for path in (EXAMPLE / "train.py", Path(__file__)):
        text = path.read_text(encoding="utf-8")
        assert gpt2.encode(text) == reference.encode(text).ids


def test_special_text_is_text(gpt2, build, tmp_path):
    ids = gpt2.encode("x<|endoftext|>y")
    assert gpt2.eod not in ids
    assert gpt2.decode(ids) == "x<|endoftext|>y"
    backend = write_tokenizer_json(tmp_path / "tokenizer.json")
    ours = build(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    assert backend.token_to_id("</s>") in backend.encode("x</s>").ids
    assert (
        ours.encode("x</s>")
        == pickle.loads(pickle.dumps(ours)).encode("x</s>")
        == backend.encode("x", add_special_tokens=False).ids[:1] + ours.encode("</s>")
    )
    assert backend.token_to_id("</s>") not in ours.encode("x</s>")


@pytest.mark.parametrize(
    ("specials", "settings_text", "eod"),
    [
        (("<bos>", "<unk>", "</s>", "<pad>"), None, "</s>"),
        (("<|endoftext|>",), None, "<|endoftext|>"),
        (("<both>", "</s>"), {"eos_token": "<both>", "bos_token": "<both>"}, "<both>"),
        (("<both>", "</s>"), {"eos_token": {"content": "<both>"}}, "<both>"),
        (("<bos>", "</s>"), {"eos_token": None}, "</s>"),
        (("<bos>",), None, None),
        ((), None, None),
    ],
)
def test_end_of_document_of_a_file(build, tmp_path, specials, settings_text, eod):
    backend = write_tokenizer_json(tmp_path / "tokenizer.json", specials)
    if settings_text is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_text))
    ours = build(tokenizer_model=str(tmp_path / "tokenizer.json"))
    assert ours.eod == (None if eod is None else backend.token_to_id(eod))
    assert ours.vocab_size == 256 + len(specials)
    # Nothing is added or cut, whatever the file says.
    assert len(ours.encode("123456789")) == 9
    assert ours.encode_batch(["1", "123456789"]) == [ours.encode("1"), ours.encode("123456789")]


def test_eos_that_the_file_does_not_know(build, tmp_path):
    write_tokenizer_json(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<other>"}')
    with pytest.raises(ValueError, match="eos_token '<other>' is not in tokenizer.json"):
        build(tokenizer_model=str(tmp_path / "tokenizer.json"))


def test_fingerprints_tell_tokenizers_apart(byte, gpt2, build, tmp_path):
    write_tokenizer_json(tmp_path / "a.json")
    write_tokenizer_json(tmp_path / "b.json", ("<s>", "</s>", "<x>"))
    found = {byte.fingerprint, gpt2.fingerprint}
    found |= {build(tokenizer_model=str(tmp_path / name)).fingerprint for name in ("a.json", "b.json")}
    found |= {build(tokenizer_type="NullTokenizer", tokenizer_model=count).fingerprint for count in ("5", "6")}
    assert len(found) == 6
    assert build(**GPT2).fingerprint == gpt2.fingerprint


def test_null_tokenizer(build):
    null = build(tokenizer_type="NullTokenizer", tokenizer_model="100")
    assert (null.vocab_size, null.eod) == (101, 100)
    assert null.encode(" 1  99\n0 ") == [1, 99, 0]
    assert null.decode([1, 100, 99]) == "1 99"
    for text, match in (("1 x", "takes numbers"), ("100", r"id 100 is not in 0\.\.99"), ("-1", "id -1")):
        with pytest.raises(ValueError, match=match):
            null.encode(text)


def test_implied_tokenizers(build, tmp_path):
    assert build(dataset="stdlib").name == build(dataset="mock").name == "ByteTokenizer"
    write_tokenizer_json(tmp_path / "tokenizer.json")
    assert build(tokenizer_model=str(tmp_path)).name == "HuggingFaceTokenizer"


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({}, "no tokenizer: give --vocab-file"),
        ({"tokenizer_type": "ByteTokeniser"}, "unknown tokenizer 'ByteTokeniser'; did you mean 'ByteTokenizer'"),
        ({"vocab_file": GPT2["vocab_file"]}, "GPT2BPETokenizer needs --merge-file"),
        ({"merge_file": GPT2["merge_file"]}, "GPT2BPETokenizer needs --vocab-file"),
        ({"tokenizer_type": "GPT2BPETokenizer"}, "needs --vocab-file"),
        ({"tokenizer_type": "HuggingFaceTokenizer"}, "needs --tokenizer-model"),
        ({"tokenizer_type": "NullTokenizer"}, "needs --tokenizer-model with the number of ids"),
        ({"tokenizer_type": "NullTokenizer", "tokenizer_model": "0"}, "number of ids"),
        ({"tokenizer_model": "/nowhere/tokenizer.json"}, "--tokenizer-model /nowhere/tokenizer.json: no such file"),
        ({**GPT2, "vocab_file": "/nowhere/v.json"}, "--vocab-file /nowhere/v.json: no such file"),
        ({**GPT2, "tokenizer_type": "ByteTokenizer"}, "--vocab-file, --merge-file has no effect with ByteTokenizer"),
        ({**GPT2, "tokenizer_model": "x"}, "--tokenizer-model has no effect with GPT2BPETokenizer"),
        ({"tokenizer_model": GPT2["merge_file"]}, "not a tokenizer.json"),
        ({**GPT2, "vocab_file": GPT2["merge_file"]}, "not JSON"),
        ({"vocab_file": GPT2["vocab_file"], "merge_file": GPT2["vocab_file"]}, "does not fit --vocab-file"),
    ],
)
def test_refusals(build, fields, match):
    with pytest.raises(ValueError, match=match) as caught:
        build(**fields)
    assert "\n" not in str(caught.value)


def test_vocabulary_without_all_bytes(build, tmp_path):
    (tmp_path / "v.json").write_text('{"a": 0}')
    (tmp_path / "m.txt").write_text("#version: 0.2\n")
    with pytest.raises(ValueError, match="255 of the 256 byte symbols are missing"):
        build(vocab_file=str(tmp_path / "v.json"), merge_file=str(tmp_path / "m.txt"))
    (tmp_path / "v.json").write_text('{"a": "b"}')
    with pytest.raises(ValueError, match="expected an object of token -> number"):
        build(vocab_file=str(tmp_path / "v.json"), merge_file=str(tmp_path / "m.txt"))


def test_literal_end_of_text_in_a_corpus(gpt2, tmp_path):
    from mcore_data.indexed_dataset import IndexedDataset
    from mcore_data.prepare import prepare

    lines = [json.dumps({"text": text}) for text in ("x<|endoftext|>y", "second")]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    report = prepare([tmp_path / "c.jsonl"], tmp_path / "out", gpt2, append_eod=True)
    data = IndexedDataset(report.prefixes[0])
    assert (data.tokens(0, data.num_tokens) == gpt2.eod).sum() == report.documents == 2
