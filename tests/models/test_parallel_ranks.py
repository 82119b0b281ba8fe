"""Two and four real ranks: shared KV heads, dropout under sequence parallelism, tied stages, bytes that move."""

import itertools
from dataclasses import replace

import pytest
import torch

from mcore_models.build import build_stage_model, initialise_model
from mcore_models.config import ModelConfig
from mcore_models.dropout import DropoutState
from mcore_models.kernels import torch_kernels
from mcore_models.local_parameters import RankShape
from mcore_models.logical import logical_shapes
from mcore_models.specs import Recompute, StageSpec
from mcore_models.traffic_cost import StepShape, num_crossings, step_traffic
from mcore_parallel.axis import build_layout, single_layout
from mcore_parallel.grad_sync import GradBuffers
from mcore_parallel.mesh import build_mesh
from mcore_parallel.pipeline.actions import looped_flow
from mcore_parallel.pipeline.compile import compile_schedule
from mcore_parallel.pipeline.executor import run
from mcore_parallel.placement import placement_of
from mcore_parallel.plugins import Registry, plugin_manager
from mcore_parallel.testing import run_ranks

SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 101, "ffn_hidden_size": 48}
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "group_query_attention": True,
    "num_query_groups": 1,
}
FAMILIES = {
    "gpt": {**SHAPE, "max_position_embeddings": 16},
    "llama": {**SHAPE, **LLAMA},
    "qwen": {**SHAPE, **LLAMA, "add_qkv_bias": True, "num_query_groups": 2},
}


def tokens_and_labels(batch=2, length=8):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 101, (2, batch, length), generator=generator)


def build(fields, layout, stage=None, **options):
    config = ModelConfig(**{"make_vocab_size_divisible_by": 8, "init_method_std": 0.2, **fields})
    stage = stage or StageSpec(0, config.num_layers, True, True)
    options = {"dtype": torch.float64, **options}
    model = build_stage_model(config, layout=layout, stage=stage, kernels=torch_kernels(), **options)
    initialise_model(model, seed=1234)
    return model


def step(model):
    tokens, labels = tokens_and_labels()
    loss = model(tokens, labels=labels, dropout=DropoutState(5, 3, torch.tensor([11, 12])))
    loss.backward()
    return loss.item()


def collect_gradients(model):
    """``name, offset, rows`` of each piece's completed main gradient on this rank."""
    return [
        (piece.name, piece.offset, p.main_grad[piece.start : piece.start + piece.shape[0]].clone().numpy())
        for p in model.parameters()
        for piece in placement_of(p).pieces
    ]


def tensor_parallel_rank(rank, world, fields, sequence_parallel, recompute):
    layout = build_layout(build_mesh(world, tp=world), rank, kv_heads=ModelConfig(**fields).num_kv_heads)
    model = build(fields, layout, sequence_parallel=sequence_parallel, recompute=recompute)
    buffers = GradBuffers(model.parameters(), layout)
    loss = step(model)
    buffers.finish()
    return loss, collect_gradients(model)


@pytest.mark.parametrize(
    ("family", "tp", "sequence_parallel", "rate"),
    [
        ("llama", 2, False, 0.0),
        ("llama", 4, True, 0.1),
        ("qwen", 4, True, 0.0),
        ("qwen", 4, False, 0.1),
        ("gpt", 2, True, 0.1),
        ("gpt", 4, False, 0.0),
    ],
)
def test_tensor_parallel_ranks_equal_one_rank(family, tp, sequence_parallel, rate):
    fields = {**FAMILIES[family], "hidden_dropout": rate, "attention_dropout": rate}
    model = build(fields, single_layout())
    buffers = GradBuffers(model.parameters(), single_layout())
    loss = step(model)
    buffers.finish()
    truth = {name: torch.from_numpy(grad) for name, _, grad in collect_gradients(model)}
    recompute = Recompute("uniform", 1) if rate else None
    results = run_ranks(tensor_parallel_rank, tp, fields, sequence_parallel, recompute)
    seen = dict.fromkeys(truth, 0)
    for ranks_loss, pieces in results:
        assert ranks_loss == pytest.approx(loss, rel=1e-12)
        for name, offset, grad in pieces:
            box = tuple(slice(o, o + n) for o, n in zip(offset, grad.shape, strict=True))
            torch.testing.assert_close(torch.from_numpy(grad), truth[name][box], rtol=1e-9, atol=1e-9)
            seen[name] += grad.size
    assert all(seen[name] >= truth[name].numel() for name in truth), "some rows are on no rank"


class OneBatch:
    """A stage that sees the same micro-batch again and again, for the pipeline executor."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, model):
        self.model = model

    def receive_shape(self, micro_batch):
        return self.model.activation_shape(2, 8)

    def forward(self, micro_batch, chunk, received):
        tokens, labels = tokens_and_labels()
        dropout = DropoutState(5, 3, torch.tensor([11, 12]))
        inputs = tokens if received is None else received
        return self.model(inputs, labels=labels if self.model.stage.is_last else None, dropout=dropout)


def stage_of(pp, index):
    return StageSpec(index * 2 // pp, 2 // pp, index == 0, index == pp - 1)


def traffic_rank(rank, world, fields, shape, sizes, sequence_parallel):
    layout = build_layout(build_mesh(world, **sizes), rank, kv_heads=ModelConfig(**fields).num_kv_heads)
    pp = layout.axis("pp")
    options = {"dtype": torch.float32, "sequence_parallel": sequence_parallel, "recompute": shape.recompute}
    model = build(fields, layout, stage_of(pp.size, pp.rank), **options)
    buffers = GradBuffers(model.parameters(), layout, bucket_size=shape.bucket_size, sharded=shape.zero)
    schedule = Registry("schedule", plugin_manager(disabled=[]).collect("mcore_pipeline_schedules"))["1f1b"]
    plan = compile_schedule(schedule, num_ranks=pp.size, num_micro_batches=shape.num_micro_batches)
    layout.recorder.enabled = True
    buffers.begin_step(shape.num_micro_batches)
    run(plan.for_rank(pp.rank), stage=OneBatch(model), axis=pp)
    buffers.finish()
    buffers.start_gather_weights()
    buffers.finish_gather_weights()
    return layout.recorder.totals(), layout.axis("tp").rank, pp.rank


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("tp", "pp", "data_ranks", "sequence_parallel", "zero", "recompute", "rate"),
    [
        (2, 1, 2, True, True, None, 0.0),
        (2, 1, 2, False, False, Recompute("uniform", 2), 0.0),
        (4, 1, 1, True, False, Recompute("block", 1), 0.1),
        (1, 1, 4, False, True, None, 0.0),
        (2, 2, 1, True, False, Recompute("uniform", 1), 0.0),
        (1, 2, 2, False, True, None, 0.1),
    ],
)
def test_bytes_equal_the_closed_form(family, tp, pp, data_ranks, sequence_parallel, zero, recompute, rate):
    fields = {**FAMILIES[family], "hidden_dropout": rate}
    shape = StepShape(
        seq_length=8,
        micro_batch_size=2,
        num_micro_batches=3,
        data_ranks=data_ranks,
        zero=zero,
        bucket_size=3000,
        recompute=recompute,
    )
    config = ModelConfig(**{"make_vocab_size_divisible_by": 8, **fields})
    for totals, tp_rank, stage in run_ranks(traffic_rank, 4, fields, shape, {"tp": tp, "pp": pp}, sequence_parallel):
        rank = RankShape(tp, tp_rank, sequence_parallel)
        own = replace(shape, num_crossings=num_crossings(looped_flow(pp), stage))
        assert totals == step_traffic(config, stages=[stage_of(pp, stage)], rank=rank, shape=own, vocab_size=101)


def stage_rank(rank, world, fields):
    layout = build_layout(build_mesh(world, pp=2), rank)
    stage = StageSpec(rank, 1, rank == 0, rank == 1)
    model = build(fields, layout, stage=stage)
    names = logical_shapes(model)
    weights = {piece.name: p.detach().numpy() for p in model.parameters() for piece in placement_of(p).pieces[:1]}
    partial = {name for p in model.parameters() for name in placement_of(p).partial_axes}
    return names, weights, partial


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_stages_hold_their_part_and_start_as_the_whole_model_does(family):
    (first, first_weights, partial), (last, last_weights, _) = run_ranks(stage_rank, 2, FAMILIES[family])
    whole = build(FAMILIES[family], single_layout())
    assert {**first, **last} == logical_shapes(whole)
    truth = {piece.name: p.detach().numpy() for p in whole.parameters() for piece in placement_of(p).pieces[:1]}
    for name, values in itertools.chain(first_weights.items(), last_weights.items()):
        assert (values == truth[name]).all(), name
    shared = first.keys() & last.keys()
    if family == "gpt":
        assert shared == {"embedding.word_embeddings.weight"}
        assert partial == {"embedding"}
    else:
        assert not shared
        assert not partial
