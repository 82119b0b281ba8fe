"""The code in the package's README runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

from mcore_ckpt.stores import checkpoint_root, store_registry
from mcore_parallel.plugins import plugin_manager

README = Path(__file__).parents[2] / "packages" / "mcore-ckpt" / "README.md"


def examples():
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_first_example_saves_and_loads(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(examples()[0], "README", "exec"), {})
    assert capsys.readouterr().out == "10 0.001\n"
    assert sorted(path.name for path in (tmp_path / "runs" / "demo").iterdir()) == ["latest", "step-00000010"]


def test_the_store_example_is_a_plugin():
    namespace = {}
    exec(compile(examples()[1], "README", "exec"), namespace)
    manager = plugin_manager(disabled=[])
    plugin = type("Plugin", (), {"mcore_checkpoint_stores": staticmethod(namespace["mcore_checkpoint_stores"])})
    manager.register(plugin)
    stores = store_registry(manager)
    assert stores.names() == ["file", "scratch"]
    assert checkpoint_root("scratch://a/b", stores) == Path("/scratch/a/b")
