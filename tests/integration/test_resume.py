"""Stopping and going on changes nothing: bit for bit under one layout, to rounding under another."""

from __future__ import annotations

import pytest
import tiny
import torch

from mcore_parallel.testing import run_ranks

LAYOUTS = {
    "one": (1, {}),
    "dp2-zero": (2, {"use_distributed_optimizer": True}),
    "zbv-pp2-dp2-zero": (
        4,
        {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv", "use_distributed_optimizer": True},
    ),
    "vpp2-pp2": (2, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}),
    "tp2-sp-pp2-dp2-zero": (
        8,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "pipeline_model_parallel_size": 2,
            "use_distributed_optimizer": True,
        },
    ),
}
RUN = {
    "train_iters": 6,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 2,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}


def _train(layout, folder, family=tiny.LLAMA, **fields):
    world, parallel = LAYOUTS[layout]
    config = tiny.tiny_config(family, **{**RUN, **parallel, **fields})
    return run_ranks(tiny.train_job, world, config, str(folder), limit=100)[0]


def _losses(steps):
    return [(step.iteration, step.consumed_samples, step.loss, step.lr, step.grad_norm) for step in steps]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bf16", [False, True])
def test_resume_is_bit_exact(layout, bf16, tmp_path):
    whole, want, _ = _train(layout, tmp_path / "whole", bf16=bf16)
    first, _, _ = _train(layout, tmp_path / "cut", bf16=bf16, exit_interval=3)
    second, got, notices = _train(layout, tmp_path / "cut", bf16=bf16, load=str(tmp_path / "cut"))
    assert [step.iteration for step in first] == [1, 2, 3]
    assert _losses(first + second) == _losses(whole)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert notices == [f"resumed from {tmp_path}/cut/step-00000003 at iteration 3"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("one", "tp2-sp-pp2-dp2-zero"),
        ("tp2-sp-pp2-dp2-zero", "dp2-zero"),
        ("vpp2-pp2", "zbv-pp2-dp2-zero"),
        ("zbv-pp2-dp2-zero", "one"),
    ],
)
def test_another_layout_goes_on_with_the_same_losses(before, after, tmp_path):
    tied = {"untie_embeddings_and_output_weights": False, "family": tiny.GPT}
    whole, _, _ = _train(before, tmp_path / "whole", **tied)
    _train(before, tmp_path / "cut", exit_interval=3, **tied)
    second, _, _ = _train(after, tmp_path / "cut", load=str(tmp_path / "cut"), **tied)
    assert [step.loss for step in second] == pytest.approx([step.loss for step in whole[3:]], rel=1e-6)
    assert [step.grad_norm for step in second] == pytest.approx([step.grad_norm for step in whole[3:]], rel=1e-5)


def test_the_optimizer_state_matters(tmp_path):
    """The comparison above would see a resume that forgot the moments."""
    whole, _, _ = _train("one", tmp_path / "whole")
    _train("one", tmp_path / "cut", exit_interval=3)
    second, _, _ = _train("one", tmp_path / "cut", load=str(tmp_path / "cut"), no_load_optim=True)
    assert second[0].loss == whole[3].loss
    assert abs(second[2].loss - whole[5].loss) > 1e-6 * whole[5].loss


def test_auto_resume_takes_the_newest_or_starts_fresh_and_says_which(tmp_path):
    folder = tmp_path / "run"
    _, _, notices = _train("one", folder, auto_resume=True, exit_interval=2)
    assert notices == [f"--auto-resume: no checkpoint in {folder}, starting fresh"]
    steps, _, notices = _train("one", folder, auto_resume=True, exit_interval=2)
    assert [step.iteration for step in steps] == [3, 4]
    assert notices == [f"resumed from {folder}/step-00000002 at iteration 2"]


def test_finetune_takes_weights_alone(tmp_path):
    first, weights, _ = _train("one", tmp_path / "a", exit_interval=2)
    steps, _, notices = _train("one", tmp_path / "b", load=str(tmp_path / "a"), finetune=True)
    assert len(first) == 2
    assert [step.iteration for step in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[0].lr == 0.0
    assert "everything else fresh" in notices[0]
    assert weights


def test_a_step_of_choice(tmp_path):
    whole, _, _ = _train("one", tmp_path / "run", save_interval=2)
    steps, _, _ = _train("one", tmp_path / "again", load=str(tmp_path / "run"), ckpt_step=4)
    assert _losses(steps) == _losses(whole[4:])


def test_the_schedule_of_the_checkpoint_must_be_kept_or_overridden(tmp_path):
    _train("one", tmp_path / "run", exit_interval=2)
    load = {"load": str(tmp_path / "run")}
    with pytest.raises(AssertionError, match="max_lr is 0.02 here and 0.01 in the checkpoint.*--override-opt_param"):
        _train("one", tmp_path / "x", lr=2e-2, **load)
    override, _, notices = _train("one", tmp_path / "y", lr=2e-2, override_opt_param_scheduler=True, **load)
    kept, _, _ = _train("one", tmp_path / "z", lr=2e-2, use_checkpoint_opt_param_scheduler=True, **load)
    plain, _, _ = _train("one", tmp_path / "w", **load)
    assert "schedule from the flags" in notices[1]
    assert [step.lr for step in override] == pytest.approx([2 * step.lr for step in plain])
    assert [step.lr for step in kept] == [step.lr for step in plain]


def test_a_longer_run_is_accepted_with_its_new_horizon(tmp_path):
    _train("one", tmp_path / "run", exit_interval=2)
    steps, _, notices = _train("one", tmp_path / "run", load=str(tmp_path / "run"), train_iters=8)
    assert steps[-1].iteration == 8
    assert any("decays over 8 iterations" in notice for notice in notices)


def test_another_seed_is_refused_unless_asked_for(tmp_path):
    _train("one", tmp_path / "run", exit_interval=2)
    load = {"load": str(tmp_path / "run"), "seed": 5}
    with pytest.raises(AssertionError, match="--seed 5 differs from the checkpoint's 1234"):
        _train("one", tmp_path / "x", **load)
    _, _, notices = _train("one", tmp_path / "y", no_load_rng=True, **load)
    assert any("seed 5 instead of the checkpoint's 1234" in notice for notice in notices)


def test_a_checkpoint_without_optimizer_says_what_to_give(tmp_path):
    _train("one", tmp_path / "run", exit_interval=2, no_save_optim=True)
    with pytest.raises(AssertionError, match="holds no optimizer state; give --no-load-optim"):
        _train("one", tmp_path / "x", load=str(tmp_path / "run"))
