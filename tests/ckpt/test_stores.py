"""``--save`` and ``--load`` values: plain paths and URLs of registered stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_ckpt.specs import StoreSpec
from mcore_ckpt.stores import checkpoint_root, store_registry
from mcore_parallel.plugins import Registry, plugin_manager


@pytest.fixture(scope="module")
def stores():
    return store_registry(plugin_manager(disabled=[]))


@pytest.mark.parametrize(
    ("url", "folder"),
    [
        ("runs/a", "runs/a"),
        ("/data/runs", "/data/runs"),
        ("a:b/c", "a:b/c"),
        ("file:///data/my%20runs", "/data/my runs"),
        ("FILE://localhost/data", "/data"),
    ],
)
def test_paths_and_file_urls(url, folder, stores):
    assert checkpoint_root(url, stores) == Path(folder)


def test_home_is_expanded(stores, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert checkpoint_root("~/runs", stores) == tmp_path / "runs"


def test_an_unknown_scheme_is_answered_with_the_known_ones(stores):
    with pytest.raises(ValueError, match=r"unknown checkpoint store 's3' \(known: file\)"):
        checkpoint_root("s3://bucket/runs", stores)
    with pytest.raises(ValueError, match="did you mean 'file'"):
        checkpoint_root("fil:///data", stores)


@pytest.mark.parametrize("url", ["file://host/data", "file://", "file:///"])
def test_file_urls_name_a_folder_here(url, stores):
    with pytest.raises(ValueError, match="write file:///absolute/path or a plain path"):
        checkpoint_root(url, stores)


def test_a_plugins_store_is_chosen_by_its_scheme(tmp_path):
    mounted = StoreSpec("bucket", lambda url: tmp_path / url.removeprefix("bucket://"))
    assert checkpoint_root("bucket://runs/a", Registry("checkpoint store", [mounted])) == tmp_path / "runs/a"
