"""The built-in data sets, and what can be known about a configuration's data before any process starts. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_data.blend import parse_data_path
from mcore_data.config import DataConfig
from mcore_data.gpt_dataset import SampleDataset, SampleRules
from mcore_data.indexed_dataset import IndexedDataset, IndexedDatasetError, resolve_prefix
from mcore_data.mixture import Mixture, SplitRequest, empty_split
from mcore_data.mock_dataset import MockDataset
from mcore_data.specs import OPTIONAL_FIELDS, DatasetSpec, Tokenizer
from mcore_data.splits import SPLIT_NAMES, split_shares
from mcore_data.stdlib_corpus import stdlib_files, stdlib_folder, stdlib_prefix
from mcore_data.tokenizers.build import build_tokenizer
from mcore_parallel.plugins import PluginManager, Registry, plugin_manager

Splits = tuple[SampleDataset | None, SampleDataset | None, SampleDataset | None]
NumSamples = tuple[int, int, int]

_SCANNED_TOKENS = 4_000_000


def dataset_registry(manager: PluginManager) -> Registry[DatasetSpec]:
    """All registered data sets by name."""
    return Registry("dataset", manager.collect("mcore_datasets"))


def build_gpt(config: DataConfig, *, tokenizer: Tokenizer, num_samples: NumSamples, seed: int) -> Splits:
    """GPT samples of ``--data-path``, blended if it names several.

    Raises:
        ValueError: bad paths, weights or files, or an empty split.
    """
    names, weights = parse_data_path(config.data_path)
    prefixes = [resolve_prefix(name) for name in names]
    return _indexed_splits(config, prefixes, weights, tokenizer=tokenizer, num_samples=num_samples, seed=seed)


def build_stdlib(config: DataConfig, *, tokenizer: Tokenizer, num_samples: NumSamples, seed: int) -> Splits:
    """GPT samples of the standard library's sources; the corpus is prepared at the first call.

    Raises:
        ValueError: no sources, a cache folder that cannot be written, or an empty split.
    """
    prefix = stdlib_prefix(tokenizer, config.data_cache_path)
    return _indexed_splits(config, [prefix], None, tokenizer=tokenizer, num_samples=num_samples, seed=seed)


def build_mock(config: DataConfig, *, tokenizer: Tokenizer, num_samples: NumSamples, seed: int) -> Splits:
    """Random tokens of the tokenizer's vocabulary."""
    train, valid, test = (
        MockDataset(wanted, config.seq_length, tokenizer.vocab_size, seed, stream) if wanted else None
        for stream, wanted in enumerate(num_samples)
    )
    return train, valid, test


def _indexed_splits(
    config: DataConfig,
    prefixes: Sequence[str],
    weights: list[float] | None,
    *,
    tokenizer: Tokenizer,
    num_samples: NumSamples,
    seed: int,
) -> Splits:
    opened = {prefix: IndexedDataset(prefix) for prefix in prefixes}
    rules = SampleRules(seq_length=config.seq_length, seed=seed, eod=tokenizer.eod, eod_mask_loss=config.eod_mask_loss)
    members = [opened[prefix] for prefix in prefixes]
    mixture = Mixture(members, weights, rules, cache_folder=config.data_cache_path)
    train, valid, test = (
        mixture.build(request) if request.num_samples else None for request in _requests(config, num_samples)
    )
    return train, valid, test


def _requests(config: DataConfig, num_samples: NumSamples) -> list[SplitRequest]:
    shares = split_shares(config.split)
    return [SplitRequest(*parts) for parts in zip(SPLIT_NAMES, shares, num_samples, strict=True)]


def check_data(
    config: DataConfig,
    vocab_size: int | None,
    *,
    num_samples: NumSamples = (1, 0, 0),
    manager: PluginManager | None = None,
) -> list[str]:
    """All problems of the data that can be known before any process starts; quick, and no torch.

    Args:
        config: the data section.
        vocab_size: ids that the model knows, None if it follows the tokenizer.
        num_samples: samples wanted per split; only splits with some are checked.
        manager: where tokenizers and data sets are registered; None takes what is installed.
    """
    manager = plugin_manager() if manager is None else manager
    try:
        spec = dataset_registry(manager)[config.dataset]
    except ValueError as error:
        return [str(error)]
    problems = _unread_fields(config, spec)
    tokenizer = None
    try:
        tokenizer = build_tokenizer(config, manager)
    except ValueError as error:
        problems.append(str(error))
    if tokenizer is not None:
        problems += _check_tokenizer(config, tokenizer, vocab_size)
        vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
    if spec.check is not None:
        problems += spec.check(config, vocab_size=vocab_size, num_samples=num_samples)
    return problems


def _unread_fields(config: DataConfig, spec: DatasetSpec) -> list[str]:
    unread = [field for field in OPTIONAL_FIELDS if field not in spec.fields]
    return [
        f"--{field.replace('_', '-')} has no effect with --dataset {spec.name}; drop it or choose another --dataset"
        for field in unread
        if getattr(config, field) != DataConfig.model_fields[field].get_default(call_default_factory=True)
    ]


def _check_tokenizer(config: DataConfig, tokenizer: Tokenizer, vocab_size: int | None) -> list[str]:
    problems = []
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        problems.append(
            f"{tokenizer.name} has {tokenizer.vocab_size} ids, but the model's --vocab-size is {vocab_size}; "
            f"raise it to {tokenizer.vocab_size} or leave it out"
        )
    if config.eod_mask_loss and tokenizer.eod is None:
        problems.append(f"--eod-mask-loss: {tokenizer.name} has no end-of-document token; drop the flag")
    return problems


def check_stdlib(config: DataConfig, *, vocab_size: int | None, num_samples: NumSamples) -> list[str]:
    """Whether this Python has sources and every wanted split has a share of them."""
    try:
        stdlib_files(stdlib_folder())
        requests = _requests(config, num_samples)
    except ValueError as error:
        return [str(error)]
    return [
        f"--split {config.split} gives the {request.name} split no share, but {request.num_samples} of its samples "
        "are needed"
        for request in requests
        if request.num_samples and request.share is None
    ]


def check_gpt(config: DataConfig, *, vocab_size: int | None, num_samples: NumSamples) -> list[str]:
    """Missing or damaged files, empty splits, and ids unknown to the model among the first few million tokens."""
    try:
        names, weights = parse_data_path(config.data_path)
        requests = [request for request in _requests(config, num_samples) if request.num_samples]
    except ValueError as error:
        return [str(error)]
    problems: list[str] = []
    for position, name in enumerate(names):
        if weights is not None and weights[position] == 0:
            continue
        try:
            indexed = IndexedDataset(resolve_prefix(name))
        except (IndexedDatasetError, ValueError) as error:
            problems.append(str(error))
            continue
        problems += [problem for request in requests if (problem := empty_split(indexed, request)) is not None]
        problems += _check_ids(indexed, vocab_size, _SCANNED_TOKENS // len(names))
    return list(dict.fromkeys(problems))


def _check_ids(indexed: IndexedDataset, vocab_size: int | None, scanned: int) -> list[str]:
    if indexed.dtype.kind == "f":
        return [f"{indexed.prefix} holds {indexed.dtype} values, not token ids; prepare it with a tokenizer"]
    tokens = indexed.tokens(0, scanned)
    if vocab_size is None or not len(tokens):
        return []
    if int(tokens.max()) < vocab_size and int(tokens.min()) >= 0:
        return []
    at = int(((tokens >= vocab_size) | (tokens < 0)).argmax())
    return [
        f"{indexed.prefix}: token {tokens[at]} at position {at} is not in the model's vocabulary of {vocab_size}; "
        "train with the tokenizer that prepared the data, or raise --vocab-size"
    ]
