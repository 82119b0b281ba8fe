"""Where tokens come from. Field names are Megatron's; a field's description is its flag's help. No torch."""

from __future__ import annotations

from pydantic import Field

from mcore_parallel.config import Section


class DataConfig(Section):
    """Corpus, tokenizer and how samples are cut and ordered."""

    dataset: str = Field("gpt", description="Dataset, by its plugin name: gpt (.bin/.idx), stdlib (quick start), mock.")
    data_path: list[str] = Field(
        default_factory=list, description="Prefix of .bin/.idx files; several, or weight prefix pairs, are blended."
    )
    split: str = Field("969,30,1", description="Shares of train, validation and test.")
    seq_length: int = Field(1024, ge=1, description="Tokens per sample.")
    tokenizer_type: str | None = Field(
        None, description="Tokenizer, by its plugin name; --vocab-file with --merge-file implies GPT2BPETokenizer."
    )
    tokenizer_model: str | None = Field(
        None, description="File of the tokenizer (tokenizer.json); for NullTokenizer the number of ids."
    )
    vocab_file: str | None = Field(None, description="vocab.json of GPT2BPETokenizer.")
    merge_file: str | None = Field(None, description="merges.txt of GPT2BPETokenizer.")
    eod_mask_loss: bool = Field(False, description="No loss where the input is the end-of-document token.")
    data_cache_path: str | None = Field(
        None,
        description="Folder that keeps built sample orders (default: built in memory) and the corpus of --dataset "
        "stdlib (default: the user's cache folder).",
    )
