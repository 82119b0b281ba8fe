"""Save under one layout, load under another: every element of every logical array is exact, padding is never seen.

The model is made of placements alone: a vocabulary of 101 rows (padded per rank), q|k|v with fewer KV heads than ranks,
gate|up, columns, norms, and vectors of awkward sizes; its first and last stage hold the same embedding. Optimizer state
is whole on every data-parallel rank, or cut into ZeRO shards of several tiny buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch

from mcore_ckpt.comm import DistributedCommunicator
from mcore_ckpt.grid import GridRule
from mcore_ckpt.inspect import verify
from mcore_ckpt.layout import flat_range_arrays, parameter_arrays
from mcore_ckpt.load import load_checkpoint
from mcore_ckpt.save import save_checkpoint
from mcore_parallel.flat_layout import plan_buckets
from mcore_parallel.mesh import build_mesh
from mcore_parallel.placement import Init, Piece, Placement, columns, replicated, rows, shared
from mcore_parallel.testing import run_ranks

INIT = Init()
LAYERS, VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD, FFN = 12, 101, 32, 4, 2, 3, 8
AWKWARD = (1, 3, 7, 33)
SLOTS = ("exp_avg",)
TINY = GridRule(parts=4, smallest=1024, largest=4096)


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch):
    """Flushing thousands of small files to a shared disk proves nothing here."""
    monkeypatch.setattr("os.fsync", lambda handle: None)


@dataclass(frozen=True)
class Shape:
    """A parallel layout. ``bucket``: elements per bucket of the optimizer's flat buffer; 0 without ZeRO."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    bucket: int = 0

    @property
    def world(self):
        return self.tp * self.pp * self.dp


def even(name, shape, part, parts, start=0):
    size = shape[0] // parts
    return rows(name, shape, begin=part * size, end=(part + 1) * size, init=INIT, start=start)


def layer_parameters(i, t, tp):
    kv = max(1, KV_HEADS // tp)
    kv_parts = KV_HEADS // kv
    kv_part = t * kv_parts // tp
    q_rows, kv_rows = HEADS // tp * HEAD, kv * HEAD
    name = f"decoder.layers.{i}"
    q = even(f"{name}.q.weight", (HEADS * HEAD, HIDDEN), t, tp)
    k, v = (
        even(f"{name}.{x}.weight", (KV_HEADS * HEAD, HIDDEN), kv_part, kv_parts, q_rows + j * kv_rows)
        for j, x in enumerate("kv")
    )
    if kv_parts < tp:
        k, v = (shared(piece, partial_over=("kv_copy",)) for piece in (k, v))
    gate = even(f"{name}.gate.weight", (FFN, HIDDEN), t, tp)
    up = even(f"{name}.up.weight", (FFN, HIDDEN), t, tp, FFN // tp)
    bias = even(f"{name}.gate.bias", (FFN,), t, tp), even(f"{name}.up.bias", (FFN,), t, tp, FFN // tp)
    size = FFN // tp
    yield Placement((q, k, v)), (q_rows + 2 * kv_rows, HIDDEN)
    yield Placement((gate, up)), (2 * size, HIDDEN)
    yield Placement(bias), (2 * size,)
    yield (
        Placement((columns(f"{name}.down.weight", (HIDDEN, FFN), begin=t * size, end=(t + 1) * size, init=INIT),)),
        (
            HIDDEN,
            size,
        ),
    )
    yield replicated(f"{name}.norm.weight", (HIDDEN,), init=INIT), (HIDDEN,)


def parameters(shape, t, stage):
    """``(placement, local shape)`` of all parameters of tensor-parallel rank ``t`` on pipeline stage ``stage``."""
    per_tp = -(-VOCAB // shape.tp) + 2
    edges = {0, shape.pp - 1}
    vocab = rows("embedding.weight", (VOCAB, HIDDEN), begin=t * per_tp, end=(t + 1) * per_tp, init=INIT)
    if shape.pp > 1:
        vocab = shared(vocab, partial_over=("embedding",))
    found = []
    if stage in edges:
        found.append((Placement((vocab,)), (per_tp, HIDDEN)))
    if stage == 0:
        found += [(replicated(f"odd{n}", (n,), init=INIT), (n,)) for n in AWKWARD]
    layers = LAYERS // shape.pp
    for i in range(stage * layers, (stage + 1) * layers):
        found += layer_parameters(i, t, shape.tp)
    return found


@cache
def reference():
    """The logical arrays by key: array number k is a ramp from 1000 k, in float64 so that every value is distinct."""
    pieces = {piece.name: piece for stage_parameter in parameters(Shape(), 0, 0) for piece in stage_parameter[0].pieces}
    keys = [f"{prefix}/{name}" for prefix in ("model", *(f"optimizer/{s}" for s in SLOTS)) for name in pieces]
    arrays = {}
    for k, key in enumerate(keys):
        size = pieces[key.rsplit("/", 1)[1]].global_shape
        count = int(torch.tensor(size).prod())
        arrays[key] = (torch.arange(count, dtype=torch.float64) / 64 + 100_000 * k).view(size)
    return arrays


def fill(prefix, placement, local_shape):
    """The local tensor of a parameter, NaN in its padding."""
    local = torch.full(local_shape, float("nan"), dtype=torch.float64)
    for piece in placement.pieces:
        whole = reference()[f"{prefix}/{piece.name}"]
        box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
        local[piece.start : piece.start + piece.shape[0]] = whole[box]
    return local


def rank_arrays(shape, rank, *, empty):
    """This rank's boxes, and ``(tensor, expected)`` pairs; all NaN when ``empty``."""
    at = build_mesh(shape.world, tp=shape.tp, pp=shape.pp).coordinates(rank)
    own = parameters(shape, at["tp"], at["pp"])
    arrays, checks = [], []

    def memory(expected):
        tensor = torch.full_like(expected, float("nan")) if empty else expected.clone()
        checks.append((tensor, expected))
        return tensor

    for placement, local_shape in own:
        arrays += parameter_arrays("model", memory(fill("model", placement, local_shape)), placement)
    sizes = [(i, int(torch.tensor(local_shape).prod())) for i, (_, local_shape) in enumerate(own)]
    buckets = plan_buckets(sizes, bucket_size=max(1, shape.bucket), num_shards=shape.dp if shape.bucket else 1)
    for slot in SLOTS:
        for bucket in buckets:
            begin, end = bucket.shard(at["dp"], shape.dp) if shape.bucket else (bucket.begin, bucket.end)
            for span in bucket.spans:
                low, high = max(begin, span.begin), min(end, span.end)
                if low >= high:
                    continue
                placement, local_shape = own[span.index]
                first = low - span.begin
                part = fill(f"optimizer/{slot}", placement, local_shape).reshape(-1)[first : high - span.begin]
                arrays += flat_range_arrays(
                    f"optimizer/{slot}", memory(part), placement, local_shape=local_shape, begin=first
                )
    return arrays, checks


def save_rank(communicator, shape, root, step=1):
    arrays, _ = rank_arrays(shape, communicator.rank, empty=False)
    return save_checkpoint(root, step, arrays, state={"layout": vars(shape)}, communicator=communicator, rule=TINY)


def load_rank(communicator, shape, folder):
    arrays, checks = rank_arrays(shape, communicator.rank, empty=True)
    load_checkpoint(folder, arrays, communicator=communicator)
    return [bool(torch.equal(t.nan_to_num(-1.0), want.nan_to_num(-1.0))) for t, want in checks]


def check_loads(run_threads, folder, shape):
    for rank, result in enumerate(run_threads(load_rank, shape.world, shape, folder)):
        assert isinstance(result, list), result
        assert len(result) > 10
        assert all(result), f"rank {rank} of {shape} differs"


LAYOUTS = [
    Shape(),
    Shape(tp=4),
    Shape(pp=4),
    Shape(dp=4, bucket=100),
    Shape(tp=2, pp=2, dp=2, bucket=333),
    Shape(tp=4, dp=2, bucket=1),
    Shape(pp=3, dp=3, bucket=5000),
    Shape(dp=8, bucket=40),
    Shape(tp=2, pp=6),
]


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_any_layout_loads_what_any_other_saved(number, run_threads, tmp_path):
    saved = LAYOUTS[number]
    folders = run_threads(save_rank, saved.world, saved, tmp_path)
    assert folders == [tmp_path / "step-00000001"] * saved.world
    assert verify(folders[0]) == []
    for step in (1, 4):
        check_loads(run_threads, folders[0], LAYOUTS[(number + step) % len(LAYOUTS)])


def test_what_is_stored_does_not_depend_on_the_layout(run_threads, tmp_path):
    """Same chunk files, byte for byte; padding (NaN here) is nowhere."""
    stored = []
    for i, shape in enumerate((LAYOUTS[0], LAYOUTS[4], LAYOUTS[5])):
        (folder, *_) = run_threads(save_rank, shape.world, shape, tmp_path / str(i))
        found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("c/**/*") if p.is_file()}
        assert not any(
            bool(torch.frombuffer(bytearray(content[:-4]), dtype=torch.float64).isnan().any())
            for content in found.values()
        )
        stored.append(found)
    assert len(stored[0]) > 2 * 5 * LAYERS
    assert stored[0] == stored[1] == stored[2]


def test_layers_keep_their_global_order_past_nine(run_threads, tmp_path):
    (folder, *_) = run_threads(save_rank, 12, Shape(tp=1, pp=12), tmp_path)
    check_loads(run_threads, folder, Shape())


def awkward_rank(communicator, root, folder):
    """Each rank holds an odd, unaligned part of the same flattened arrays."""
    arrays, checks = [], []
    for k, shape in enumerate([(1,), (3,), (7,), (101, 32), (33,)]):
        whole = (torch.arange(int(torch.tensor(shape).prod())) + 1000.0 * k).view(shape)
        total = whole.numel()
        # Cut as buckets with padding would: shard length rounded up, so the last ranks may get nothing.
        length = -(-total // communicator.size)
        begin, end = min(communicator.rank * length, total), min((communicator.rank + 1) * length, total)
        want = whole.reshape(-1)[begin:end]
        flat = want.clone() if folder is None else torch.full_like(want, float("nan"))
        placement = Placement((Piece(f"p{k}", shape, (0,) * len(shape), shape, cut_dims=(0,)),))
        arrays += flat_range_arrays("optimizer/exp_avg", flat, placement, local_shape=shape, begin=begin)
        checks.append((flat, want))
    if folder is None:
        return save_checkpoint(root, 1, arrays, state={}, communicator=communicator, rule=TINY)
    report = load_checkpoint(folder, arrays, communicator=communicator)
    assert report.bytes_needed <= report.bytes_read
    return [bool(torch.equal(flat, want)) for flat, want in checks]


@pytest.mark.parametrize("loaded", [1, 2, 3, 8])
def test_ramps_of_awkward_sizes_survive_a_change_of_dp(loaded, run_threads, tmp_path):
    (folder, *_) = run_threads(awkward_rank, 4, tmp_path, None)
    assert run_threads(awkward_rank, loaded, tmp_path, folder) == [[True] * 5] * loaded


def _real_save(rank, world, shape, root):
    return save_rank(DistributedCommunicator(), shape, root)


def _real_load(rank, world, shape, folder):
    return load_rank(DistributedCommunicator(), shape, folder)


def test_real_ranks_hand_over_and_read_back(run_threads, tmp_path):
    shape, other = Shape(tp=2, dp=2, bucket=333), Shape(pp=2, bucket=70)
    folders = run_ranks(_real_save, shape.world, shape, tmp_path)
    assert set(folders) == {tmp_path / "step-00000001"}
    for result in run_ranks(_real_load, other.world, other, folders[0]):
        assert all(result)
    check_loads(run_threads, folders[0], Shape())
