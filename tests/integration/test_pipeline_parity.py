"""Every schedule at every size that it declares legal gives the one-rank answer; sizes that it does not are refused.

The quick array covers all pairs; the slow one is every schedule x pipeline size x chunks x micro-batches.
"""

from __future__ import annotations

import itertools

import pytest
import tiny
from covering import covering_array, pairs

from mcore_cli.build import build_plans
from mcore_parallel.axis import Axis
from mcore_parallel.plugins import Registry
from mcore_parallel.testing import run_ranks
from mcore_parallel.testing.parity import BOUND_FLOAT64

SCHEDULES = Registry("schedule", tiny.fresh_manager().collect("mcore_pipeline_schedules"))
NAMES = [name for name in SCHEDULES.names() if name != "table"]
SIZES = (2, 3, 4, 8)
CHUNKS = (1, 2, 4)
MICRO_BATCHES = {
    "1": lambda pp: 1,
    "2": lambda pp: 2,
    "pp-1": lambda pp: pp - 1,
    "pp": lambda pp: pp,
    "2pp": lambda pp: 2 * pp,
    "2pp+1": lambda pp: 2 * pp + 1,
}
DIMS = {
    "schedule": NAMES,
    "pp": SIZES,
    "vpp": CHUNKS,
    "m": list(MICRO_BATCHES),
    "tp": (1, 2, 4),
    "sp": (False, True),
    "dp": (1, 2, 4),
    "zero": (False, True),
    "recompute": (False, True),
    "tied": (False, True),
    "ragged": (False, True),
    "model": ("llama", "gpt"),
}


def _micro_batches(cell) -> int:
    return MICRO_BATCHES[cell["m"]](cell["pp"])


def _is_legal_size(cell) -> bool:
    return SCHEDULES[cell["schedule"]].why_illegal(cell["pp"], _micro_batches(cell), cell["vpp"]) is None


def _is_legal(cell) -> bool:
    if cell["tp"] * cell["pp"] * cell["dp"] > 8 or (cell["sp"] and cell["tp"] == 1):
        return False
    return not (cell["zero"] and cell["dp"] == 1) and _is_legal_size(cell)


QUICK = covering_array(DIMS, _is_legal)
SIZED = [
    dict(zip(("schedule", "pp", "vpp", "m"), cell, strict=True))
    for cell in itertools.product(NAMES, SIZES, CHUNKS, MICRO_BATCHES)
]
LEGAL = [cell for cell in SIZED if _is_legal_size(cell)]
ILLEGAL = [cell for cell in SIZED if not _is_legal_size(cell)]


def _with_the_rest(index: int, cell: dict) -> dict:
    """The other dims of a cell of the slow array, dealt out in turn."""
    room = 8 // cell["pp"]
    tp = (1, 2, 1, 4)[index % 4] if room >= 4 else (1, 2)[index % 2] if room >= 2 else 1
    dp = 2 if room // tp >= 2 and index % 3 else 1
    return {
        **cell,
        "tp": tp,
        "sp": tp > 1 and index % 3 != 1,
        "dp": dp,
        "zero": dp > 1 and index % 2 == 0,
        "recompute": index % 5 == 2,
        "tied": index % 3 == 0,
        "ragged": index % 4 != 3,
        "model": ("llama", "gpt")[index // 2 % 2],
    }


def _config(cell):
    recompute = {}
    if cell["recompute"]:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    chunks = {"num_virtual_stages_per_pipeline_rank": cell["vpp"]} if cell["vpp"] > 1 else {}
    return tiny.tiny_config(
        tiny.LLAMA if cell["model"] == "llama" else tiny.GPT,
        num_layers=cell["pp"] * cell["vpp"],
        pipeline_schedule=cell["schedule"],
        pipeline_model_parallel_size=cell["pp"],
        tensor_model_parallel_size=cell["tp"],
        sequence_parallel=cell["sp"],
        use_distributed_optimizer=cell["zero"],
        untie_embeddings_and_output_weights=not cell["tied"],
        global_batch_size=_micro_batches(cell) * cell["dp"],
        ddp_bucket_size=700,
        **chunks,
        **recompute,
    )


def _id(cell) -> str:
    return "-".join(f"{key}{value}" for key, value in cell.items())


def _check(cell):
    world = cell["tp"] * cell["pp"] * cell["dp"]
    report = run_ranks(tiny.parity_job, world, _config(cell), cell["ragged"], BOUND_FLOAT64, limit=110)[0]
    assert report.failures == []


def test_the_quick_array_covers_what_it_can():
    have = set().union(*(pairs(cell) for cell in QUICK))
    for a, b in (("schedule", "m"), ("schedule", "tp"), ("schedule", "zero"), ("schedule", "tied"), ("schedule", "pp")):
        wanted = {
            (a, x, b, y)
            for x in DIMS[a]
            for y in DIMS[b]
            if any(_is_legal_size(cell) for cell in SIZED if cell["schedule"] == x and (b not in cell or cell[b] == y))
        }
        assert wanted <= have


@pytest.mark.parametrize("cell", QUICK, ids=_id)
def test_schedule_does_not_change_the_answer(cell):
    _check(cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", [_with_the_rest(i, cell) for i, cell in enumerate(LEGAL)], ids=_id)
def test_every_legal_size_gives_the_one_rank_answer(cell):
    _check(cell)


class _Layout:
    """The axes that plans are made for; no process group."""

    def __init__(self, pp):
        self.axes = {"pp": Axis("pp", tuple(range(pp))), "dp": Axis("dp", (0,))}

    def axis(self, *names):
        return self.axes["_".join(names)]


@pytest.mark.parametrize("cell", ILLEGAL, ids=_id)
def test_illegal_sizes_are_refused(cell):
    # A plain 1F1B with several chunks is interleaved 1F1B, as in Megatron.
    taken = "interleaved" if cell["schedule"] == "1f1b" and cell["vpp"] > 1 else cell["schedule"]
    reason = SCHEDULES[taken].why_illegal(cell["pp"], _micro_batches(cell), cell["vpp"])
    rest = {"tp": 1, "sp": False, "dp": 1, "zero": False, "recompute": False, "tied": False, "model": "llama"}
    config = _config({**cell, **rest})
    if taken != cell["schedule"] and reason is None:
        return
    if cell["vpp"] == 1 and SCHEDULES[taken].min_chunks > 1:
        return  # without a flag for chunks the schedule's own number is taken
    with pytest.raises(ValueError, match=taken):
        build_plans(config, _Layout(cell["pp"]), manager=tiny.fresh_manager())
