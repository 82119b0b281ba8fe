"""The training loop: evaluation, stopping, failures, metrics, and what callbacks see."""

from __future__ import annotations

import json
import math
import os
import signal

import pytest
import tiny
import torch
from rich.console import Console

from mcore_cli.callbacks import LiveProgress, MetricsFile, PlainLines, TensorBoard
from mcore_cli.errors import RunFailed
from mcore_cli.resolve import complete
from mcore_cli.results import RunInfo
from mcore_cli.stop import StopRequest
from mcore_cli.trainer import drive, start
from mcore_parallel.testing import run_ranks

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}


def _trainer(tmp_path, rank=0, world=1, stop=None, **fields):
    config = complete(tiny.tiny_config(tiny.GPT, **fields), world)
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"save": str(tmp_path)})})
    world_of_rank = tiny.world_of(rank, world)
    return start(config, world_of_rank, manager=tiny.fresh_manager(), stop=stop or StopRequest())[0]


def _weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.parts.parameters])


def _drive(trainer):
    recorder = tiny.Recorder()
    reason = drive(trainer, [recorder])
    trainer.data.train.close()
    return recorder, reason


@pytest.mark.parametrize("interval", [1, 3])
def test_evaluation_leaves_no_mark_on_training(interval, tmp_path):
    plain = _trainer(tmp_path / "a", **DROPOUT)
    _drive(plain)
    evaluated = _trainer(tmp_path / "b", eval_interval=interval, eval_iters=2, **DROPOUT)
    recorder, _ = _drive(evaluated)
    assert torch.equal(_weights(plain), _weights(evaluated))
    assert [result.iteration for result in recorder.evals] == list(range(interval, 5, interval))


def test_two_evaluations_in_a_row_agree_and_know_their_perplexity(tmp_path):
    trainer = _trainer(tmp_path, eval_interval=1, eval_iters=2, **DROPOUT)
    first, second = trainer.evaluate(), trainer.evaluate()
    assert first.loss == second.loss
    assert first.perplexity == pytest.approx(math.exp(first.loss))
    assert first.valid_tokens == 2 * 8 * 8


def _evaluate(rank, world, fields, folder):
    trainer = _trainer(folder, rank, world, eval_interval=1, eval_iters=2, **fields)
    result = trainer.evaluate()
    return result.loss, result.valid_tokens


@pytest.mark.parametrize(
    ("world", "fields"),
    [
        (2, {"micro_batch_size": 2}),
        (2, {"pipeline_model_parallel_size": 2}),
        (4, {"tensor_model_parallel_size": 2}),
        (2, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}),
        (2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv"}),
    ],
)
def test_validation_loss_is_that_of_one_rank(world, fields, tmp_path):
    want = _evaluate(0, 1, {"micro_batch_size": 4}, str(tmp_path))
    for loss, tokens in run_ranks(_evaluate, world, fields, str(tmp_path)):
        assert loss == pytest.approx(want[0], rel=1e-6)
        assert tokens == want[1]


def test_exit_interval_saves_and_leaves(tmp_path):
    recorder, reason = _drive(_trainer(tmp_path, exit_interval=2, save_interval=1))
    assert [save.iteration for save in recorder.saves] == [1, 2]
    assert reason == "--exit-interval 2, at iteration 2"


def test_time_limit_saves_and_leaves(tmp_path):
    stop = StopRequest(duration_minutes=1e-9)
    recorder, reason = _drive(_trainer(tmp_path, stop=stop))
    assert [step.iteration for step in recorder.steps] == [1]
    assert [save.iteration for save in recorder.saves] == [1]
    assert "--exit-duration-in-mins are over" in reason


def test_sigterm_finishes_the_step_and_saves(tmp_path):
    stop = StopRequest()
    trainer = _trainer(tmp_path, stop=stop)
    with stop.on_signals():
        steps = trainer.steps()
        next(steps)
        os.kill(os.getpid(), signal.SIGTERM)
        assert [step.iteration for step in steps] == [2]
    assert trainer.exit_reason() == "SIGTERM received"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    trainer.data.train.close()


def _one_rank_is_told_to_stop(rank, world, folder):
    stop = StopRequest(reason="told" if rank == 1 else None)
    recorder, reason = _drive(_trainer(folder, rank, world, stop=stop))
    return len(recorder.steps), reason


def test_ranks_leave_together_when_one_is_told_to(tmp_path):
    results = run_ranks(_one_rank_is_told_to_stop, 2, str(tmp_path))
    assert results == [(1, "another rank was told to stop, at iteration 1"), (1, "told, at iteration 1")]


def _poisoned(rank, world, folder, value):
    trainer = _trainer(folder, rank, world, save_interval=1)
    steps = trainer.steps()
    next(steps)
    trainer.save()
    before = _weights(trainer).clone()
    if rank == 3:
        name, parameter = list(trainer.parts.chunks[-1].named_parameters())[-1]
        parameter.register_hook(lambda grad: grad.fill_(value))
    try:
        next(steps)
    except RunFailed as error:
        return str(error), torch.equal(before, _weights(trainer))
    finally:
        trainer.data.train.close()
    return "no error", False


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_names_its_rank_and_changes_nothing(value, tmp_path):
    for text, unchanged in run_ranks(_poisoned, 4, str(tmp_path), value):
        assert unchanged
        assert text.startswith("iteration 2: loss ")
        assert "Not finite on rank 3 {" in text
        assert "decoder.final_layernorm.bias" in text
        assert "rank 0 {" not in text
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["step-00000001"]


def test_metrics_hold_every_figure(tmp_path):
    trainer = _trainer(tmp_path, eval_interval=2, eval_iters=1, peak_tflops=0.5)
    callback = MetricsFile(tmp_path)
    callback.on_start(_info(tmp_path))
    drive(trainer, [callback])
    callback.on_notice("something")
    callback.on_end("over")
    callback.close()
    trainer.data.train.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    kinds = [line["kind"] for line in lines]
    assert kinds == ["start", "step", "step", "eval", "step", "step", "eval", "save", "notice", "end"]
    step = lines[1]
    assert step["consumed_tokens"] == 64
    assert step["tokens_per_second"] * step["seconds"] == pytest.approx(64)
    assert step["mfu"] == pytest.approx(step["tflops_per_rank"] / 0.5)
    assert {"loss", "lr", "grad_norm", "tokens_per_second_per_rank", "memory_gib"} <= step.keys()


def _info(folder, tensorboard=None):
    return RunInfo(
        name="tiny",
        folder=folder,
        world_size=1,
        layout="tp1",
        num_parameters=10,
        train_iters=4,
        first_iteration=0,
        global_batch_size=8,
        seq_length=8,
        peak="1 TFLOP/s",
        log_interval=2,
        tensorboard_dir=tensorboard,
    )


def test_plain_lines_show_the_mean_of_the_interval(tmp_path, capsys):
    trainer = _trainer(tmp_path)
    lines = PlainLines()
    lines.on_start(_info(tmp_path))
    recorder = tiny.Recorder()
    drive(trainer, [lines, recorder])
    trainer.data.train.close()
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("iteration")]
    assert [line.split(" |")[0] for line in shown] == ["iteration 2/4", "iteration 4/4"]
    mean = (recorder.steps[0].loss + recorder.steps[1].loss) / 2
    assert f"loss {mean:.4f}" in shown[0]
    for word in ("lr ", "grad norm ", "tok/s", "tok/s/rank", "TFLOP/s/rank", "MFU ", "GiB", "ETA 0:00"):
        assert word in shown[1]


def test_live_progress_draws_on_a_terminal(tmp_path):
    trainer = _trainer(tmp_path)
    with (tmp_path / "screen").open("w") as screen:
        live = LiveProgress(Console(file=screen, force_terminal=True, width=200))
        live.on_start(_info(tmp_path))
        drive(trainer, [live])
        live.on_notice("a folder named [/b]")
        live.on_end("over")
        live.close()
    trainer.data.train.close()
    text = (tmp_path / "screen").read_text()
    assert "4/4" in text
    assert "iteration 4/4 | loss" in text
    assert "[tp1]" in text


def test_tensorboard_events_when_asked_for(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = _trainer(tmp_path, eval_interval=4, eval_iters=1)
    board = TensorBoard(str(tmp_path / "tb"))
    board.on_start(_info(tmp_path))
    recorder = tiny.Recorder()
    drive(trainer, [board, recorder])
    board.on_end("over")
    board.close()
    trainer.data.train.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    losses = [event.value for event in events.Scalars("train/loss")]
    assert losses == pytest.approx([step.loss for step in recorder.steps])
    assert len(events.Scalars("validation/perplexity")) == 1
