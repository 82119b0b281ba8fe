"""From the configuration to a tokenizer."""

from __future__ import annotations

from mcore_data.config import DataConfig
from mcore_data.specs import Tokenizer, TokenizerSpec
from mcore_parallel.plugins import PluginManager, Registry

FILE_FIELDS = ("tokenizer_model", "vocab_file", "merge_file")
NEEDS_NO_FILES = ("stdlib", "mock")


def tokenizer_registry(manager: PluginManager) -> Registry[TokenizerSpec]:
    """All registered tokenizers by name."""
    return Registry("tokenizer", manager.collect("mcore_tokenizers"))


def tokenizer_type(config: DataConfig) -> str:
    """The name of the tokenizer that ``config`` asks for, given or implied.

    Raises:
        ValueError: none is given and the files imply none.
    """
    if config.tokenizer_type is not None:
        return config.tokenizer_type
    if config.vocab_file is not None or config.merge_file is not None:
        return "GPT2BPETokenizer"
    if config.tokenizer_model is not None:
        return "HuggingFaceTokenizer"
    if config.dataset in NEEDS_NO_FILES:
        return "ByteTokenizer"
    raise ValueError(
        "no tokenizer: give --vocab-file with --merge-file (GPT-2), --tokenizer-model tokenizer.json, "
        "or --tokenizer-type ByteTokenizer (needs no file)"
    )


def build_tokenizer(config: DataConfig, manager: PluginManager) -> Tokenizer:
    """The tokenizer of ``config``; ``--vocab-file`` with ``--merge-file`` implies GPT2BPETokenizer.

    Raises:
        ValueError: unknown name, missing or broken files, or a file that this tokenizer does not read.
    """
    spec = tokenizer_registry(manager)[tokenizer_type(config)]
    unread = [field for field in FILE_FIELDS if getattr(config, field) is not None and field not in spec.fields]
    if unread:
        flags = ", ".join("--" + field.replace("_", "-") for field in unread)
        reads = ", ".join("--" + field.replace("_", "-") for field in spec.fields) or "no file"
        raise ValueError(
            f"{flags} has no effect with {spec.name}, which reads {reads}; drop it or change the tokenizer"
        )
    return spec.build(config)
