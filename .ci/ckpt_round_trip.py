"""Save and load with mcore-ckpt, where only mcore-parallel and third parties are installed."""

from __future__ import annotations

import importlib.util
import tempfile

import torch

from mcore_ckpt.comm import SingleCommunicator
from mcore_ckpt.find import open_checkpoint
from mcore_ckpt.inspect import verify
from mcore_ckpt.layout import parameter_arrays
from mcore_ckpt.load import load_checkpoint
from mcore_ckpt.save import save_checkpoint
from mcore_parallel.placement import Init, Placement, rows
from mcore_parallel.rng import initialise

NAME, SHAPE = "embedding.word_embeddings.weight", (10, 4)


def placement(begin: int, end: int) -> Placement:
    """Rows of one logical matrix, as a vocabulary-parallel rank holds them."""
    return Placement((rows(NAME, SHAPE, begin=begin, end=end, init=Init()),))


def main() -> None:
    """Save a padded weight of one rank; load the second of two ranks; compare."""
    for name in ("mcore_models", "mcore_data", "mcore_cli"):
        assert importlib.util.find_spec(name) is None, f"{name} is installed, this proves nothing"
    whole = torch.empty(12, 4)
    initialise(whole, placement(0, 12), seed=1)
    half = torch.full((6, 4), torch.nan)
    alone = SingleCommunicator()
    with tempfile.TemporaryDirectory() as root:
        arrays = parameter_arrays("model", whole, placement(0, 12))
        folder = save_checkpoint(root, 3, arrays, state={"consumed_samples": 24}, communicator=alone)
        assert verify(folder) == []
        found = open_checkpoint(root)
        assert (found.step, dict(found.state)) == (3, {"consumed_samples": 24})
        load_checkpoint(folder, parameter_arrays("model", half, placement(6, 12)), communicator=alone)
    assert torch.equal(half[:4], whole[6:10])
    print("mcore-ckpt alone: saved, verified and loaded under another layout")


if __name__ == "__main__":
    main()
