"""Built-in plugins of mcore-data, registered through the same hooks as anybody's."""

from mcore_data.specs import DatasetSpec, TokenizerSpec
from mcore_parallel.plugins import hookimpl, lazy


@hookimpl
def mcore_tokenizers() -> list[TokenizerSpec]:
    """Tokenizers that need no download or read local files."""
    return [
        TokenizerSpec(
            "ByteTokenizer",
            lazy("mcore_data.tokenizers.plain:build_byte_tokenizer"),
            summary="UTF-8 bytes and one end-of-document id; needs no file",
        ),
        TokenizerSpec(
            "GPT2BPETokenizer",
            lazy("mcore_data.tokenizers.bpe:build_gpt2_tokenizer"),
            fields=("vocab_file", "merge_file"),
            summary="GPT-2's byte-level BPE from vocab.json and merges.txt",
        ),
        TokenizerSpec(
            "HuggingFaceTokenizer",
            lazy("mcore_data.tokenizers.bpe:build_huggingface_tokenizer"),
            fields=("tokenizer_model",),
            summary="a tokenizer.json file",
        ),
        TokenizerSpec(
            "NullTokenizer",
            lazy("mcore_data.tokenizers.plain:build_null_tokenizer"),
            fields=("tokenizer_model",),
            summary="text that is already ids; --tokenizer-model gives how many",
        ),
    ]


@hookimpl
def mcore_datasets() -> list[DatasetSpec]:
    """Indexed files, the quick start's corpus and random tokens."""
    return [
        DatasetSpec(
            "gpt",
            lazy("mcore_data.datasets:build_gpt"),
            check=lazy("mcore_data.datasets:check_gpt"),
            summary="GPT samples from .bin/.idx files, single or blended",
        ),
        DatasetSpec(
            "stdlib",
            lazy("mcore_data.datasets:build_stdlib"),
            check=lazy("mcore_data.datasets:check_stdlib"),
            fields=("split", "eod_mask_loss", "data_cache_path"),
            summary="quick start: the source text of this Python's standard library",
        ),
        DatasetSpec(
            "mock",
            lazy("mcore_data.datasets:build_mock"),
            fields=(),
            summary="random tokens, for tests of speed and memory",
        ),
    ]
