"""Rules for the whole test suite: one thread per parallel worker, no timed properties, GPU tests only on a GPU."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# How long an example takes says more about the machine's load than about the code.
settings.register_profile("mcore", deadline=None, print_blob=True)
settings.load_profile("mcore")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: a pool of threads in each would only make them wait for one another. This must happen
    # before torch is imported, and the processes that tests start inherit it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` on machines without CUDA."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))
