"""Where tokens come from. Field names are Megatron's; a field's description is its flag's help. No torch."""

from __future__ import annotations

from mcore_parallel.config import Section
from pydantic import Field


class DataConfig(Section):
    """Corpus, tokenizer and how samples are cut and ordered."""

    dataset: str = Field("gpt", description="Dataset, by its plugin name: gpt (.bin/.idx), stdlib (quick start), mock.")
    data_path: list[str] = Field(
        default_factory=list, description="Prefix of .bin/.idx files (repeat or comma-separate for several)."
    )
    split: str = Field("969,30,1", description="Shares of train, validation and test.")
    seq_length: int = Field(1024, ge=1, description="Tokens per sample.")
    tokenizer_type: str | None = Field(
        None, description="Tokenizer, by its plugin name; --vocab-file with --merge-file implies GPT2BPETokenizer."
    )
    tokenizer_model: str | None = Field(None, description="File of the tokenizer (tokenizer.json).")
    vocab_file: str | None = Field(None, description="vocab.json of GPT2BPETokenizer.")
    merge_file: str | None = Field(None, description="merges.txt of GPT2BPETokenizer.")
    eod_mask_loss: bool = Field(False, description="No loss where the input is the end-of-document token.")
    data_cache_path: str | None = Field(None, description="Folder for built indices; default beside the data.")
