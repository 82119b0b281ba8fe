"""The sharded optimizer on real ranks against plain torch on one in float64; state, norms, clipping, 16-bit masters."""

import math

import pytest
import torch
from torch import nn

from mcore_parallel.axis import build_layout, single_layout
from mcore_parallel.config import OptimizerConfig, ParallelConfig
from mcore_parallel.mesh import build_mesh
from mcore_parallel.optim.optimizer import build_optimizer
from mcore_parallel.placement import Init, Placement, place, replicated, rows
from mcore_parallel.plugins import Registry, plugin_manager
from mcore_parallel.specs import OptimizerSpec
from mcore_parallel.testing import run_ranks

SHAPES = [(1,), (3,), (7,), (101, 32), (33,), (5, 6)]
INIT = Init("normal", 1.0)
LR, DECAY = 0.05, 0.1


def values(name, shape):
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def parameter(name, shape, *, dtype=torch.float64, **over):
    return place(nn.Parameter(values(name, shape).to(dtype)), replicated(name, shape, init=INIT, **over))


def odd_parameters(dtype=torch.float64):
    return [parameter(f"p{i}", shape, dtype=dtype) for i, shape in enumerate(SHAPES)]


def loss_of(parameters, sample):
    return sum(((p * math.sin(sample + i + 1.0)).tanh() * (i + 1)).sum() for i, p in enumerate(parameters))


def spec(name):
    return Registry("optimizer", plugin_manager().collect("mcore_optimizers"))[name]


def optimizer_for(
    parameters, layout, *, name="adam", sharded=False, bucket_size=40, clip=0.0, momentum=0.9, decay=DECAY
):
    return build_optimizer(
        parameters,
        layout,
        spec=spec(name),
        optimizer=OptimizerConfig(
            optimizer=name, lr=LR, weight_decay=decay, clip_grad=clip, sgd_momentum=momentum, adam_beta2=0.95
        ),
        parallel=ParallelConfig(use_distributed_optimizer=sharded, ddp_bucket_size=bucket_size),
    )


def train(optimizer, parameters, samples, steps, tokens):
    stats = []
    for _ in range(steps):
        optimizer.begin_step(len(samples))
        for sample in samples:
            loss_of(parameters, sample).backward()
        optimizer.finish_grads()
        stats.append(optimizer.step(tokens))
    return stats


def plain_torch(name, *, num_samples, steps, clip, momentum=0.9):
    """The same training written with torch alone: mean over samples, torch's own clipping and unfused optimizers."""
    parameters = [nn.Parameter(p.detach().clone()) for p in odd_parameters()]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    if name == "adam":
        optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), foreach=False)
    else:
        optimizer = torch.optim.SGD(groups, lr=LR, momentum=momentum, foreach=False)
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        (sum(loss_of(parameters, sample) for sample in range(num_samples)) / num_samples).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, clip or math.inf)))
        optimizer.step()
    return [p.detach() for p in parameters], norms


def trained_on_ranks(rank, world_size, name, sharded, clip):
    layout = build_layout(build_mesh(world_size), rank)
    parameters = odd_parameters()
    optimizer = optimizer_for(parameters, layout, name=name, sharded=sharded, clip=clip)
    samples = range(2 * rank, 2 * rank + 2)
    stats = train(optimizer, parameters, samples, 3, 2 * world_size)
    return [p.detach().clone() for p in parameters], [s.grad_norm for s in stats], optimizer.param_norm()


@pytest.mark.parametrize(
    ("world_size", "sharded", "name", "clip"),
    [
        (2, False, "adam", 1.0),
        (2, True, "sgd", 1.0),
        (4, True, "adam", 1.0),
        (4, False, "sgd", 1.0),
        (4, True, "sgd", 0.0),
    ],
)
def test_training_on_ranks_equals_plain_torch(world_size, sharded, name, clip):
    weights, norms = plain_torch(name, num_samples=2 * world_size, steps=3, clip=clip)
    replies = run_ranks(trained_on_ranks, world_size, name, sharded, clip)
    for got, got_norms, param_norm in replies:
        for g, w, first in zip(got, weights, replies[0][0], strict=True):
            torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-13)
            assert torch.equal(g, first)
        assert got_norms == pytest.approx(norms, rel=1e-13)
        assert got_norms == replies[0][1]
        assert param_norm == pytest.approx(math.sqrt(sum(float(w.square().sum()) for w in weights)), rel=1e-12)


def one_step_with_injected_gradient(rank, world_size, sharded, dtype):
    """Every rank injects the same total gradient, so only the shards differ between layouts."""
    layout = build_layout(build_mesh(world_size), rank)
    parameters = odd_parameters(dtype)
    optimizer = optimizer_for(parameters, layout, sharded=sharded)
    for step in range(3):
        optimizer.begin_step(1)
        for i, p in enumerate(parameters):
            if rank == 0:
                p.main_grad.copy_(values(f"g{step}{i}", p.shape))
        optimizer.finish_grads()
        optimizer.step(3)
    return [p.detach().clone() for p in parameters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_step_is_the_same_bit_for_bit_with_and_without_zero(dtype):
    want = one_step_with_injected_gradient(0, 1, False, dtype)
    for sharded in (False, True):
        for got in run_ranks(one_step_with_injected_gradient, 4, sharded, dtype):
            assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


# ---- norms


def placed_norms(rank, world_size, sharded):
    """tp 2 x dp 2. Returns the reported norms; the true ones follow from the logical arrays alone."""
    layout = build_layout(build_mesh(world_size, tp=2), rank)
    tp = layout.axis("tp").rank
    split = Placement((rows("split", (6, 4), begin=3 * tp, end=3 * tp + 3, init=INIT),))
    vocab = Placement((rows("vocab", (5, 4), begin=3 * tp, end=3 * tp + 3, init=INIT),))  # rank 1 holds a padding row
    copied = replicated("copied", (33,), init=INIT, copied_over=("tp",))
    partial = replicated("partial", (7,), init=INIT, partial_over=("tp",))
    parameters = []
    for placement, shape in ((split, (3, 4)), (vocab, (3, 4)), (copied, (33,)), (partial, (7,))):
        piece = placement.pieces[0]
        full = values(piece.name, piece.global_shape)
        local = torch.zeros(shape, dtype=torch.float64)
        local[: piece.shape[0]] = full[piece.offset[0] : piece.offset[0] + piece.shape[0]]
        parameters.append(place(nn.Parameter(local), placement))
    optimizer = optimizer_for(parameters, layout, sharded=sharded, clip=0.5, name="sgd", momentum=0.0, decay=0.0)
    optimizer.begin_step(1)
    for p in parameters:  # gradient = weight * (1 + data rank), the partial one half from each tp rank
        share = 0.5 if p.placement.partial_axes else 1.0
        p.main_grad.copy_(p.detach() * share * (1 + layout.axis("dp").rank))
    if tp == 1:
        parameters[1].main_grad[2] = 1e6  # a padding row must never count
    optimizer.finish_grads()
    before = optimizer.param_norm()
    start = [p.detach().clone() for p in parameters]
    stats = optimizer.step(4)
    moved = [(a - p.detach()) / LR for a, p in zip(start, parameters, strict=True)]
    return before, stats.grad_norm, stats.clip_coefficient, moved, [a * 3 / 4 for a in start]


@pytest.mark.parametrize("sharded", [False, True])
def test_norms_count_every_logical_element_once(sharded):
    arrays = [values("split", (6, 4)), values("vocab", (5, 4)), values("copied", (33,)), values("partial", (7,))]
    true_param = math.sqrt(sum(float(a.square().sum()) for a in arrays))
    true_grad = true_param * 3 / 4
    for param_norm, grad_norm, coefficient, moved, divided in run_ranks(placed_norms, 4, sharded):
        assert param_norm == pytest.approx(true_param, rel=1e-14)
        assert grad_norm == pytest.approx(true_grad, rel=1e-14)
        assert coefficient == pytest.approx(0.5 / (true_grad + 1e-6), rel=1e-14)
        for m, d in zip(moved, divided, strict=True):
            torch.testing.assert_close(m, d * coefficient, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("share", [0.5, 1.0, 2.0, 0.0, 1e-8])
def test_clipping_is_torchs_clip_grad_norm(share):
    reference = [nn.Parameter(p.detach().clone()) for p in odd_parameters()]
    loss_of(reference, 0).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(reference, math.inf))
    clip = share * norm
    if clip:
        torch.nn.utils.clip_grad_norm_(reference, clip)
    parameters = odd_parameters()
    start = [p.detach().clone() for p in parameters]
    optimizer = optimizer_for(parameters, single_layout(), name="sgd", clip=clip, momentum=0.0, decay=0.0)
    stats = train(optimizer, parameters, [0], 1, 1)[0]
    assert stats.grad_norm == pytest.approx(norm, rel=1e-14)
    for p, r in zip(parameters, reference, strict=True):
        torch.testing.assert_close(p.main_grad, r.grad, rtol=1e-13, atol=0)
    moved = math.sqrt(sum(float((p.detach() - a).square().sum()) for p, a in zip(parameters, start, strict=True)))
    assert moved == pytest.approx(LR * (min(clip, norm) if clip else norm), rel=1e-5)


# ---- non-finite gradients


def step_with_poison(rank, world_size, sharded, poison):
    layout = build_layout(build_mesh(world_size), rank)
    parameters = odd_parameters(torch.float32)
    optimizer = optimizer_for(parameters, layout, sharded=sharded)
    train(optimizer, parameters, [rank], 1, world_size)
    before = [p.detach().clone() for p in parameters]
    state = [t.clone() for shard in optimizer.state_arrays() for t in shard.tensors.values()]
    optimizer.begin_step(1)
    factor = torch.ones_like(parameters[3])
    factor[50, 3] = poison if rank == 1 else 1.0
    (loss_of(parameters, rank) + (parameters[3] * factor).sum()).backward()
    optimizer.finish_grads()
    stats = optimizer.step(world_size)
    untouched = all(torch.equal(a, p) for a, p in zip(before, parameters, strict=True)) and all(
        torch.equal(a, t)
        for a, t in zip(state, (t for s in optimizer.state_arrays() for t in s.tensors.values()), strict=True)
    )
    after = train(optimizer, parameters, [rank], 1, world_size)[0]
    return stats, untouched, optimizer.step_count, after


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_anywhere(sharded, poison):
    for stats, untouched, step_count, after in run_ranks(step_with_poison, 2, sharded, poison):
        assert not math.isfinite(stats.grad_norm)
        assert not stats.applied
        assert untouched
        assert after.applied
        assert step_count == 2


def test_a_batch_without_tokens_has_a_zero_gradient():
    parameters = odd_parameters()
    optimizer = optimizer_for(parameters, single_layout(), name="sgd", decay=0.0)
    before = [p.detach().clone() for p in parameters]
    optimizer.begin_step(1)
    (0.0 * loss_of(parameters, 0)).backward()
    optimizer.finish_grads()
    assert optimizer.step(0).grad_norm == 0.0
    assert all(torch.equal(a, p) for a, p in zip(before, parameters, strict=True))
    with pytest.raises(ValueError, match="negative, got -1"):
        optimizer.step(-1)


# ---- settings


def test_lr_and_weight_decay_reach_the_groups():
    parameters = [parameter("w", (4, 2)), parameter("b", (4,))]
    optimizer = optimizer_for(parameters, single_layout(), name="sgd", momentum=0.0)
    for lr, decay in ((0.5, 0.25), (0.125, 0.5)):
        before = [p.detach().clone() for p in parameters]
        optimizer.set_lr(lr)
        optimizer.set_weight_decay(decay)
        optimizer.begin_step(1)
        optimizer.finish_grads()
        optimizer.step(1)
        torch.testing.assert_close(parameters[0].detach(), before[0] * (1 - lr * decay), rtol=1e-15, atol=0)
        assert torch.equal(parameters[1], before[1])  # vectors do not decay


def test_an_optimizer_that_breaks_its_spec_is_refused():
    careless = OptimizerSpec(
        "careless", build=lambda groups, config: torch.optim.SGD(groups, lr=config.lr), slots=("momentum_buffer",)
    )
    with pytest.raises(ValueError, match=r"'careless'.*momentum_buffer is missing"):
        build_optimizer(
            odd_parameters(),
            single_layout(),
            spec=careless,
            optimizer=OptimizerConfig(),
            parallel=ParallelConfig(),
        )


# ---- 16-bit weights


def test_bf16_weights_move_by_their_fp32_masters():
    p = place(nn.Parameter(torch.ones(64, dtype=torch.bfloat16)), replicated("p", (64,), init=INIT))
    optimizer = optimizer_for([p], single_layout(), name="sgd", momentum=0.0)
    optimizer.set_lr(1e-3)
    for _ in range(8):  # each step alone is below half a bf16 unit at 1
        optimizer.begin_step(1)
        p.float().sum().backward()
        optimizer.finish_grads()
        optimizer.step(1)
    master = optimizer.state_arrays()[0].tensors["master"]
    torch.testing.assert_close(master, torch.full((64,), 0.992), rtol=1e-5, atol=0)
    assert torch.equal(p.detach(), master.bfloat16())


def test_masters_follow_loaded_weights_and_weights_follow_loaded_masters():
    p = place(nn.Parameter(torch.ones(64, dtype=torch.bfloat16)), replicated("p", (64,), init=INIT))
    optimizer = optimizer_for([p], single_layout())
    with torch.no_grad():
        p.fill_(3.0)
    optimizer.refresh_masters()
    master = optimizer.state_arrays()[0].tensors["master"]
    assert bool((master == 3.0).all())
    master.fill_(5.0)
    optimizer.refresh_weights()
    assert bool((p == 5.0).all())


# ---- state for checkpoints


def ramp(k, n):
    return torch.arange(n, dtype=torch.float64) + 1000.0 * k


def save_state(rank, world_size, sharded, bucket_size):
    """Fill exp_avg of parameter k with a ramp from 1000 k through the ranges, and give back what each range says."""
    layout = build_layout(build_mesh(world_size), rank)
    parameters = odd_parameters(torch.bfloat16)
    optimizer = optimizer_for(parameters, layout, sharded=sharded, bucket_size=bucket_size)
    for shard in optimizer.state_arrays():
        k = int(shard.placement.pieces[0].name[1:])
        shard.tensors["exp_avg"].copy_(ramp(k, math.prod(shard.local_shape))[shard.begin : shard.end])
    again = optimizer.state_arrays()
    return [
        (s.placement.pieces[0].name, s.local_shape, s.begin, s.whole, {n: t.clone() for n, t in s.tensors.items()})
        for s in again
    ]


@pytest.mark.parametrize(
    ("world_size", "sharded"), [(1, False), (1, True), (2, False), (2, True), (3, True), (4, True)]
)
@pytest.mark.parametrize("bucket_size", [1, 200, 10**6])
def test_state_ranges_cover_each_parameter_once_in_its_own_coordinates(world_size, sharded, bucket_size):
    replies = run_ranks(save_state, world_size, sharded, bucket_size)
    split = sharded and world_size > 1
    for k, shape in enumerate(SHAPES):
        found = [entry for reply in (replies if split else replies[:1]) for entry in reply if entry[0] == f"p{k}"]
        found.sort(key=lambda entry: entry[2])
        assert all(entry[1] == shape and entry[3] == (not split) for entry in found)
        assert {name for entry in found for name in entry[4]} == {"master", "exp_avg", "exp_avg_sq"}
        ends = [entry[2] + entry[4]["exp_avg"].numel() for entry in found]
        assert [entry[2] for entry in found] == [0, *ends[:-1]]  # neither gap nor overlap
        assert torch.equal(torch.cat([entry[4]["exp_avg"] for entry in found]).double(), ramp(k, math.prod(shape)))
        master = torch.cat([entry[4]["master"] for entry in found])
        assert torch.equal(master, values(f"p{k}", shape).to(torch.bfloat16).float().flatten())


def resumed(rank, world_size, sharded, saved_steps, name):
    """Train, carry weights, state and step count over to a new optimizer, train on: must equal training straight."""
    layout = build_layout(build_mesh(world_size), rank)
    samples = [rank]
    straight, parameters = odd_parameters(), odd_parameters()
    reference = optimizer_for(straight, layout, sharded=sharded, name=name)
    train(reference, straight, samples, 4, world_size)
    first = optimizer_for(parameters, layout, sharded=sharded, name=name)
    train(first, parameters, samples, saved_steps, world_size)
    fresh = [place(nn.Parameter(p.detach().clone()), p.placement) for p in parameters]
    # whole parameters fit any bucket size; shards are carried over within one
    second = optimizer_for(fresh, layout, sharded=sharded, bucket_size=40 if sharded else 7, name=name)
    for old, new in zip(first.state_arrays(), second.state_arrays(), strict=True):
        assert (old.begin, old.end) == (new.begin, new.end)
        for slot, tensor in new.tensors.items():
            tensor.copy_(old.tensors[slot])
    second.step_count = first.step_count
    train(second, fresh, samples, 4 - saved_steps, world_size)
    return all(torch.equal(a, b) for a, b in zip(straight, fresh, strict=True)), second.step_count


@pytest.mark.parametrize("name", ["adam", "sgd"])
@pytest.mark.parametrize(("world_size", "sharded"), [(1, False), (2, False), (2, True)])
def test_resume_through_state_arrays_is_bit_exact(world_size, sharded, name):
    for same, step_count in run_ranks(resumed, world_size, sharded, 2, name):
        assert same
        assert step_count == (4 if name == "adam" else 0)


def test_state_exists_before_the_first_step():
    optimizer = optimizer_for(odd_parameters(), single_layout())
    shards = optimizer.state_arrays()
    assert [s.placement.pieces[0].name for s in shards] == [f"p{i}" for i in range(len(SHAPES))]
    assert all(set(s.tensors) == {"exp_avg", "exp_avg_sq"} for s in shards)
    assert optimizer.step_count == 0
    optimizer.step_count = 7
    assert optimizer.step_count == 7
