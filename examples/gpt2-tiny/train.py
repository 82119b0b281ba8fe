"""Makes ``vocab.json`` and ``merges.txt`` here: a GPT-2 BPE of 1024 tokens, from this Python's standard library.

    python examples/gpt2-tiny/train.py

The tokens depend on the sources that are read, so another version of Python gives other files.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from mcore_data.sources import decode_text
from mcore_data.stdlib_corpus import stdlib_files, stdlib_folder

VOCAB_SIZE = 1024
EOD = "<|endoftext|>"


def main(folder: Path) -> None:
    """Train on at most 8 MB of text and write both files into ``folder``."""
    source = stdlib_folder()
    texts = [decode_text((source / name).read_bytes()) for name, _ in stdlib_files(source, 8_000_000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE - 1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text for text in texts if text], trainer)
    tokenizer.model.save(str(folder))
    # As in GPT-2, the end of document is the last token, and no merge leads to it.
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    vocab[EOD] = len(vocab)
    text = json.dumps(dict(sorted(vocab.items(), key=lambda entry: entry[1])), ensure_ascii=False, indent=0)
    (folder / "vocab.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(__file__).parent)
