"""Writers that die or fail: the previous checkpoint is always there, and all ranks learn of a failure."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import signal
import time
import warnings

import pytest
import torch

from mcore_ckpt import files, save
from mcore_ckpt.arrays import ArraySpec
from mcore_ckpt.comm import DistributedCommunicator, SingleCommunicator
from mcore_ckpt.errors import CheckpointError, CoverError, SaveFailed
from mcore_ckpt.find import find_latest, list_checkpoints
from mcore_ckpt.grid import GridRule
from mcore_ckpt.inspect import verify
from mcore_ckpt.layout import LocalArray
from mcore_ckpt.load import load_checkpoint
from mcore_ckpt.save import save_checkpoint
from mcore_parallel.testing import run_ranks

TINY = GridRule(parts=4, smallest=64, largest=256)
SHAPE = (24, 8)


def values(step):
    return torch.arange(192.0).view(SHAPE) + 1000 * step


def arrays(tensor, parts=1, part=0):
    height = SHAPE[0] // parts
    view = tensor[part * height : (part + 1) * height]
    return [LocalArray("model/w", SHAPE, (part * height, 0), (height, 8), view, (0,))]


def save_step(root, step, communicator=None):
    communicator = communicator or SingleCommunicator()
    own = arrays(values(step), communicator.size, communicator.rank)
    return save_checkpoint(root, step, own, state={"step": step}, communicator=communicator, rule=TINY)


def check(root, step):
    """The newest checkpoint is ``step``, whole and bit-equal."""
    info = find_latest(root)
    assert (info.step, info.state) == (step, {"step": step})
    assert verify(info.path) == []
    got = torch.zeros(SHAPE)
    load_checkpoint(info.path, arrays(got), communicator=SingleCommunicator())
    assert torch.equal(got, values(step))


def die_at(count, function):
    """``function``, but the ``count``-th call dies before, halfway through (half of the bytes), or after."""
    calls = [0]

    def wrapped(*args, **kwargs):
        calls[0] += 1
        if calls[0] == count // 2 + 1:
            if count % 2:
                function(*args, **kwargs)
            elif len(args) > 1 and isinstance(args[1], bytes):
                function(args[0], args[1][: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return wrapped


def forked(target, *args):
    # A fork of a process that has threads is what is wanted here: the child only writes files and dies.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = multiprocessing.get_context("fork").Process(target=target, args=args)
        child.start()
    return child


def save_and_die(root, step, moment):
    """Die at one moment of a save: a write of a file, a flush, or a rename."""
    kind, count = moment
    if kind == "write":
        files.write_file = save.write_file = die_at(count, files.write_file)
        save.write_cell.__globals__["write_file"] = files.write_file
    elif kind == "sync":
        save.sync = die_at(count, save.sync)
    else:
        os.rename = die_at(count, os.rename)
    save_step(root, step)
    os._exit(0)


# A save of this array writes 4 cells, a part, 3 metadata files, the manifest, COMMIT and at last ``latest``; it flushes
# 6 times, the last time after the rename. An even number dies before (or halfway through) the call, an odd one after.
BEFORE = [("write", n) for n in (0, 1, 5, 8, 11, 15, 16, 18, 19)] + [("sync", n) for n in (0, 3, 6, 9)]
BEFORE += [("rename", 0)]
AFTER = [("rename", 1), ("sync", 10), ("sync", 11), ("write", 20), ("write", 21)]


@pytest.mark.parametrize("moment", BEFORE + AFTER, ids=lambda moment: f"{moment[0]}{moment[1]}")
def test_a_writer_killed_at_a_chosen_moment_leaves_the_last_checkpoint(moment, tmp_path):
    save_step(tmp_path, 2)
    child = forked(save_and_die, tmp_path, 4, moment)
    child.join(60)
    assert child.exitcode == -signal.SIGKILL, "the moment was never reached"
    check(tmp_path, 4 if moment in AFTER else 2)
    assert find_latest(tmp_path).skipped == (), "a killed save left a folder that looks like a checkpoint"
    save_step(tmp_path, 4)
    check(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000002", "step-00000004"]


def save_for_ever(root):
    for step in range(3, 1000):
        save_step(root, step)


@pytest.mark.parametrize("seed", range(4))
def test_a_writer_killed_at_any_time_leaves_the_last_checkpoint(seed, tmp_path):
    save_step(tmp_path, 2)
    child = forked(save_for_ever, tmp_path)
    time.sleep(random.Random(seed).uniform(0.02, 0.4))
    child.kill()
    child.join(60)
    steps = [info.step for info in list_checkpoints(tmp_path)]
    assert steps == list(range(2, steps[-1] + 1))
    check(tmp_path, steps[-1])


@pytest.mark.parametrize("count", range(6))
def test_a_step_saved_again_is_replaced_without_a_moment_in_which_it_is_gone(count, tmp_path):
    """Killed before or after each rename of a replacement: the old or the new content is found, whole."""
    save_step(tmp_path, 4)
    child = forked(replace_and_die, tmp_path, count)
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    info = find_latest(tmp_path)
    assert info.step == 4
    assert verify(info.path) == []
    got = torch.zeros(SHAPE)
    load_checkpoint(info.path, arrays(got), communicator=SingleCommunicator())
    assert torch.equal(got, values(4) if count == 0 else -values(4))
    save_step(tmp_path, 4)
    check(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000004"]


def replace_and_die(root, count):
    os.rename = die_at(count, os.rename)
    own = arrays(-values(4))
    save_checkpoint(root, 4, own, state={"step": 4}, communicator=SingleCommunicator(), rule=TINY)
    os._exit(0)


def failing_rank(rank, world, root, code):
    """Rank 1 cannot write its second cell; returns what this rank got to see."""
    original, calls = save.write_cell, [0]

    def full(folder, spec: ArraySpec, index, data):
        calls[0] += 1
        if rank == 1 and calls[0] == 2:
            raise OSError(code, os.strerror(code), str(folder / spec.key / "c" / "x"))
        return original(folder, spec, index, data)

    save.write_cell = full
    try:
        return save_step(root, 4, DistributedCommunicator())
    except SaveFailed as error:
        return error.rank, error.path, str(error)
    finally:
        save.write_cell = original


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_error_on_one_rank_is_raised_on_all(code, tmp_path):
    save_step(tmp_path, 2)
    for rank, path, text in run_ranks(failing_rank, 3, tmp_path, code):
        assert rank == 1
        assert path.startswith(str(tmp_path / ".tmp-step-00000004."))
        assert f"saving step 4 failed on rank 1 at {path}: OSError: {os.strerror(code)}" in text
        assert "nothing was committed" in text
    check(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000002"]
    assert (tmp_path / "latest").read_text() == "step-00000002\n"


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    """The error of a write itself carries no name; ours does."""
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="full") as caught:
        files.write_file(tmp_path / "full", b"x")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "full"))


@pytest.mark.parametrize("where", ["hierarchy", "_publish", "remove_abandoned", "plan_save"])
def test_a_failure_in_any_phase_is_raised_on_all(where, run_threads, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", "/some/file")

    save_step(tmp_path, 2)
    monkeypatch.setattr(save, where, fail)
    kind = PermissionError if where == "plan_save" else SaveFailed
    for result in run_threads(lambda c: save_step(tmp_path, 4, c), 3):
        assert isinstance(result, kind)
        assert "Permission denied" in str(result)
    check(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000002"]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"lr": float("nan")}, r"state\['lr'\] is nan"),
        ({"a": {1: 2}}, r"state\['a'\] has the key 1"),
        ({"a": [torch.zeros(1)]}, r"state\['a'\]\[0\] is a Tensor; only JSON"),
    ],
)
def test_a_state_that_would_not_come_back_is_refused(state, message, tmp_path):
    with pytest.raises(SaveFailed, match=message):
        save_checkpoint(tmp_path, 1, arrays(values(1)), state=state, communicator=SingleCommunicator())
    assert list(tmp_path.iterdir()) == []


def test_boxes_that_leave_a_hole_are_refused_on_all_ranks(run_threads, tmp_path):
    def save_hole(communicator):
        own = arrays(values(1), 4, communicator.rank)
        return save_checkpoint(tmp_path, 1, own, state={}, communicator=communicator)

    for result in run_threads(save_hole, 3):
        assert isinstance(result, CoverError)
        assert "no rank holds [18:24, 0:8]" in str(result)
    assert list(tmp_path.iterdir()) == []


def test_a_step_is_not_negative(tmp_path):
    with pytest.raises(SaveFailed, match="at least 0, got -1"):
        save_step(tmp_path, -1)


def test_ranks_on_different_disks_are_found_out(run_threads, tmp_path):
    """A rank that writes into a folder of its own: rank 0 does not see its part."""
    results = run_threads(lambda c: save_step(tmp_path / str(c.rank // 2), 1, c), 3)
    assert all(isinstance(result, SaveFailed) for result in results)
    assert "must share one file system" in str(results[2])
    assert find_latest(tmp_path / "0") is None


def test_what_is_wrong_with_the_leftovers_is_only_a_warning(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device", "latest")

    monkeypatch.setattr(save, "replace_file", fail)
    with pytest.warns(RuntimeWarning, match="step 4 is saved as .*step-00000004, but .*No space"):
        save_step(tmp_path, 4)
    check(tmp_path, 4)
    assert issubclass(CheckpointError, ValueError)
