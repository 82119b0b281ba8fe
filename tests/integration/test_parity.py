"""The layout never changes the answer: the parity oracle over a pairwise covering array, up to 8 ranks."""

from __future__ import annotations

import pytest
import tiny
from covering import covering_array, pairs

from mcore_parallel.grad_buffer import Bucket
from mcore_parallel.testing import run_ranks
from mcore_parallel.testing.parity import BOUND_FLOAT32, BOUND_FLOAT64

DIMS = {
    "model": ("gpt", "llama"),
    "tp": (1, 2, 4),
    "pp": (1, 2, 4),
    "dp": (1, 2, 4),
    "sp": (False, True),
    "zero": (False, True),
    "tied": (True, False),
    "ragged": (False, True),
    "mbs": (1, 2, 4),
    "recompute": (None, "uniform", "block"),
    "dropout": (0.0, 0.1),
}


def _legal(cell: dict) -> bool:
    if cell["tp"] * cell["pp"] * cell["dp"] > 8 or 8 % (cell["mbs"] * cell["dp"]):
        return False
    return not (cell["sp"] and cell["tp"] == 1) and not (cell["zero"] and cell["dp"] == 1)


CELLS = covering_array(DIMS, _legal)


def _name(cell: dict) -> str:
    return "-".join(f"{key}{value}" for key, value in cell.items())


def _config(cell: dict):
    recompute = {}
    if cell["recompute"] is not None:
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": cell["recompute"],
            "recompute_num_layers": 1,
        }
    return tiny.tiny_config(
        tiny.LLAMA if cell["model"] == "llama" else tiny.GPT,
        tensor_model_parallel_size=cell["tp"],
        pipeline_model_parallel_size=cell["pp"],
        sequence_parallel=cell["sp"],
        use_distributed_optimizer=cell["zero"],
        untie_embeddings_and_output_weights=not cell["tied"],
        micro_batch_size=cell["mbs"],
        hidden_dropout=cell["dropout"],
        attention_dropout=cell["dropout"],
        ddp_bucket_size=500,
        **recompute,
    )


def test_the_array_covers_every_legal_pair():
    have = set().union(*(pairs(cell) for cell in CELLS))
    illegal = {("tp", 1, "sp", True), ("dp", 1, "zero", True), ("tp", 4, "pp", 4), ("tp", 4, "dp", 4)}
    illegal |= {("pp", 4, "dp", 4), ("dp", 4, "mbs", 4)}
    names = list(DIMS)
    every = {(a, x, b, y) for i, a in enumerate(names) for b in names[i + 1 :] for x in DIMS[a] for y in DIMS[b]}
    assert every - have == illegal
    assert len(CELLS) < 40


@pytest.mark.parametrize("cell", CELLS, ids=_name)
def test_layout_does_not_change_the_answer(cell):
    world = cell["tp"] * cell["pp"] * cell["dp"]
    report = run_ranks(tiny.parity_job, world, _config(cell), cell["ragged"], BOUND_FLOAT64)[0]
    assert report.failures == []
    assert len(report.gradients) > 20


def test_float32_holds_its_own_bound():
    cell = {
        "model": "llama", "tp": 2, "pp": 2, "dp": 2, "sp": True, "zero": True, "tied": True, "ragged": True, "mbs": 1,
        "recompute": None, "dropout": 0.0,
    }  # fmt: skip
    report = run_ranks(tiny.parity_job, 8, _config(cell), True, BOUND_FLOAT32)[0]
    assert report.failures == []


@pytest.mark.parametrize(("heads", "groups", "tp"), [(4, 1, 2), (4, 1, 4), (4, 2, 4), (4, 4, 4)])
def test_fewer_kv_heads_than_ranks(heads, groups, tp):
    config = tiny.tiny_config(
        {**tiny.LLAMA, "num_attention_heads": heads, "num_query_groups": groups, "add_qkv_bias": True},
        tensor_model_parallel_size=tp,
        sequence_parallel=True,
    )
    assert run_ranks(tiny.parity_job, tp, config, True, BOUND_FLOAT64)[0].failures == []


def _no_partial_sums(_rank: int) -> None:
    import mcore_parallel.grad_sync as grad_sync

    grad_sync._plan_partial_sums = lambda buffers, layout: []


def _divide_by_own_tokens(_rank: int) -> None:
    import mcore_parallel.cross_entropy as cross_entropy

    original = cross_entropy._subtract_one_hot

    def scaled(probabilities, labels, axis):
        original(probabilities, labels, axis)
        probabilities /= probabilities.shape[0]

    cross_entropy._subtract_one_hot = scaled


def _masks_by_local_position(rank: int) -> None:
    from mcore_parallel import rng

    original = rng.keep_mask
    rng.keep_mask = lambda keys, *, positions, channels, probability: original(
        keys, positions=positions - positions[0], channels=channels, probability=probability
    )


def _reduce_nothing(_rank: int) -> None:
    Bucket.launch = lambda self: None


@pytest.mark.parametrize(
    ("sabotage", "world", "fields"),
    [
        (_no_partial_sums, 2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        (_no_partial_sums, 4, {"tensor_model_parallel_size": 4}),
        (_no_partial_sums, 2, {"pipeline_model_parallel_size": 2}),
        (_divide_by_own_tokens, 2, {}),
        (_masks_by_local_position, 2, {
            "tensor_model_parallel_size": 2, "sequence_parallel": True, "hidden_dropout": 0.3,
        }),
        (_reduce_nothing, 2, {}),
    ],
    ids=["sp-sums", "kv-copies", "tied-stages", "own-token-count", "sp-dropout", "no-dp-sum"],
)  # fmt: skip
def test_the_oracle_fails_on_broken_copies(sabotage, world, fields):
    config = tiny.tiny_config(tiny.LLAMA, **fields)
    broken = None
    try:
        broken = run_ranks(_sabotaged, world, config, sabotage, fresh=True)[0]
    except AssertionError as error:  # copies that drifted apart are found even before the comparison
        assert "copy of" in str(error)  # noqa: PT017
    assert broken is None or broken.failures


def _sabotaged(rank, world, config, sabotage):
    """In a fork of its own: what is broken here must not stay in the pool."""
    return tiny.parity_job(rank, world, config, True, BOUND_FLOAT64, sabotage)
