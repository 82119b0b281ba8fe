"""Gradient buffers and their reduction on real ranks against one rank in float64."""

import math

import pytest
import torch
from torch import nn

from mcore_parallel.axis import build_layout, single_layout
from mcore_parallel.flat_layout import ALIGNMENT, merge_ranges, padding_ranges, plan_buckets
from mcore_parallel.grad_sync import GradBuffers
from mcore_parallel.linear import linear
from mcore_parallel.mesh import build_mesh
from mcore_parallel.placement import Init, Placement, place, replicated, rows
from mcore_parallel.testing import run_ranks

SHAPES = [(1,), (3,), (7,), (101, 32), (33,)]
INIT = Init("normal", 1.0)


def parameter(name, shape, *, dtype=torch.float64, **over):
    generator = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
    values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return place(nn.Parameter(values), replicated(name, shape, init=INIT, **over))


def odd_parameters(dtype=torch.float64):
    return [parameter(f"p{i}", shape, dtype=dtype) for i, shape in enumerate(SHAPES)]


def sample_loss(parameters, sample):
    """A sum over one sample, different for each, that uses every parameter."""
    return sum(((p * math.sin(sample + i + 1.0)).tanh() * (i + 1)).sum() for i, p in enumerate(parameters))


def full_grads(buffers):
    buffers.gather_grads()
    return [p.main_grad.clone() for p in buffers.parameters]


def one_rank_grads(num_samples):
    buffers = GradBuffers(odd_parameters(), single_layout())
    buffers.begin_step(num_samples)
    for sample in range(num_samples):
        sample_loss(buffers.parameters, sample).backward()
    buffers.finish()
    return full_grads(buffers)


def layout_of(rank, world_size, **sizes):
    return build_layout(build_mesh(world_size, **sizes), rank)


# ---- planning


def test_bucket_plan_covers_everything_once_aligned():
    sizes = [(4, 33), (3, 101 * 32), (2, 7), (1, 3), (0, 1)]
    plans = plan_buckets(sizes, bucket_size=100, num_shards=3)
    assert [span.index for plan in plans for span in plan.spans] == [4, 3, 2, 1, 0]
    assert plans[0].begin == 0
    assert all(a.end == b.begin for a, b in zip(plans, plans[1:], strict=False))
    for plan in plans:
        assert (plan.end - plan.begin) % (3 * ALIGNMENT) == 0
        assert all(plan.begin <= span.begin <= span.end <= plan.end for span in plan.spans)
        assert all(span.begin % ALIGNMENT == 0 for span in plan.spans)
        shards = [plan.shard(rank, 3) for rank in range(3)]
        assert merge_ranges(shards) == [(plan.begin, plan.end)]
    # 33 rounds to 64 < 100, so the big one closes the first bucket; 7 and 3 round to 128 and close the second
    assert [[span.index for span in plan.spans] for plan in plans] == [[4, 3], [2, 1], [0]]


def test_bucket_size_one_gives_every_parameter_its_bucket():
    plans = plan_buckets([(1, 5), (0, 7)], bucket_size=1, num_shards=1)
    assert [[span.index for span in plan.spans] for plan in plans] == [[1], [0]]


def test_padding_is_what_no_piece_covers():
    placement = Placement(
        (rows("a", (3, 2), begin=0, end=3, init=INIT, start=1), rows("b", (2, 2), begin=0, end=2, init=INIT, start=6))
    )
    assert padding_ranges(placement, (9, 2)) == [(0, 2), (8, 12), (16, 18)]


# ---- accumulation protocol


def test_parameters_and_main_grads_become_views_of_the_flat_buffers():
    parameters = odd_parameters()
    values = [p.detach().clone() for p in parameters]
    buffers = GradBuffers(parameters, single_layout(), bucket_size=50)
    for p, value in zip(parameters, values, strict=True):
        assert torch.equal(p, value)
        assert p.main_grad.shape == p.shape
    for buffer in buffers.buffers:
        buffer.weights.fill_(2.0)
    assert all(bool((p == 2.0).all()) for p in parameters)


def test_frozen_parameters_are_left_alone():
    trained, frozen = parameter("a", (3,)), parameter("b", (4,)).requires_grad_(False)
    buffers = GradBuffers([trained, frozen], single_layout())
    assert buffers.parameters == [trained]
    assert not hasattr(frozen, "main_grad")
    with pytest.raises(ValueError, match="no parameter to train"):
        GradBuffers([frozen], single_layout())


def test_parameter_without_placement_is_refused():
    with pytest.raises(ValueError, match="no placement"):
        GradBuffers([nn.Parameter(torch.zeros(3))], single_layout())


def test_half_precision_parameters_accumulate_in_fp32():
    p = parameter("a", (4,), dtype=torch.bfloat16)
    buffers = GradBuffers([p], single_layout())
    buffers.begin_step(300)
    for _ in range(300):
        p.sum().backward()
    buffers.finish()
    assert p.main_grad.dtype == torch.float32
    assert p.grad is None
    assert bool((p.main_grad == 300).all())  # bf16 would stop at 256


def test_a_weight_used_by_a_layer_and_by_autograd_counts_both_once():
    layout = single_layout()
    weight = parameter("w", (3, 3))
    x = torch.randn(5, 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain = weight.detach().clone().requires_grad_()
    ((x @ plain.t()).square().sum() + plain.square().sum()).backward()
    buffers = GradBuffers([weight], layout)
    for _ in range(2):
        buffers.begin_step(2)
        for _ in range(2):
            out = linear(x, weight, None, axis=layout.axis("tp"))
            (out.square().sum() + weight.square().sum()).backward()
        buffers.finish()
        torch.testing.assert_close(weight.main_grad, 2 * plain.grad, rtol=1e-14, atol=1e-14)
    assert [use.per_micro_batch for use in buffers._uses] == [2]


def test_a_layer_that_gives_autograd_no_gradient_is_counted_once():
    layout = single_layout()
    weight = parameter("w", (3, 3))
    buffers = GradBuffers([weight], layout)
    x = torch.ones(5, 1, 3, dtype=torch.float64)
    for _ in range(2):
        buffers.begin_step(1)
        linear(x, weight, None, axis=layout.axis("tp")).sum().backward()
        buffers.finish()
        assert bool((weight.main_grad == 5).all())
    assert [use.per_micro_batch for use in buffers._uses] == [1]


def test_begin_step_zeroes_and_finish_may_not_run_twice():
    buffers = GradBuffers(odd_parameters(), single_layout())
    sample_loss(buffers.parameters, 0).backward()
    buffers.finish()
    with pytest.raises(RuntimeError, match="twice"):
        buffers.finish()
    buffers.begin_step()
    assert all(bool((p.main_grad == 0).all()) for p in buffers.parameters)
    with pytest.raises(ValueError, match="at least one micro-batch"):
        buffers.begin_step(0)


def test_padding_rows_never_keep_a_gradient():
    piece = rows("w", (3, 4), begin=0, end=3, init=INIT)
    p = place(nn.Parameter(torch.ones(5, 4, dtype=torch.float64)), Placement((piece,)))
    buffers = GradBuffers([p], single_layout())
    p.sum().backward()
    buffers.finish()
    assert p.main_grad.sum(1).tolist() == [4, 4, 4, 0, 0]


# ---- reduction on ranks


def reduced_grads(rank, world_size, sharded, overlap, bucket_size, steps):
    layout = layout_of(rank, world_size)
    buffers = GradBuffers(odd_parameters(), layout, bucket_size=bucket_size, overlap=overlap, sharded=sharded)
    for _ in range(steps):
        buffers.begin_step(2)
        for sample in (2 * rank, 2 * rank + 1):
            sample_loss(buffers.parameters, sample).backward()
        buffers.finish()
    return full_grads(buffers)


@pytest.mark.parametrize(
    ("world_size", "sharded", "overlap", "bucket_size"),
    [(2, False, True, 10**6), (2, True, False, 40), (4, False, True, 40), (4, True, True, 40), (4, True, False, 10**6)],
)
def test_data_parallel_gradients_equal_one_rank(world_size, sharded, overlap, bucket_size):
    want = one_rank_grads(2 * world_size)
    for got in run_ranks(reduced_grads, world_size, sharded, overlap, bucket_size, 2):
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-14, atol=1e-14)


def launches(rank, world_size, sharded, overlap):
    """Buckets launched after each of two micro-batches of the second step, then order and byte events of that step."""
    layout = layout_of(rank, world_size)
    buffers = GradBuffers(odd_parameters(), layout, bucket_size=1, overlap=overlap, sharded=sharded)
    seen = []
    for step in range(2):
        layout.recorder.enabled = step == 1
        buffers.begin_step(2)
        for sample in range(2):
            # tied: the first parameter is used twice in each micro-batch, in separate hooks' terms once
            sample_loss(buffers.parameters, sample).backward()
            seen.append(buffers.num_launched)
        buffers.finish()
    events = [(e.op, e.axis, e.num_bytes) for e in layout.recorder.events]
    return seen, events, full_grads(buffers)


@pytest.mark.parametrize("sharded", [False, True])
def test_buckets_launch_during_the_last_backward_in_fixed_order(sharded):
    replies = run_ranks(launches, 2, sharded, True)
    for seen, events, _ in replies:
        assert seen == [0, 0, 0, 5]  # learned in the first step; in the second, only in its last micro-batch
        op = "reduce_scatter" if sharded else "all_reduce"
        # two buffers (decay or not), last built first; each bucket's length is its parameter's rounded up
        unit = 128 if sharded else 64
        sizes = [-(-n // unit) * unit * 8 for n in (33, 101 * 32, 7, 3, 1)]
        assert events[: len(sizes)] == [(op, "dp_cp", size) for size in sizes]
    want = one_rank_grads(2)
    for g, w in zip(replies[0][2], want, strict=True):
        torch.testing.assert_close(g, 2 * w, rtol=1e-14, atol=1e-14)


def test_without_overlap_everything_waits_for_finish():
    for seen, _, _ in run_ranks(launches, 2, False, False):
        assert seen == [0, 0, 0, 0]


def varying_use(rank, world_size):
    """The second parameter is left out of the third step."""
    layout = layout_of(rank, world_size)
    buffers = GradBuffers([parameter("a", (3,)), parameter("b", (5,))], layout, bucket_size=1)
    a, b = buffers.parameters
    launched, grads = [], []
    for micro_batches in ([1, 1], [1, 1, 1], [0, 0], [1]):
        buffers.begin_step(len(micro_batches))
        for use in micro_batches:
            a.sum().backward()  # a's gradient is whole before b's begins
            if use:
                b.sum().backward()
        launched.append(buffers.num_launched)
        buffers.finish()
        grads.append((a.main_grad[0].item(), b.main_grad[0].item()))
    return launched, grads


def test_use_that_varies_delays_its_bucket_and_stays_right():
    for launched, grads in run_ranks(varying_use, 2):
        assert launched == [0, 2, 0, 0]
        assert grads == [(4, 4), (6, 6), (4, 0), (2, 2)]


def test_gradient_after_its_reduction_is_an_error_that_names_it():
    p = parameter("some.weight", (3,))
    buffers = GradBuffers([p], single_layout())
    p.sum().backward()
    buffers.finish()
    buffers.begin_step(1)
    p.sum().backward()
    with pytest.raises(RuntimeError, match=r"some\.weight.*use 2.*1 micro-batches"):
        p.sum().backward()


# ---- partial sums


def partial_parameters(rank):
    """For tp 2: parameters partial over tp, one with a partial piece among others, a whole one, a big one."""
    tied = parameter("tied", (101, 32), partial_over=("tp",))
    q = rows("q", (8, 3), begin=4 * (rank % 2), end=4 * (rank % 2) + 4, init=INIT)
    k = replicated("k", (2, 3), init=INIT, partial_over=("tp",)).pieces[0]
    fused = Placement((q, rows_at(k, 4)))
    qk = place(nn.Parameter(torch.ones(7, 3, dtype=torch.float64)), fused)
    big = parameter("big", (1025, 1024), partial_over=("tp",))
    return [parameter("plain", (7,)), tied, qk, parameter("norm", (33,), partial_over=("tp",)), big]


def rows_at(piece, start):
    return type(piece)(**{**piece.__dict__, "start": start})


def partial_grads(rank, world_size, sharded):
    layout = layout_of(rank, world_size, tp=2)
    buffers = GradBuffers(partial_parameters(rank), layout, bucket_size=40, sharded=sharded)
    for _ in range(2):
        buffers.begin_step(1)
        sum(((rank + 1.0) * p).sum() for p in buffers.parameters).backward()
        buffers.finish()
    return [g.unique().tolist() if g.dim() != 2 or len(g) != 7 else g[:, 0].tolist() for g in full_grads(buffers)]


@pytest.mark.parametrize("sharded", [False, True])
def test_partial_gradients_are_summed_over_their_axis_before_the_data_axes(sharded):
    # ranks (dp, tp): 0=(0,0) 1=(0,1) 2=(1,0) 3=(1,1) with gradients 1 2 3 4
    for rank, (plain, tied, qk, norm, big) in enumerate(run_ranks(partial_grads, 4, sharded)):
        mine = [4.0, 6.0][rank % 2]  # the sum over dp alone
        assert plain == [mine]
        assert tied == norm == big == [10.0]
        assert qk == [mine] * 4 + [10.0] * 2 + [0.0]


def tied_stages(rank, world_size, sharded, bucket_size):
    """pp 2 x dp 2: both stages hold the tied embedding among different neighbours; returns both copies' gradients."""
    layout = layout_of(rank, world_size, pp=2)
    first = layout.axis("pp").is_first
    embedding = parameter("embedding", (101, 32), dtype=torch.float32, partial_over=("embedding",))
    others = (
        [parameter("position", (16, 32), dtype=torch.float32)]
        if first
        else [parameter("final", (33,), dtype=torch.float32)]
    )
    parameters = [embedding, *others] if first else [*others, embedding]
    buffers = GradBuffers(parameters, layout, bucket_size=bucket_size, sharded=sharded)
    generator = torch.Generator().manual_seed(rank)
    local = torch.randn(101, 32, generator=generator)
    ((embedding * local).sum() + others[0].sum()).backward()
    buffers.finish()
    buffers.gather_grads()
    return embedding.main_grad.clone(), local


@pytest.mark.parametrize(
    ("world_size", "sharded", "bucket_size"), [(4, False, 100), (4, True, 100), (8, False, 10**6), (8, True, 10**6)]
)
def test_tied_copies_on_first_and_last_stage_get_the_same_whole_gradient(world_size, sharded, bucket_size):
    # at dp 4 the order of a ring's additions depends on where an element lies in the bucket
    replies = run_ranks(tied_stages, world_size, sharded, bucket_size)
    total = sum(local.double() for _, local in replies)
    for grad, _ in replies:
        assert torch.equal(grad, replies[0][0])  # bit for bit
        torch.testing.assert_close(grad.double(), total, rtol=1e-5, atol=1e-5)


# ---- who broke it


def poisoned(rank, world_size, guilty, sharded):
    layout = layout_of(rank, world_size, tp=2)
    parameters = [
        parameter("plain.weight", (101, 32)),
        parameter("shared.norm", (33,), partial_over=("tp",)),
    ]
    buffers = GradBuffers(parameters, layout, bucket_size=10, sharded=sharded)
    names = []
    for bad in (None, 0, 1):
        buffers.begin_step(1)
        factors = [torch.ones_like(p) for p in parameters]
        if bad is not None and rank == guilty:
            factors[bad].view(-1)[-1] = [math.inf, math.nan][bad]
        sum((p * factor).sum() for p, factor in zip(parameters, factors, strict=True)).backward()
        buffers.finish()
        names.append(buffers.local_non_finite())
    return names


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("guilty", [0, 3])
def test_only_the_guilty_rank_names_its_parameter(guilty, sharded):
    for rank, names in enumerate(run_ranks(poisoned, 4, guilty, sharded)):
        assert names == ([[], ["plain.weight"], ["shared.norm"]] if rank == guilty else [[], [], []])


def test_one_rank_alone_names_its_parameter_without_a_witness():
    a, b = parameter("a", (3,)), parameter("b", (5,))
    buffers = GradBuffers([a, b], single_layout())
    (a.sum() + b.sum()).backward()
    b.main_grad[2] = math.nan
    buffers.finish()
    assert buffers.local_non_finite() == ["b"]
