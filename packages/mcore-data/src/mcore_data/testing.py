"""Conformance checks for plugins of mcore-data: call them from your own tests with what your spec builds."""

from __future__ import annotations

import pickle

import numpy as np

from mcore_data.gpt_dataset import Sample, SampleDataset
from mcore_data.specs import Tokenizer

TEXTS = (
    "",
    " ",
    "plain text",
    "  leading and trailing  ",
    "tab\tnewline\nreturn\r\n",
    "e\u0301 combining, \u00e9 composed",
    "\u6771\u4eac \u0417\u0434\u0440\u0430\u0432\u0441\u0442\u0432\u0443\u0439 \U0001f6a2\u200d\U0001f30a",
    "zero \x00 byte",
    "<|endoftext|></s><eos>",
)


def check_tokenizer(tokenizer: Tokenizer, texts: tuple[str, ...] = TEXTS, *, lossless: bool = True) -> None:
    """Assert what the rest of mcore relies on.

    Ids lie in the vocabulary, never are the end of document, do not depend on batching or pickling, and
    (``lossless``) decode to the text that they came from.

    Raises:
        AssertionError: a rule is broken.
    """
    assert isinstance(tokenizer, Tokenizer), f"{tokenizer} lacks a member of the Tokenizer protocol"
    assert tokenizer.eod is None or 0 <= tokenizer.eod < tokenizer.vocab_size, (tokenizer.eod, tokenizer.vocab_size)
    batch = tokenizer.encode_batch(texts)
    copied = pickle.loads(pickle.dumps(tokenizer))
    assert copied.fingerprint == tokenizer.fingerprint, "the fingerprint changes when pickled"
    for text, ids in zip(texts, batch, strict=True):
        assert ids == tokenizer.encode(text) == copied.encode(text), f"ids of {text!r} differ between calls"
        assert all(type(token) is int and 0 <= token < tokenizer.vocab_size for token in ids), (text, ids)
        assert tokenizer.eod not in ids, f"{text!r} gives the end of document"
        if lossless:
            assert tokenizer.decode(ids) == text, (text, tokenizer.decode(ids))
    assert tokenizer.encode_batch([]) == []
    if tokenizer.eod is not None:
        assert tokenizer.decode([tokenizer.eod]) == "", "the end of document decodes to text"


def check_dataset(dataset: SampleDataset, *, seq_length: int, vocab_size: int, samples: int = 16) -> None:
    """Assert that samples have the right shapes, types and ranges, and depend on their index alone.

    Raises:
        AssertionError: a rule is broken.
    """
    count = min(len(dataset), samples)
    assert count > 0, "an empty data set cannot be checked"
    copied = pickle.loads(pickle.dumps(dataset))
    assert len(copied) == len(dataset)
    first = [dataset[index] for index in range(count)]
    for index in reversed(range(count)):
        sample = first[index]
        kinds = [(part.dtype.name, part.shape) for part in sample]
        expected = [(name, (seq_length,)) for name in ("int64", "int64", "float32", "int64")]
        assert kinds == expected, f"sample {index}: {kinds}"
        for ids in (sample.tokens, sample.labels):
            assert ids.min() >= 0, f"sample {index} has a negative id"
            assert ids.max() < vocab_size, f"sample {index} has an id beyond {vocab_size}"
        others: list[Sample] = [dataset[index], copied[index]]
        for other in others:
            same = [np.array_equal(getattr(sample, name), getattr(other, name)) for name in Sample._fields]
            assert all(same), f"sample {index} changes"
    for outside in (len(dataset), -1):
        try:
            dataset[outside]
        except IndexError:
            continue
        raise AssertionError(f"sample {outside} of {len(dataset)} is not refused with IndexError")
