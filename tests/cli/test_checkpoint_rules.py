"""What is saved and loaded: nothing is overwritten, and nothing is loaded from nowhere, by accident."""

from __future__ import annotations

import pytest

from mcore_cli.rules.check import find_problems


@pytest.fixture
def problems(manager):
    return lambda config: find_problems(config, 1, manager)


def test_a_folder_in_use_is_refused(small, problems, checkpoint) -> None:
    root = checkpoint(4)
    checkpoint(8)
    told = problems(small(save=str(root)))
    assert len(told) == 1
    assert told[0].startswith(f"[save-in-use] --save {root}: it holds 2 checkpoints (newest: iteration 8)")
    assert all(flag in told[0] for flag in ("--load", "--auto-resume", "--overwrite"))


@pytest.mark.parametrize("choice", [{"auto_resume": True}, {"overwrite": True}])
def test_a_choice_frees_it(choice, small, problems, checkpoint) -> None:
    assert problems(small(save=str(checkpoint()), **choice)) == []


def test_loading_from_it_frees_it(small, problems, checkpoint) -> None:
    root = str(checkpoint())
    assert problems(small(save=root, load=root)) == []


def test_the_default_folder_is_watched(small, problems, checkpoint) -> None:
    checkpoint(root="runs/trial")
    assert [p.split(":")[0] for p in problems(small(name="trial"))] == ["[save-in-use] --save runs/trial"]


def test_an_uncommitted_folder_is_no_checkpoint(small, problems, tmp_path) -> None:
    (tmp_path / "ckpt" / "step-00000004").mkdir(parents=True)
    assert problems(small(save="ckpt")) == []
    assert "[load]" in problems(small(load="ckpt"))[0]


def test_a_file_in_the_way(small, problems, tmp_path) -> None:
    (tmp_path / "ckpt").write_text("")
    assert problems(small(save="ckpt"))[0].startswith("[save] --save ckpt: ckpt is a file")


def test_an_empty_folder_cannot_be_loaded(small, problems, tmp_path) -> None:
    (tmp_path / "ckpt").mkdir()
    assert "[load] --load ckpt: no checkpoint in ckpt" in problems(small(load="ckpt"))[0]


def test_a_missing_step_lists_those_there_are(small, problems, checkpoint) -> None:
    root = checkpoint(4)
    checkpoint(8)
    assert problems(small(load=str(root), ckpt_step=4)) == []
    assert "there are: 4, 8" in problems(small(load=str(root), ckpt_step=5))[0]


def test_steps_need_a_load(small, problems) -> None:
    assert "[no-effect] --ckpt-step 5" in problems(small(ckpt_step=5))[0]


def test_overwriting_what_is_loaded_is_refused(small, problems, checkpoint) -> None:
    root = str(checkpoint())
    assert "[resume-choice]" in problems(small(save=root, load=root, overwrite=True))[0]
    assert problems(small(save="elsewhere", load=root, overwrite=True)) == []


def test_load_and_auto_resume_exclude_each_other(small, problems, checkpoint) -> None:
    root = str(checkpoint())
    assert "[resume-choice]" in problems(small(load=root, auto_resume=True))[0]


def test_a_checkpoint_without_optimizer(small, problems, checkpoint) -> None:
    root = str(checkpoint(optimizer={"saved": False}))
    told = problems(small(load=root))
    assert "[load-optimizer]" in told[0]
    assert "--no-load-optim" in told[0]
    assert problems(small(load=root, no_load_optim=True)) == []
    assert problems(small(load=root, finetune=True)) == []


def test_another_model_is_told_before_ranks_start(small, problems, checkpoint) -> None:
    root = str(checkpoint(config=small().model_dump(mode="json")))
    assert problems(small(load=root)) == []
    told = problems(small(load=root, num_layers=4, ffn_hidden_size=128))
    assert len(told) == 1
    assert "--num-layers 4, --ffn-hidden-size 128" in told[0]
    assert "--num-layers 8, --ffn-hidden-size 256" in told[0]


def test_an_unknown_store_is_told(small, problems) -> None:
    told = problems(small(save="s4://bucket", load="s4://bucket"))
    assert len(told) == 2
    assert all("s4" in line and "file" in line for line in told)
