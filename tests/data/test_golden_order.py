"""Megatron's sample orders, blends and samplers, number for number."""

from __future__ import annotations

import json
import pickle
import zlib
from pathlib import Path

import numpy as np
import pytest

from mcore_data.blend import BlendedDataset, blending_index, exhaustive_index
from mcore_data.gpt_dataset import GPTDataset, SampleRules
from mcore_data.indexed_dataset import IndexedDataset
from mcore_data.mixture import Mixture, SplitRequest
from mcore_data.sample_order import document_index, sample_boundaries, shuffle_index
from mcore_data.sampler import rank_sample_ids
from mcore_data.splits import parse_split, split_range, split_shares

GOLDEN = Path(__file__).parent / "golden_megatron"


def load(name):
    return json.loads((GOLDEN / f"{name}.json").read_text())


HELPERS = load("helpers")
NAMES = ("train", "valid", "test")


def crc(array, dtype):
    return zlib.crc32(np.ascontiguousarray(array, dtype=dtype).tobytes())


def build_case(case, which, cache_folder=None):
    share = split_shares(case["split"])[which]
    if share is None:
        return None
    options, tokenizer = case["options"], case["tokenizer"]
    pad = tokenizer["pad"] if tokenizer["pad"] != tokenizer["eod"] else None
    rules = SampleRules(
        seq_length=case["sequence_length"],
        seed=case["seed"],
        eod=tokenizer["eod"],
        eod_mask_loss=options.get("eod_mask_loss", False),
        pad_id=pad,
        add_extra_token=options.get("add_extra_token_to_sequence", True),
    )
    indexed = IndexedDataset(GOLDEN / "data" / case["prefix"])
    return GPTDataset(
        indexed,
        split_range(share, len(indexed)),
        rules,
        num_samples=case["sizes"][which],
        keep_partial=which == 1 and not options.get("drop_last_partial_validation_sequence", True),
        cache_folder=cache_folder,
    )


def check_samples(data, facts, *, positions, masks):
    for index, expected in facts["samples"].items():
        sample = data[int(index)]
        assert sample.tokens.tolist() == expected["tokens"]
        assert sample.labels.tolist() == expected["labels"]
        if masks:
            assert sample.loss_mask.tolist() == expected["loss_mask"]
        if positions:
            assert sample.position_ids.tolist() == expected["position_ids"]
        assert [part.dtype.name for part in sample] == ["int64", "int64", "float32", "int64"]
    samples = [data[index] for index in range(len(facts["tokens_crc32"]))]
    assert [crc(sample.tokens, "<i8") for sample in samples] == facts["tokens_crc32"]
    assert [crc(sample.labels, "<i8") for sample in samples] == facts["labels_crc32"]


@pytest.mark.parametrize("case", load("gpt_dataset"), ids=lambda case: case["name"])
def test_gpt_dataset(case, tmp_path):
    for which, facts in enumerate(case["splits"]):
        data = build_case(case, which, cache_folder=tmp_path)
        if facts is None:
            assert data is None
            continue
        assert facts["split"] == NAMES[which]
        assert len(data) == facts["length"]
        assert list(data.split) == facts["documents_range"]
        order = data.order
        assert order.num_epochs == facts["num_epochs"]
        assert len(order.documents) == facts["document_index_len"]
        assert crc(order.documents, "<i4") == facts["document_index_crc32_int32le"]
        assert order.boundaries.dtype.name == facts["sample_index_dtype"]
        assert crc(order.boundaries, "<i4") == facts["sample_index_crc32_int32le"]
        assert order.shuffle.dtype.name == facts["shuffle_index_dtype"]
        assert crc(order.shuffle, "<u4") == facts["shuffle_index_crc32_uint32le"]
        positions = not case["options"].get("reset_position_ids", False)
        check_samples(data, facts, positions=positions, masks=True)
        # Without the cache, through the cache, and after a trip to another process: the same.
        again = build_case(case, which)
        copied = pickle.loads(pickle.dumps(data))
        for other in (again, copied):
            assert np.array_equal(other.order.boundaries, order.boundaries)
            assert np.array_equal(other.order.shuffle, order.shuffle)
        assert len(pickle.dumps(data)) < 10_000


def all_tokens(data):
    return [crc(data[index].tokens, "<i8") for index in range(len(data))]


@pytest.mark.parametrize("case", load("blends"), ids=lambda case: case["name"])
def test_blend(case):
    prefixes, weights = case["blend"]
    members = [IndexedDataset(GOLDEN / "data" / name) for name in prefixes]
    rules = SampleRules(seq_length=case["sequence_length"], seed=case["seed"], eod=0)
    surplus = case["options"].get("mid_level_dataset_surplus", 0.005)
    mixture = Mixture(members, weights, rules, surplus=surplus)
    for which, facts in enumerate(case["splits"]):
        share = split_shares(case["split"])[which]
        if facts is None:
            assert share is None
            continue
        data = mixture.build(SplitRequest(NAMES[which], share, case["sizes"][which]))
        assert isinstance(data, BlendedDataset)
        assert len(data) == facts["length"]
        assert data.member_index.tolist() == facts["dataset_index"]
        assert crc(data.sample_index, "<i8") == facts["dataset_sample_index_crc32_int64le"]
        for member, expected in zip(data.members, facts["members"], strict=True):
            assert len(member) == expected["length"]
            assert list(member.split) == expected["documents_range"]
            assert member.num_samples == expected["num_samples_requested"]
            assert crc(member.order.boundaries, "<i4") == expected["sample_index_crc32_int32le"]
            assert crc(member.order.shuffle, "<u4") == expected["shuffle_index_crc32_uint32le"]
        assert all_tokens(data)[: len(facts["tokens_crc32"])] == facts["tokens_crc32"]
        assert all_tokens(pickle.loads(pickle.dumps(data))) == all_tokens(data)


@pytest.mark.parametrize("facts", HELPERS["build_blending_indices"], ids=lambda facts: str(len(facts["weights"])))
def test_blending_indices(facts):
    weights = [float.fromhex(weight) for weight in facts["weights"]]
    member, sample = blending_index(weights, facts["size"])
    assert member.tolist() == facts["dataset_index"]
    assert sample.tolist() == facts["dataset_sample_index"]


@pytest.mark.parametrize("facts", HELPERS["build_exhaustive_blending_indices"], ids=lambda facts: str(facts["sizes"]))
def test_exhaustive_blending_indices(facts):
    member, sample = exhaustive_index(facts["sizes"])
    assert member.tolist() == facts["dataset_index"]
    assert sample.tolist() == facts["dataset_sample_index"]


@pytest.mark.parametrize("facts", HELPERS["build_sample_idx"])
def test_sample_index(facts):
    boundaries = sample_boundaries(
        np.array(facts["sizes"], dtype=np.int32),
        np.array(facts["document_index"], dtype=np.int32),
        seq_length=facts["sequence_length"],
        extra=int(facts["add_extra_token"]),
        keep_partial=not facts["drop_last_partial_sequence"],
    )
    assert boundaries.dtype.name == facts["dtype"]
    assert boundaries.tolist() == facts["sample_index"]


@pytest.mark.parametrize("facts", HELPERS["document_and_shuffle_index_one_stream"])
def test_two_shuffles_from_one_stream(facts):
    random = np.random.RandomState(facts["seed"])
    split = tuple(facts["documents"])
    documents = document_index(split, facts["num_epochs"], facts["separate_final_epoch"], random)
    assert documents.tolist() == facts["document_index"]
    shuffle = shuffle_index(facts["shuffle_first"], facts["shuffle_total"], random)
    assert shuffle.tolist() == facts["shuffle_index"]


@pytest.mark.parametrize("facts", HELPERS["split"], ids=lambda facts: facts["split"])
def test_splits(facts):
    assert parse_split(facts["split"]) == facts["vector"]
    shares = split_shares(facts["split"])
    assert [None if share is None else list(share) for share in shares] == facts["matrix"]
    for count, ranges in facts["ranges"].items():
        got = [None if share is None else list(split_range(share, int(count))) for share in shares]
        assert got == ranges


SINGLE = [case for case in load("samplers")["samplers"] if case["kind"] == "single" and "drop_last" not in case]


@pytest.mark.parametrize("case", SINGLE)
def test_single_sampler(case):
    assert len(SINGLE) == 4
    step = case["micro_batch"] * case["dp"]
    for rank in range(case["dp"]):
        starts = range(case["consumed"], case["total"] - step + 1, step)
        ids = [
            rank_sample_ids(
                start,
                global_batch_size=step,
                micro_batch_size=case["micro_batch"],
                dp_rank=rank,
                dp_size=case["dp"],
            )
            .ravel()
            .tolist()
            for start in starts
        ]
        assert ids == case["batches_per_rank"][rank]
