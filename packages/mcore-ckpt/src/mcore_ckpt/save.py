"""Save a checkpoint: plan, hand over, write, agree, commit. All ranks end with the same result or the same error."""

from __future__ import annotations

import contextlib
import os
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from mcore_ckpt.arrays import METADATA, hierarchy, write_cell
from mcore_ckpt.attempts import attempt_name, remove_abandoned, remove_checkpoint, working_folder
from mcore_ckpt.comm import Communicator
from mcore_ckpt.errors import CheckpointError, SaveFailed
from mcore_ckpt.files import folders_of, replace_file, sync, write_file
from mcore_ckpt.find import LATEST, step_folders, step_name
from mcore_ckpt.grid import GridRule
from mcore_ckpt.layout import LocalArray, as_bytes, torch_dtype
from mcore_ckpt.manifest import (
    COMMIT,
    MANIFEST,
    PARTS,
    Manifest,
    check_plain,
    digest,
    encode,
    encode_commit,
    encode_manifest,
)
from mcore_ckpt.plan import CellPlan, Fragment, SavePlan, plan_save

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Part:
    """What one rank wrote: its index file's name and digest, and its totals."""

    name: str
    sha256: str
    num_cells: int
    num_bytes: int


@dataclass
class _Save:
    """One collective attempt to save ``step`` into ``root``."""

    root: Path
    step: int
    communicator: Communicator
    arrays: Sequence[LocalArray]
    name: str = ""

    @property
    def folder(self) -> Path:
        return self.root / self.name

    def agree(self, work: Callable[[], Result]) -> list[Result]:
        """Do ``work`` on every rank; every rank gets all results, or raises the first failing rank's reason."""
        value: Result | None = None
        failure: tuple[str, str] | None = None
        cause: Exception | None = None
        try:
            value = work()
        except Exception as error:
            cause = error
            failure = _describe(error, self.folder)
        outcomes = self.communicator.all_gather_object((value, failure))
        for rank, (_, reason) in enumerate(outcomes):
            if reason is not None:
                raise SaveFailed(self.step, rank, *reason) from cause
        return [result for result, _ in outcomes]


def save_checkpoint(
    root: str | Path,
    step: int,
    arrays: Sequence[LocalArray],
    *,
    state: Mapping[str, Any],
    communicator: Communicator,
    rule: GridRule | None = None,
) -> Path:
    """Save what all ranks hold as the checkpoint of ``step`` in ``root``; collective. Returns its folder.

    ``arrays``: this rank's boxes; ranks may present copies of the same box. ``state``: JSON values (scheduler, data
    position, seeds, config); rank 0's is stored. ``rule``: how arrays are cut into cells. The checkpoint appears at
    once, when everything is on the disk; one of the same step is replaced only then.

    Raises:
        SaveFailed: on all ranks, when any rank failed; nothing was committed.
        CoverError, ShapeMismatch, DtypeMismatch: on all ranks, when the boxes do not make up whole arrays.
    """
    save = _Save(Path(root), step, communicator, arrays)
    opened = save.agree(lambda: _present(save, state))
    plan = plan_save([table for table, _ in opened], rule)
    save.name = opened[0][1]
    with contextlib.ExitStack() as stack:
        save.agree(lambda: _open(save, stack))
        parts = save.agree(lambda: _write(save, plan))
        finals = save.agree(lambda: _commit(save, plan, parts, state))
    return finals[0]


def _describe(error: Exception, folder: Path) -> tuple[str, str]:
    path = error.filename if isinstance(error, OSError) and error.filename else folder
    if isinstance(error, OSError | CheckpointError):
        text = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        return str(path), f"{type(error).__name__}: {text}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return str(path), f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"


def _present(save: _Save, state: Mapping[str, Any]) -> tuple[list[Any], str]:
    if save.step < 0:
        raise CheckpointError(f"a step is at least 0, got {save.step}")
    if save.communicator.rank == 0:
        check_plain(state, "state")
    return [array.entry() for array in save.arrays], attempt_name(save.step)


def _open(save: _Save, stack: contextlib.ExitStack) -> None:
    if save.communicator.rank == 0:
        save.root.mkdir(parents=True, exist_ok=True)
        remove_abandoned(save.root)
        stack.enter_context(working_folder(save.root, save.name))


def _write(save: _Save, plan: SavePlan) -> _Part:
    rank = save.communicator.rank
    handed = _hand_over(save, plan)
    written: list[Path] = []
    cells: dict[str, dict[str, int]] = {}
    num_bytes = 0
    for cell in plan.written_by(rank):
        data = _cell_bytes(cell, save.arrays, handed, rank)
        path, checksum = write_cell(save.folder, cell.spec, cell.index, data)
        written.append(path)
        cells.setdefault(cell.spec.key, {})[".".join(map(str, cell.index))] = checksum
        num_bytes += cell.num_bytes
    name = f"{PARTS}/{rank:06d}.json"
    text = encode({"rank": rank, "cells": cells, "num_bytes": num_bytes})
    write_file(save.folder / name, text)
    written.append(save.folder / name)
    sync(written)
    sync(folders_of(written, save.folder))
    return _Part(name, digest(text), sum(map(len, cells.values())), num_bytes)


Handed = dict[tuple[str, tuple[int, ...], Fragment], torch.Tensor]


def _hand_over(save: _Save, plan: SavePlan) -> Handed:
    """Send this rank's fragments of others' cells and receive those of its own, one message per pair of ranks."""
    rank = save.communicator.rank
    outgoing: dict[int, list[torch.Tensor]] = {}
    incoming: dict[int, list[tuple[CellPlan, Fragment]]] = {}
    for cell, fragment in plan.handovers():
        if fragment.source == rank:
            part = _own(save.arrays, fragment)
            outgoing.setdefault(cell.owner, []).append(torch.from_numpy(as_bytes(part)))
        elif cell.owner == rank:
            incoming.setdefault(fragment.source, []).append((cell, fragment))
    sends = [(peer, torch.cat(parts)) for peer, parts in outgoing.items()]
    receives = [
        (peer, torch.empty(sum(f.box.num_elements * c.spec.itemsize for c, f in parts), dtype=torch.uint8))
        for peer, parts in incoming.items()
    ]
    save.communicator.exchange(sends, receives)
    handed: Handed = {}
    for peer, buffer in receives:
        at = 0
        for cell, fragment in incoming[peer]:
            end = at + fragment.box.num_elements * cell.spec.itemsize
            # A clone starts at an aligned address, which a view of wider elements needs.
            values = buffer[at:end].clone().view(torch_dtype(cell.spec.dtype))
            handed[cell.spec.key, cell.index, fragment] = values.view(fragment.box.shape)
            at = end
    return handed


def _own(arrays: Sequence[LocalArray], fragment: Fragment) -> torch.Tensor:
    local = arrays[fragment.entry]
    return local.tensor.detach()[fragment.box.within(local.box)]


def _cell_bytes(cell: CellPlan, arrays: Sequence[LocalArray], handed: Handed, rank: int) -> np.ndarray:
    def values(fragment: Fragment) -> torch.Tensor:
        if fragment.source == rank:
            return _own(arrays, fragment)
        return handed[cell.spec.key, cell.index, fragment]

    if len(cell.fragments) == 1 and cell.box.shape == cell.spec.cell:
        return as_bytes(values(cell.fragments[0]))
    full = torch.zeros(cell.spec.cell, dtype=torch_dtype(cell.spec.dtype))
    for fragment in cell.fragments:
        full[fragment.box.within(cell.box)] = values(fragment).cpu()
    return as_bytes(full)


def _commit(save: _Save, plan: SavePlan, parts: Sequence[_Part], state: Mapping[str, Any]) -> Path:
    final = save.root / step_name(save.step)
    if save.communicator.rank != 0:
        return final
    num_cells = sum(part.num_cells for part in parts)
    assert num_cells == len(plan.cells), f"{num_cells} cells were written, {len(plan.cells)} were planned"
    lost = [part.name for part in parts if not (save.folder / part.name).is_file()]
    if lost:
        raise CheckpointError(f"{', '.join(lost)} cannot be seen from rank 0; all ranks must share one file system")
    documents = hierarchy(plan.arrays, {"format": 1, "step": save.step})
    texts = {f"{name}/{METADATA}".lstrip("/"): encode(document) for name, document in documents.items()}
    manifest = Manifest(
        step=save.step,
        attempt=save.name,
        world_size=save.communicator.size,
        num_cells=num_cells,
        num_bytes=sum(part.num_bytes for part in parts),
        files={METADATA: digest(texts[METADATA]), **{part.name: part.sha256 for part in parts}},
        state=state,
    )
    texts[MANIFEST] = encode_manifest(manifest)
    written = [save.folder / name for name in texts]
    for path, text in zip(written, texts.values(), strict=True):
        write_file(path, text)
    sync(written)
    sync(folders_of(written, save.folder))
    write_file(save.folder / COMMIT, encode_commit(manifest, texts[MANIFEST]))
    sync([save.folder / COMMIT, save.folder])
    return _publish(save, final)


def _publish(save: _Save, final: Path) -> Path:
    """Give the finished folder its name. A committed checkpoint of the same step goes only after that."""
    older = [(generation, path) for step, generation, path in step_folders(save.root) if step == save.step]
    target = final
    if older:
        target = save.root / step_name(save.step, 1 + max(generation for generation, _ in older))
    os.rename(save.folder, target)
    try:
        sync([save.root])
    except OSError:
        os.rename(target, save.folder)
        raise
    try:
        for _, path in older:
            remove_checkpoint(path)
        if older:
            os.rename(target, final)
            sync([save.root])
            target = final
        replace_file(save.root / LATEST, target.name.encode() + b"\n")
    except OSError as error:
        # The checkpoint is committed; what failed is tidying up, which the search does not depend on.
        warnings.warn(f"step {save.step} is saved as {target}, but {error}", RuntimeWarning, stacklevel=2)
    return target
