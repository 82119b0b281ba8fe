"""Built-in plugins of mcore-ckpt, registered through the same hooks as anybody's. No torch."""

from __future__ import annotations

from mcore_ckpt.specs import StoreSpec
from mcore_parallel.plugins import hookimpl, lazy


@hookimpl
def mcore_checkpoint_stores() -> list[StoreSpec]:
    """The local (or network) file system."""
    return [StoreSpec("file", lazy("mcore_ckpt.stores:file_folder"), "a folder on a file system that all ranks share")]
