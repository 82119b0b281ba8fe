"""``mcore data prepare`` and ``mcore data inspect``."""

from __future__ import annotations

from pathlib import Path

import click

from mcore_cli.config import RunConfig
from mcore_cli.main import manager_of
from mcore_cli.options import SectionCommand, given_flags, section_options
from mcore_cli.resolve import override

TOKENIZER_FIELDS = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")


@click.group()
def data() -> None:
    """Prepare a corpus for training, or look into one."""


@section_options(RunConfig, TOKENIZER_FIELDS)
@data.command(cls=SectionCommand)
@click.option("--input", "inputs", multiple=True, required=True, metavar="PATH ...", help="Files or folders with text.")
@click.option("--output-prefix", required=True, metavar="PREFIX", help="Writes PREFIX_KEY_document.bin and .idx.")
@click.option("--append-eod/--no-append-eod", default=False, help="End every document with the end-of-document token.")
@click.option("--json-keys", multiple=True, metavar="KEY ...", help="Keys of JSON lines to prepare.  [default: text]")
@click.option("--workers", default=1, metavar="INTEGER", type=click.IntRange(min=1), help="Processes that tokenise.")
@click.pass_context
def prepare(
    ctx: click.Context,
    inputs: tuple[str, ...],
    output_prefix: str,
    append_eod: bool,
    json_keys: tuple[str, ...],
    workers: int,
    **_flags: object,
) -> None:
    """Tokenise text into the .bin/.idx files that --data-path reads.

    Takes JSON lines (by suffix, also .gz), text files and folders of them; --vocab-file with --merge-file implies
    GPT2BPETokenizer.
    """
    from mcore_cli.progress import byte_progress
    from mcore_data.prepare import prepare as prepare_files
    from mcore_data.tokenizers.build import build_tokenizer

    config = override(RunConfig(), given_flags(ctx))
    tokenizer = build_tokenizer(config.data, manager_of(ctx))
    keys = json_keys or ("text",)
    replaced = [path for key in keys if (path := Path(f"{output_prefix}_{key}_document.idx")).exists()]
    with byte_progress("preparing") as show:
        report = prepare_files(
            inputs,
            output_prefix,
            tokenizer,
            json_keys=keys,
            append_eod=append_eod,
            workers=workers,
            on_progress=lambda at: show(
                at.bytes_done, at.bytes_total, f"{at.documents:,} documents, {at.tokens:,} tokens"
            ),
        )
    click.echo(f"{report.documents:,} documents, {report.tokens:,} tokens ({report.dtype}) with {tokenizer.name}")
    remarks = {
        "of them empty (no token, no end of document)": report.empty_documents,
        "files passed over: no text": report.skipped_files,
        "blank lines passed over": report.blank_lines,
    }
    for remark, count in remarks.items():
        if count:
            click.echo(f"{count:,} {remark}")
    for path in replaced:
        click.echo(f"replaced {path} and its .bin")
    for prefix in report.prefixes:
        click.echo(f"wrote {prefix}.bin and .idx; train on it with --data-path {prefix}")


@section_options(RunConfig, TOKENIZER_FIELDS)
@data.command(cls=SectionCommand)
@click.argument("prefix")
@click.option("--documents", default=3, type=click.IntRange(min=0), metavar="INTEGER", help="Documents to show.")
@click.option("--tokens", default=64, type=click.IntRange(min=1), metavar="INTEGER", help="Tokens to show of each.")
@click.pass_context
def inspect(ctx: click.Context, prefix: str, documents: int, tokens: int, **_flags: object) -> None:
    """Show sizes and the first documents of PREFIX.bin/.idx; as text if a tokenizer is given, else as ids."""
    from mcore_data.indexed_dataset import IndexedDataset, resolve_prefix
    from mcore_data.tokenizers.build import build_tokenizer

    given = given_flags(ctx)
    tokenizer = build_tokenizer(override(RunConfig(), given).data, manager_of(ctx)) if given else None
    indexed = IndexedDataset(resolve_prefix(prefix))
    click.echo(
        f"{indexed.prefix}: {indexed.num_documents:,} documents, {len(indexed):,} sequences, "
        f"{indexed.num_tokens:,} tokens of {indexed.dtype}"
    )
    starts = indexed.document_indices
    for number in range(min(documents, indexed.num_documents)):
        ids = [int(i) for s in range(starts[number], starts[number + 1]) for i in indexed[s][:tokens]][:tokens]
        shown = repr(tokenizer.decode(ids)) if tokenizer is not None else " ".join(str(i) for i in ids)
        click.echo(f"document {number}: {shown}")
