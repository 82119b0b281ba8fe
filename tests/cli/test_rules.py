"""Every rule: a run that breaks it is told so with real flags and a legal way out, a run beside it passes."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_cli.rules.check import find_problems
from mcore_cli.rules.effect import EFFECT_RULES
from mcore_cli.rules.engine import Context, divisors, nearest_divisors, nearest_multiples, violations
from mcore_cli.rules.layout import LAYOUT_RULES
from mcore_cli.rules.model import MODEL_RULES
from mcore_cli.rules.pipeline import pipeline_rules
from mcore_cli.rules.schedule import SCHEDULE_RULES

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
ROPE = {"position_embedding_type": "rope"}
GROUPS = {"group_query_attention": True, "num_query_groups": 4}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

# rule, ranks, fields that break it, words of the message, fields that repair it
CASES: list[tuple[str, int, dict[str, Any], list[str], dict[str, Any]]] = [
    (
        "context-parallel",
        2,
        {"context_parallel_size": 2},
        ["not available in this version", "use 1"],
        {"context_parallel_size": 1},
    ),
    ("world-size", 6, {TP: 4}, ["6 ranks", "4 x 1 x 1 = 4", "nearest: 4 or 8 ranks"], {TP: 2, "global_batch_size": 12}),
    ("world-size", 1, {TP: 2}, ["1 rank ", "nearest: 2 ranks"], {TP: 1}),
    (
        "sequence-parallel",
        1,
        {"sequence_parallel": True},
        ["no effect", "--no-sequence-parallel"],
        {"sequence_parallel": False},
    ),
    ("sequence-split", 4, {TP: 4, "sequence_parallel": True, "seq_length": 30}, ["30", "28 or 32"], {"seq_length": 32}),
    ("layers-per-stage", 4, {PP: 4, "num_layers": 30}, ["30", " 4", "28 or 32", "3 or 5"], {"num_layers": 28}),
    (
        "layers-per-stage",
        4,
        {PP: 4, "num_layers": 3},
        ["no layer is dropped", "nearest: --num-layers 4"],
        {"num_layers": 4},
    ),
    (
        "heads-per-rank",
        3,
        {TP: 3, "ffn_hidden_size": 96, "global_batch_size": 2},
        ["8 (8 KV heads)", " 3", "2 or 4", "6 or 9"],
        {"num_attention_heads": 6, "kv_channels": 8},
    ),
    (
        "kv-heads-per-rank",
        4,
        {TP: 4, "num_attention_heads": 12, "kv_channels": 8, "group_query_attention": True, "num_query_groups": 6},
        ["6 (12 query heads)", " 4"],
        {"num_query_groups": 4},
    ),
    ("ffn-per-rank", 4, {TP: 4, "ffn_hidden_size": 90}, ["90", "88 or 92"], {"ffn_hidden_size": 92}),
    ("backend", 1, {"distributed_backend": "nccl", "device": "cpu"}, ["nccl", "gloo"], {"distributed_backend": "gloo"}),
    ("head-size", 1, {"hidden_size": 100}, ["100", "96 or 104", "5 or 10"], {"hidden_size": 104}),
    (
        "query-groups",
        1,
        {"group_query_attention": True, "num_query_groups": 3},
        ["8", "3", "2 or 4"],
        {"num_query_groups": 4},
    ),
    (
        "query-groups-unused",
        1,
        {"num_query_groups": 4},
        ["no effect", "add --group-query-attention"],
        {"group_query_attention": True},
    ),
    ("query-groups-missing", 1, {"group_query_attention": True}, ["give --num-query-groups"], {"num_query_groups": 2}),
    ("ffn-size", 1, {"swiglu": True, "hidden_size": 16}, ["is 0", "give --ffn-hidden-size"], {"ffn_hidden_size": 32}),
    ("positions", 1, {"max_position_embeddings": 16}, ["16", "32"], {"max_position_embeddings": 32}),
    ("rotary", 1, {**ROPE, "rotary_percent": 0.4}, ["0.4", "3 cannot be paired"], {"rotary_percent": 0.5}),
    (
        "rope-bounds",
        1,
        {**ROPE, "use_rope_scaling": True, "rope_scaling_low_freq_factor": 4.0},
        ["4.0", "1 and 4"],
        {"rope_scaling_low_freq_factor": 1.0},
    ),
    ("recompute", 1, {"recompute_granularity": "full"}, ["missing: --recompute-method, --recompute-num-layers"], FULL),
    ("recompute", 1, {"recompute_num_layers": 2}, ["missing: --recompute-granularity"], {"recompute_num_layers": None}),
    (
        "recompute-layers",
        4,
        {**FULL, PP: 4, "recompute_num_layers": 3},
        ["3 with 2 layers"],
        {"recompute_num_layers": 2},
    ),
    ("global-batch", 4, {"global_batch_size": 20}, ["20", "2 x 4 = 8", "16 or 24"], {"global_batch_size": 24}),
    ("length", 1, {"train_iters": None}, ["a run needs a length"], {"train_iters": 1}),
    ("length-twice", 1, {"train_samples": 100}, ["--train-iters 10", "--train-samples 100"], {"train_iters": None}),
    (
        "length-samples",
        1,
        {"train_iters": None, "train_samples": 8},
        ["not one whole step", "16"],
        {"train_samples": 16},
    ),
    ("min-lr", 1, {"min_lr": 1.0}, ["1.0", "0.0003"], {"min_lr": 0.0003}),
    ("warmup-init", 1, {"lr_warmup_init": 1.0, "lr_warmup_iters": 2}, ["1.0"], {"lr_warmup_init": 0.0001}),
    (
        "schedule-units",
        1,
        {"lr_warmup_samples": 8},
        ["--train-iters", "use --lr-warmup-iters"],
        {"lr_warmup_samples": 0},
    ),
    (
        "schedule-units",
        1,
        {"train_iters": None, "train_samples": 160, "lr_decay_iters": 5},
        ["use --lr-decay-samples"],
        {"lr_decay_iters": None},
    ),
    ("warmup-twice", 1, {"lr_warmup_fraction": 0.1, "lr_warmup_iters": 2}, ["not both"], {"lr_warmup_fraction": None}),
    ("warmup", 1, {"lr_warmup_iters": 10}, ["10", "--lr-warmup-iters 9"], {"lr_warmup_iters": 9}),
    (
        "warmup",
        1,
        {"train_iters": None, "train_samples": 160, "lr_warmup_samples": 200},
        ["200", "160"],
        {"lr_warmup_samples": 100},
    ),
    ("wsd", 1, {"lr_decay_style": "WSD"}, ["give --lr-wsd-decay-iters"], {"lr_wsd_decay_iters": 4}),
    ("wsd-length", 1, {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 11}, ["11", "10"], {"lr_wsd_decay_iters": 10}),
    ("weight-decay", 1, {"start_weight_decay": 0.1}, ["constant"], {"start_weight_decay": None}),
    (
        "weight-decay",
        1,
        {"weight_decay_incr_style": "linear", "start_weight_decay": 0.1},
        ["without --end-weight-decay"],
        {"end_weight_decay": 0.2},
    ),
    ("unknown-name", 1, {"optimizer": "adamm"}, ["did you mean adam?"], {"optimizer": "adam"}),
    ("unknown-name", 1, {"pipeline_schedule": "1f2b"}, ["did you mean 1f1b?"], {"pipeline_schedule": "1f1b"}),
    (
        "unknown-name",
        1,
        {"transformer_impl": "loco"},
        ["no kernel set", "did you mean local?"],
        {"transformer_impl": "local"},
    ),
    ("unknown-name", 1, {"dataset": "stdlibs"}, ["no dataset", "did you mean stdlib?"], {"dataset": "stdlib"}),
    ("unknown-name", 1, {"tokenizer_type": "ByteTokeniser"}, ["did you mean ByteTokenizer?"], {"tokenizer_type": None}),
    (
        "resume-choice",
        1,
        {"auto_resume": True, "overwrite": True},
        ["--auto-resume with --overwrite"],
        {"overwrite": False},
    ),
    (
        "schedule-source",
        1,
        {"auto_resume": True, "override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": True},
        ["keep one"],
        {"override_opt_param_scheduler": False},
    ),
    ("load", 1, {"load": "nowhere"}, ["does not exist", "--auto-resume is for requeued jobs"], {"load": None}),
]

IDLE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"rotary_base": 5.0}, ROPE),
    ({"rotary_percent": 0.5}, ROPE),
    ({"use_rope_scaling": True}, ROPE),
    ({**ROPE, "rope_scaling_factor": 4.0}, {"use_rope_scaling": True}),
    ({"add_qkv_bias": True}, {"disable_bias_linear": True}),
    ({"lr_wsd_decay_iters": 4}, {"lr_decay_style": "WSD"}),
    ({"lr_wsd_decay_style": "cosine"}, {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 4}),
    ({"lr_decay_style": "constant", "min_lr": 1e-5}, {"lr_decay_style": "linear"}),
    ({"lr_decay_style": "constant", "lr_decay_iters": 5}, {"lr_decay_style": "linear"}),
    ({"lr_warmup_init": 1e-5}, {"lr_warmup_iters": 2}),
    ({"optimizer": "sgd", "adam_beta2": 0.9}, {"optimizer": "adam"}),
    ({"sgd_momentum": 0.5}, {"optimizer": "sgd"}),
    ({"override_opt_param_scheduler": True}, {"auto_resume": True}),
    ({"no_load_optim": True}, {"auto_resume": True}),
    ({"eval_iters": 3}, {"eval_interval": 5}),
    ({"data_path": ["a"]}, {"data_path": []}),
]


@pytest.mark.parametrize(
    ("rule", "ranks", "broken", "words", "repair"), CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)]
)
def test_rule(rule, ranks, broken, words, repair, small, manager, known_flags, flags_in) -> None:
    problems = find_problems(small(ranks, **broken), ranks, manager)
    told = [problem for problem in problems if problem.startswith(f"[{rule}] ")]
    assert len(told) == 1, problems
    assert [word for word in words if word not in told[0]] == []
    assert flags_in(told[0]) <= known_flags
    assert "\n" not in told[0]
    assert find_problems(small(ranks, **{**broken, **repair}), ranks, manager) == []


@pytest.mark.parametrize(("idle", "repair"), IDLE, ids=lambda fields: "-".join(fields))
def test_options_without_effect_are_refused(idle, repair, small, manager, known_flags, flags_in) -> None:
    told = find_problems(small(**idle), 1, manager)
    assert len(told) == 1, told
    assert "no effect" in told[0]
    assert flags_in(told[0]) <= known_flags
    assert find_problems(small(**{**idle, **repair}), 1, manager) == []


def test_the_small_run_is_legal(small, manager) -> None:
    assert find_problems(small(), 1, manager) == []


def test_every_rule_is_tested() -> None:
    named = {rule.name for rules in (LAYOUT_RULES, MODEL_RULES, SCHEDULE_RULES) for rule in rules}
    assert named <= {case[0] for case in CASES}
    assert len(EFFECT_RULES) >= 10


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("groups", [1, 2, 3, 4])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
def test_head_splits_are_legal_or_refused_with_the_numbers(heads: int, groups: int, tp: int, small, manager) -> None:
    fields = {
        "num_attention_heads": heads,
        "kv_channels": 8,
        "group_query_attention": True,
        "num_query_groups": groups,
        "ffn_hidden_size": 96,
    }
    problems = find_problems(small(tp, **fields, **{TP: tp}), tp, manager)
    legal = heads % tp == 0 and heads % groups == 0 and (groups % tp == 0 or tp % groups == 0)
    assert (problems == []) == legal
    for problem in problems:
        assert all(str(number) in problem for number in (heads, groups, tp))


def test_layers_are_placed_or_refused(small, manager) -> None:
    rules = pipeline_rules(manager)
    for layers in range(1, 25):
        for pp in range(1, 7):
            told = violations(Context(small(pp, num_layers=layers, **{PP: pp}), pp), rules)
            assert (told == []) == (layers % pp == 0)
            assert all(f"--num-layers {layers} over --pipeline-model-parallel-size {pp}" in str(v) for v in told)


def test_all_violations_come_together(small, manager) -> None:
    config = small(6, num_attention_heads=6, hidden_size=64, num_layers=7, min_lr=1.0, **{TP: 4, PP: 2})
    rules = [problem.split("]")[0][1:] for problem in find_problems(config, 6, manager)]
    assert rules == ["world-size", "heads-per-rank", "kv-heads-per-rank", "layers-per-stage", "head-size", "min-lr"]


@pytest.mark.parametrize("purpose", ["verify", "eval"])
def test_length_and_saving_matter_to_training_only(purpose, small, manager, checkpoint) -> None:
    config = small(train_iters=None, save=str(checkpoint()))
    assert find_problems(config, 1, manager, purpose) == []
    assert len(find_problems(config, 1, manager)) == 2
    assert find_problems(small(1, **{TP: 2}), 1, manager, purpose) != []


def test_verifying_needs_no_corpus(small, manager) -> None:
    config = small(dataset="gpt", data_path=["nowhere"], tokenizer_type="ByteTokenizer")
    assert find_problems(config, 1, manager, "verify") == []
    assert any("nowhere" in problem for problem in find_problems(config, 1, manager))


def test_a_vocabulary_smaller_than_the_tokenizers(small, manager) -> None:
    told = find_problems(small(vocab_size=200), 1, manager)
    assert len(told) == 1
    assert "200" in told[0]
    assert "--vocab-size" in told[0]


def test_numbers_nearby() -> None:
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert nearest_multiples(30, 4) == "28 or 32"
    assert nearest_multiples(3, 4) == "4"
    assert nearest_divisors(4, 30) == "3 or 5"
    assert nearest_divisors(40, 30) == "30"


def test_unknown_kinds_of_names_are_not_judged(small) -> None:
    from mcore_cli.rules.names import NAME_RULES

    assert violations(Context(small(optimizer="mine")), NAME_RULES) == []
