"""Learning-rate and weight-decay schedules against closed forms and published tables; resume rules."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest

from mcore_parallel.config import OptimizerConfig
from mcore_parallel.optim.lr_schedule import ScheduleState, build_schedule, learning_rate, reconcile, weight_decay


def schedule(train_iters=10, batch=4, **flags):
    return build_schedule(
        OptimizerConfig(**flags), train_iters=train_iters, train_samples=None, global_batch_size=batch
    )


def rates(state, steps, batch=4):
    return [learning_rate(state, step * batch) for step in steps]


# ---- shapes


def test_cosine_table():
    # base 1, min 0.1 over 10 steps; a formula that compounds gives 0.894 at step 2
    got = rates(schedule(lr=1.0, min_lr=0.1, lr_decay_style="cosine"), range(6))
    assert got == pytest.approx([1.0, 0.97797, 0.91406, 0.81450, 0.68906, 0.55], abs=1e-5)


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("constant", [1.0] * 11),
        ("linear", [1.0 - 0.9 * t / 10 for t in range(11)]),
        ("cosine", [0.1 + 0.45 * (1 + math.cos(math.pi * t / 10)) for t in range(11)]),
    ],
)
def test_decay_without_warmup(style, expected):
    assert rates(schedule(lr=1.0, min_lr=0.1, lr_decay_style=style), range(11)) == pytest.approx(expected, abs=1e-15)


def test_linear_with_warmup():
    state = schedule(train_iters=14, lr=1.0, min_lr=0.2, lr_warmup_iters=4, lr_warmup_init=0.5)
    expected = [0.5, 0.625, 0.75, 0.875, 1.0] + [1.0 - 0.8 * t / 10 for t in range(1, 11)]
    assert rates(state, range(15)) == pytest.approx(expected, abs=1e-15)


def test_warmup_starts_at_zero_by_default_and_counts_samples():
    state = schedule(lr=1.0, lr_warmup_iters=2, lr_decay_style="constant")
    assert [learning_rate(state, n) for n in (0, 1, 2, 4, 7, 8, 9)] == [0, 0.125, 0.25, 0.5, 0.875, 1.0, 1.0]


def test_inverse_square_root():
    state = schedule(
        train_iters=100, batch=1, lr=1.0, min_lr=0.3, lr_warmup_iters=4, lr_decay_style="inverse-square-root"
    )
    assert rates(state, [4, 9, 16, 25, 100], batch=1) == pytest.approx([1.0, 2 / 3, 0.5, 0.4, 0.3])
    unwarmed = schedule(train_iters=100, batch=1, lr=1.0, lr_decay_style="inverse-square-root")
    assert rates(unwarmed, [0, 1, 4], batch=1) == pytest.approx([1.0, 1.0, 0.5])


@pytest.mark.parametrize(
    ("style", "shares"),
    [
        ("linear", [1.0, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [1.0, 0.85355339, 0.5, 0.14644661, 0.0]),
        ("exponential", [1.0, 2 * 0.5**0.25 - 1, 2 * 0.5**0.5 - 1, 2 * 0.5**0.75 - 1, 0.0]),
        ("minus_sqrt", [1.0, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0.0]),
    ],
)
def test_wsd(style, shares):
    state = schedule(
        lr=1.0, min_lr=0.2, lr_decay_style="WSD", lr_warmup_iters=2, lr_wsd_decay_iters=4, lr_wsd_decay_style=style
    )
    expected = [0.0, 0.5, 1.0, 1.0, 1.0, 1.0] + [0.2 + 0.8 * share for share in shares]
    assert rates(state, range(11)) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("style", ["linear", "cosine", "inverse-square-root", "WSD"])
def test_after_the_end_the_rate_stays_at_its_minimum(style):
    wsd = {"lr_wsd_decay_iters": 3} if style == "WSD" else {}
    state = schedule(lr=1.0, min_lr=0.05, lr_decay_style=style, **wsd)
    assert rates(state, [11, 12, 1000]) == [0.05] * 3


def test_the_rate_depends_on_consumed_samples_alone():
    state = schedule(train_iters=40, lr=3e-4, min_lr=3e-5, lr_decay_style="cosine", lr_warmup_iters=4)
    straight = rates(state, range(40))
    for stop in (5, 10, 39):  # resumed through JSON, asked out of order and repeatedly
        again = ScheduleState.from_dict(json.loads(json.dumps(state.to_dict())))
        assert rates(again, range(stop, 40)) == straight[stop:]
        assert rates(again, range(stop, 40)) == straight[stop:]
    assert rates(state, [0])[0] == straight[0] == 0.0


def test_two_bases_keep_their_ratio_at_every_step():
    for style in ("constant", "linear", "cosine", "inverse-square-root"):
        one = schedule(lr=1.0, min_lr=0.1, lr_decay_style=style, lr_warmup_iters=3)
        tenth = schedule(lr=0.1, min_lr=0.01, lr_decay_style=style, lr_warmup_iters=3)
        for a, b in zip(rates(one, range(13)), rates(tenth, range(13)), strict=True):
            assert a == pytest.approx(10 * b, rel=1e-14)


# ---- weight decay


def test_weight_decay_shapes():
    assert weight_decay(schedule(weight_decay=0.3), 17) == 0.3
    flags = {"start_weight_decay": 0.1, "end_weight_decay": 0.5}
    linear = schedule(weight_decay_incr_style="linear", **flags)
    cosine = schedule(weight_decay_incr_style="cosine", **flags)
    samples = [0, 10, 20, 40, 41, 400]
    assert [weight_decay(linear, n) for n in samples] == pytest.approx([0.1, 0.2, 0.3, 0.5, 0.5, 0.5])
    quarter = 0.1 + 0.4 * 0.5 * (1 - math.cos(math.pi / 4))
    assert [weight_decay(cosine, n) for n in samples] == pytest.approx([0.1, quarter, 0.3, 0.5, 0.5, 0.5])


# ---- building


def test_lengths_in_iterations_are_global_batches():
    state = schedule(train_iters=100, batch=8, lr_warmup_iters=3, lr_decay_iters=50)
    assert (state.lr_decay_samples, state.lr_warmup_samples, state.weight_decay_incr_samples) == (400, 24, 800)
    assert not state.decay_follows_training


def test_lengths_in_samples():
    config = OptimizerConfig(lr_warmup_samples=30, lr_decay_style="WSD", lr_wsd_decay_samples=100)
    state = build_schedule(config, train_iters=None, train_samples=1000, global_batch_size=8)
    assert (state.lr_decay_samples, state.lr_warmup_samples, state.lr_wsd_decay_samples) == (1000, 30, 100)
    assert state.decay_follows_training


def test_warmup_fraction_is_of_the_decay():
    state = schedule(train_iters=100, batch=8, lr_decay_iters=50, lr_warmup_fraction=0.1)
    assert state.lr_warmup_samples == 40


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"min_lr": 1.0}, "--min-lr 1.0 must not exceed --lr 0.0003"),
        ({"lr_warmup_init": 1.0}, "--lr-warmup-init 1.0 must not exceed"),
        ({"lr_warmup_iters": 10}, "warm-up (10) must be shorter than the whole decay (10)"),
        ({"lr_warmup_samples": 10}, "--lr-warmup-samples 10 does not go with --train-iters; give --lr-warmup-iters"),
        ({"lr_decay_samples": 10}, "--lr-decay-samples 10 does not go with --train-iters"),
        ({"lr_warmup_fraction": 0.1, "lr_warmup_iters": 2}, "--lr-warmup-fraction 0.1 and a warm-up length of 2"),
        ({"lr_decay_style": "WSD"}, "WSD needs --lr-wsd-decay-iters"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 11}, "annealing of WSD (44 samples) is longer"),
        ({"lr_wsd_decay_iters": 3}, "no effect with --lr-decay-style linear"),
        ({"start_weight_decay": 0.1}, "no effect with --weight-decay-incr-style constant"),
        ({"weight_decay_incr_style": "linear", "end_weight_decay": 0.1}, "needs both --start-weight-decay"),
        (
            {"weight_decay_incr_style": "linear", "start_weight_decay": 0.2, "end_weight_decay": 0.1},
            "--start-weight-decay 0.2 must not exceed --end-weight-decay 0.1",
        ),
    ],
)
def test_flags_that_contradict_are_refused(flags, words):
    with pytest.raises(ValueError) as error:
        schedule(**flags)
    assert words in str(error.value)


def test_all_violations_come_at_once():
    with pytest.raises(ValueError) as error:
        schedule(min_lr=1.0, lr_warmup_iters=10, lr_decay_style="WSD")
    assert str(error.value).count(";") >= 2


def test_exactly_one_training_length():
    with pytest.raises(ValueError, match="exactly one"):
        build_schedule(OptimizerConfig(), train_iters=1, train_samples=1, global_batch_size=1)
    with pytest.raises(ValueError, match="exactly one"):
        build_schedule(OptimizerConfig(), train_iters=None, train_samples=None, global_batch_size=1)


# ---- resume


def test_same_terms_resume_silently():
    assert reconcile(schedule(), schedule()) == (schedule(), None)


def test_every_difference_is_listed_with_both_values_and_both_escapes():
    stored = schedule(lr=6e-4, lr_decay_style="constant", weight_decay=0.1)
    now = schedule(lr=3e-5, min_lr=2e-5, lr_decay_style="cosine", weight_decay=0.1)
    with pytest.raises(ValueError) as error:
        reconcile(now, stored)
    text = str(error.value)
    for words in (
        "max_lr is 3e-05 here and 0.0006 in the checkpoint",
        "min_lr is 2e-05 here and 0.0 in",
        "lr_decay_style is cosine here and constant in",
        "--override-opt_param-scheduler",
        "--use-checkpoint-opt_param-scheduler",
    ):
        assert words in text
    assert "weight_decay" not in text


@pytest.mark.parametrize(
    "change",
    [
        {"lr": 1e-3},
        {"min_lr": 1e-5},
        {"lr_warmup_iters": 3},
        {"lr_warmup_init": 1e-5},
        {"lr_decay_iters": 9},
        {"lr_decay_style": "cosine"},
        {"weight_decay": 0.5},
        {"weight_decay_incr_style": "linear", "start_weight_decay": 0.01, "end_weight_decay": 0.02},
        {"batch": 8},
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 2},
    ],
)
def test_each_changed_term_is_refused_and_each_escape_decides(change):
    stored, now = schedule(), schedule(**change)
    with pytest.raises(ValueError, match="differs from the checkpoint"):
        reconcile(now, stored)
    chosen, notice = reconcile(now, stored, override=True)
    assert chosen == now
    assert "from the flags" in notice
    chosen, notice = reconcile(now, stored, use_checkpoint=True)
    assert chosen == stored
    assert "from the checkpoint" in notice
    assert "\n" not in notice


def test_overridden_rates_are_the_closed_form_at_the_stored_step():
    stored = schedule(train_iters=20, lr=6e-4, lr_decay_style="constant")
    now = schedule(train_iters=20, lr=3e-5, min_lr=2e-5, lr_decay_style="cosine")
    chosen, _ = reconcile(now, stored, override=True)
    expected = [2e-5 + 1e-5 * 0.5 * (1 + math.cos(math.pi * t / 20)) for t in range(10, 20)]
    assert rates(chosen, range(10, 20)) == pytest.approx(expected, rel=1e-14)


def test_a_given_decay_length_may_not_change():
    with pytest.raises(ValueError, match="lr_decay_samples is 36 here and 32 in"):
        reconcile(schedule(lr_decay_iters=9), schedule(lr_decay_iters=8))


def test_a_changed_batch_size_names_the_lengths_it_moves():
    with pytest.raises(ValueError) as error:
        reconcile(schedule(batch=8), schedule(batch=4))
    for words in ("iteration_samples is 8 here and 4", "lr_decay_samples is 80", "weight_decay_incr_samples is 80"):
        assert words in str(error.value)


def test_both_escapes_exclude_each_other():
    with pytest.raises(ValueError, match="exclude each other"):
        reconcile(schedule(), schedule(), override=True, use_checkpoint=True)


def test_a_changed_training_length_moves_the_horizon_with_a_notice():
    chosen, notice = reconcile(schedule(train_iters=20), schedule(train_iters=10))
    assert chosen == schedule(train_iters=20)
    assert notice == "training length changed: the learning rate now decays over 20 iterations (the checkpoint: 10)"
    fraction = {"lr_warmup_fraction": 0.1}
    chosen, notice = reconcile(schedule(train_iters=20, **fraction), schedule(train_iters=10, **fraction))
    assert chosen.lr_warmup_samples == 8
    assert "20 iterations" in notice


def test_a_changed_training_length_with_a_given_decay_keeps_it():
    chosen, notice = reconcile(schedule(train_iters=20, lr_decay_iters=8), schedule(train_iters=10, lr_decay_iters=8))
    assert chosen.lr_decay_samples == 32
    assert notice == "training length changed to 20 iterations; the learning rate still decays over 8 iterations"


def test_a_changed_training_length_excuses_nothing_else():
    with pytest.raises(ValueError) as error:
        reconcile(schedule(train_iters=20, lr=1e-3), schedule(train_iters=10))
    assert "max_lr" in str(error.value)
    assert "lr_decay_samples" not in str(error.value)


def test_stored_terms_must_be_whole():
    values = schedule().to_dict()
    del values["max_lr"]
    values["extra"] = 1
    with pytest.raises(ValueError, match="unknown extra, missing max_lr"):
        ScheduleState.from_dict(values)
    assert replace(schedule(), max_lr=1.0) != schedule()


def test_schedules_import_no_torch():
    code = "import sys, mcore_parallel.optim.lr_schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
