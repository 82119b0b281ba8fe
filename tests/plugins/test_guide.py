"""The authoring guide shows code that exists, and lists every hook."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from mcore_parallel.pipeline.compile import compile_schedule
from mcore_parallel.plugins import plugin_manager

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "plugins.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", GUIDE, flags=re.DOTALL)


def sources() -> str:
    plugin = ROOT / "plugins" / "mcore-plugin-example"
    files = [plugin / "pyproject.toml", *plugin.rglob("*.py"), Path(__file__).with_name("test_example_plugin.py")]
    return "\n".join(path.read_text() for path in files)


@pytest.mark.parametrize(
    "code", [c for kind, c in BLOCKS if kind in ("python", "toml") and "compile_schedule(spec" not in c]
)
def test_code_in_the_guide_is_code_of_the_plugin(code: str) -> None:
    assert code in sources()


def test_the_plan_in_the_guide_is_what_comes_out(capsys: pytest.CaptureFixture[str]) -> None:
    code = next(code for language, code in BLOCKS if language == "python" and "compile_schedule(spec" in code)
    shown = next(code for language, code in BLOCKS if language == "" and code.startswith("F0"))
    spec = next(s for s in plugin_manager().collect("mcore_pipeline_schedules") if s.name == "gpipe-example")
    exec(textwrap.dedent(code), {"spec": spec, "compile_schedule": compile_schedule})
    assert capsys.readouterr().out == shown


def test_the_table_lists_every_hook() -> None:
    manager = plugin_manager()
    hooks = {name for name, caller in vars(manager.hook).items() if name[0] != "_" and caller.has_spec()}
    listed = set(re.findall(r"^\| [^|]+ \| `(mcore_\w+)` \|", GUIDE, flags=re.MULTILINE))
    assert listed == hooks
