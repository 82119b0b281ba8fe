"""Which checkpoints count: complete ones, in numeric order, whatever ``latest`` says; all of it without torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mcore_ckpt.arrays import FILL_VALUES
from mcore_ckpt.attempts import remove_abandoned, remove_all, remove_checkpoint, working_folder
from mcore_ckpt.comm import SingleCommunicator
from mcore_ckpt.errors import CheckpointError, CheckpointNotFound, FormatTooNew, IncompleteCheckpoint
from mcore_ckpt.find import find_latest, list_checkpoints, open_checkpoint
from mcore_ckpt.inspect import describe
from mcore_ckpt.manifest import digest
from mcore_ckpt.save import save_checkpoint


@pytest.fixture
def save(tmp_path, tensors, whole_arrays):
    """``save(step)`` into ``tmp_path``."""

    def save_step(step):
        arrays = whole_arrays(tensors)
        return save_checkpoint(tmp_path, step, arrays, state={"step": step}, communicator=SingleCommunicator())

    return save_step


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_steps_are_numbers(save, tmp_path):
    for step in (100, 9, 10):
        save(step)
    for step in (9, 10, 100):
        (tmp_path / f"step-{step:08d}").rename(tmp_path / f"step-{step}")
    assert [info.step for info in list_checkpoints(tmp_path)] == [9, 10, 100]
    latest = find_latest(tmp_path)
    assert (latest.step, latest.state, latest.skipped) == (100, {"step": 100}, ())
    assert open_checkpoint(tmp_path, 9).path.name == "step-9"


def test_nothing_is_found_in_nothing(tmp_path):
    assert find_latest(tmp_path / "none") is None
    assert find_latest(tmp_path) is None
    assert list_checkpoints(tmp_path) == []
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-00000003").write_text("a file")
    (tmp_path / "12").mkdir()
    assert find_latest(tmp_path) is None
    with pytest.raises(CheckpointNotFound, match="does not exist"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointNotFound, match="holds no folder named like step-00000100"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is a file"):
        find_latest(tmp_path / "step-00000003")


@pytest.mark.parametrize("content", ["", "step-00000777\n", "step-00000002\n", None])
def test_latest_is_only_a_hint(content, save, tmp_path):
    save(2)
    save(4)
    assert (tmp_path / "latest").read_text() == "step-00000004\n"
    if content is None:
        (tmp_path / "latest").unlink()
    else:
        (tmp_path / "latest").write_text(content)
    assert find_latest(tmp_path).step == 4


def spoil_commit(folder):
    (folder / "COMMIT").unlink()


def empty_commit(folder):
    (folder / "COMMIT").write_text("")


def spoil_manifest(folder):
    path = folder / "MANIFEST.json"
    path.write_text(path.read_text().replace('"step": 4', '"step": 5'))


def lose_manifest(folder):
    (folder / "MANIFEST.json").unlink()


def spoil_metadata(folder):
    path = folder / "zarr.json"
    path.write_text(path.read_text().replace("float64", "float32"))


def other_commit(folder):
    (folder / "COMMIT").write_bytes((folder.parent / "step-00000002" / "COMMIT").read_bytes())


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (spoil_commit, "COMMIT is missing"),
        (empty_commit, "COMMIT is damaged"),
        (spoil_manifest, "MANIFEST.json does not match COMMIT"),
        (lose_manifest, "MANIFEST.json is missing"),
        (spoil_metadata, "zarr.json does not match MANIFEST.json"),
        (other_commit, "MANIFEST.json does not match COMMIT"),
    ],
)
def test_a_damaged_folder_is_passed_over_and_named(damage, reason, save, tmp_path):
    save(2)
    damage(save(4))
    info = find_latest(tmp_path)
    assert info.step == 2
    assert [skipped.path.name for skipped in info.skipped] == ["step-00000004"]
    assert reason in info.skipped[0].reason
    assert [found.step for found in list_checkpoints(tmp_path)] == [2]
    assert open_checkpoint(tmp_path).step == 2
    for place, step in ((tmp_path, 4), (tmp_path / "step-00000004", None)):
        with pytest.raises(IncompleteCheckpoint, match=reason):
            open_checkpoint(place, step)
    remove_checkpoint(tmp_path / "step-00000002")
    assert find_latest(tmp_path) is None
    with pytest.raises(IncompleteCheckpoint, match=reason):
        open_checkpoint(tmp_path)


def test_a_missing_step_is_answered_with_those_there_are(save, tmp_path):
    save(9)
    save(10)
    with pytest.raises(CheckpointNotFound, match=r"no checkpoint of step 11 in .* \(there are: 9, 10\)"):
        open_checkpoint(tmp_path, 11)
    with pytest.raises(CheckpointNotFound, match="is the checkpoint of step 9, not 10"):
        open_checkpoint(tmp_path / "step-00000009", 10)


def test_a_later_format_is_refused_not_skipped(save, tmp_path):
    save(2)
    folder = save(4)
    document = json.loads((folder / "MANIFEST.json").read_text())
    text = json.dumps({**document, "format": 2}).encode()
    (folder / "MANIFEST.json").write_bytes(text)
    commit = json.loads((folder / "COMMIT").read_text())
    (folder / "COMMIT").write_text(json.dumps({**commit, "manifest": digest(text)}))
    for look in (find_latest, open_checkpoint):
        with pytest.raises(FormatTooNew, match="has format 2, this version reads up to 1; update mcore-ckpt"):
            look(tmp_path)
    assert open_checkpoint(tmp_path, 2).step == 2


def test_unknown_fields_of_the_same_format_are_ignored(save):
    folder = save(4)
    document = json.loads((folder / "MANIFEST.json").read_text())
    text = json.dumps({**document, "colour": "blue"}).encode()
    (folder / "MANIFEST.json").write_bytes(text)
    commit = json.loads((folder / "COMMIT").read_text())
    (folder / "COMMIT").write_text(json.dumps({**commit, "manifest": digest(text)}))
    assert open_checkpoint(folder).step == 4


def test_describe_reads_metadata_only(save, tensors):
    folder = save(4)
    for path in folder.glob("model/*/c/**/*"):
        if path.is_file():
            path.write_bytes(b"")
    found = describe(folder)
    assert (found.step, found.state, found.world_size) == (4, {"step": 4}, 1)
    assert {spec.key: (spec.shape, spec.dtype) for spec in found.arrays} == {
        f"model/{name}": (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()
    }
    assert found.num_bytes == sum(t.nbytes for t in tensors.values())
    assert found.num_cells == len(tensors)


def test_removal(save, tmp_path):
    save(2)
    save(4)
    remove_checkpoint(tmp_path / "step-00000004")
    assert names(tmp_path) == ["latest", "step-00000002"]
    (tmp_path / ".tmp-step-00000009.dead").mkdir()
    (tmp_path / "notes.txt").write_text("not ours")
    assert [path.name for path in remove_all(tmp_path)] == ["step-00000002"]
    assert names(tmp_path) == ["notes.txt"]
    assert remove_all(tmp_path / "none") == []


def test_only_abandoned_attempts_are_removed(save, tmp_path):
    with working_folder(tmp_path, ".tmp-step-00000001.live") as live:
        (live / "data").write_text("x")
        (tmp_path / ".tmp-step-00000001.dead" / "deep").mkdir(parents=True)
        (tmp_path / ".tmp-step-00000001.dead.lock").touch()
        (tmp_path / ".tmp-step-00000002.unlocked").mkdir()
        removed = remove_abandoned(tmp_path)
        assert [path.name for path in removed] == [".tmp-step-00000001.dead", ".tmp-step-00000002.unlocked"]
        save(3)
        assert (live / "data").exists(), "another job's attempt was removed"
    assert names(tmp_path) == ["latest", "step-00000003"]


def test_looking_needs_no_torch(save, tmp_path):
    save(2)
    code = (
        "import sys\n"
        "from mcore_ckpt import attempts, builtin, config, find, hookspecs, inspect, manifest, plan, specs, stores\n"
        "info = find.find_latest(sys.argv[1])\n"
        "assert info.step == 2 and inspect.describe(info.path).num_cells == 5 and not inspect.verify(info.path)\n"
        "assert 'torch' not in sys.modules\n"
        "from mcore_ckpt import find\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_every_storable_dtype_is_a_torch_dtype():
    import torch

    assert all(isinstance(getattr(torch, name), torch.dtype) for name in FILL_VALUES)
