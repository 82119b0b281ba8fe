"""Discovery, blocking, isolation of broken plugins, and names: with distributions made on the spot."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from mcore_parallel.plugins import (
    DISABLED_VARIABLE,
    PluginError,
    PluginManager,
    Registry,
    hookimpl,
    lazy,
    plugin_manager,
)
from mcore_parallel.specs import OptimizerSpec, ScheduleSpec

GOOD = """
from mcore_parallel.plugins import hookimpl
from mcore_parallel.specs import OptimizerSpec

@hookimpl
def mcore_optimizers():
    return [OptimizerSpec("{optimizer}", build=dict)]
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Make ``install(name, code)`` put a plugin of entry-point name ``name`` on the path, as pip would."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = []

    def put(name: str, code: str, *, group: str = "mcore", distribution: str = "") -> None:
        distribution = distribution or f"fake_{name}"
        module = f"{distribution}_plugin"
        (tmp_path / f"{module}.py").write_text(code)
        info = tmp_path / f"{distribution}-1.0.dist-info"
        info.mkdir()
        title = distribution.replace("_", "-")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {title}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}\n")
        modules.append(module)
        importlib.invalidate_caches()

    yield put
    for module in modules:
        sys.modules.pop(module, None)


def error_of(manager: PluginManager, name: str) -> str:
    record = next(record for record in manager.failures if record.name == name)
    assert record.error is not None
    return record.error


def names(manager: PluginManager) -> list[str]:
    return Registry("optimizer", manager.collect("mcore_optimizers")).names()


def test_a_plugin_is_discovered(install: Install) -> None:
    install("mine", GOOD.format(optimizer="lion"))
    manager = plugin_manager(disabled=[])
    record = next(record for record in manager.records if record.name == "mine")
    assert (record.distribution, record.value, record.error, record.disabled) == (
        "fake-mine",
        "fake_mine_plugin",
        None,
        False,
    )
    assert "lion" in names(manager)
    assert manager.owners("mcore_optimizers")["lion"] == "mine"
    assert manager.owners("mcore_optimizers")["adam"] == "parallel"


def test_a_plugin_is_blocked_by_the_variable(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("mine", "raise RuntimeError('must not even be imported')")
    monkeypatch.setenv(DISABLED_VARIABLE, " mine ,")
    manager = plugin_manager()
    record = next(record for record in manager.records if record.name == "mine")
    assert record.disabled
    assert record.error is None
    assert manager.is_blocked("mine")
    assert "fake_mine_plugin" not in sys.modules


def test_built_ins_can_be_blocked_too() -> None:
    assert "adam" not in names(plugin_manager(disabled=["parallel"]))


def test_a_name_to_block_that_is_not_installed_is_refused(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("mine", GOOD.format(optimizer="lion"))
    monkeypatch.setenv(DISABLED_VARIABLE, "mien")
    with pytest.raises(PluginError, match=r"MCORE_DISABLED_PLUGINS names 'mien', which is not installed.*'mine'"):
        plugin_manager()


UNKNOWN_HOOK = GOOD.format(optimizer="lion").replace("mcore_optimizers", "mcore_optimisers")
NOT_A_LIST = GOOD.format(optimizer="lion").replace(
    'return [OptimizerSpec("lion", build=dict)]', 'return OptimizerSpec("lion", build=dict)'
)
BROKEN = {
    "raises at import": ("raise RuntimeError('no such library')", "RuntimeError: no such library"),
    "does not parse": ("def (", "SyntaxError"),
    "misspelt hook": (UNKNOWN_HOOK, "unknown hook 'mcore_optimisers'; did you mean 'mcore_optimizers'?"),
    "wrong argument": (GOOD.format(optimizer="lion").replace("optimizers()", "optimizers(config)"), "config"),
    "no marker": (GOOD.format(optimizer="lion").replace("@hookimpl", ""), "'mcore_optimizers' without the marker"),
    "no hook": ("x = 1", "implements no hook"),
    "raises in its hook": (GOOD.format(optimizer="lion").replace("return", "1 / 0 #"), "raised ZeroDivisionError"),
    "returns one spec": (NOT_A_LIST, "must return a list of specs"),
    "returns nothing": (GOOD.format(optimizer="lion").replace("return", "pass #"), "must return a list of specs"),
    "specs without names": (
        GOOD.format(optimizer="lion").replace('[OptimizerSpec("lion", build=dict)]', '["lion"]'),
        "must return a list of specs with a name, got ['lion']",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_a_record_and_the_others_go_on(install: Install, case: str) -> None:
    code, text = BROKEN[case]
    install("aaa", code)  # before the good ones
    install("zzz", GOOD.format(optimizer="other"))
    manager = plugin_manager(disabled=[])
    assert [record.name for record in manager.failures] == ["aaa"]
    assert text in error_of(manager, "aaa")
    assert {"adam", "sgd", "other"} <= set(names(manager))
    assert "lion" not in names(manager)


def test_two_plugins_of_one_name(install: Install) -> None:
    """The second is refused; the first stays."""
    install("same", GOOD.format(optimizer="first"), distribution="fake_a")
    install("same", GOOD.format(optimizer="second"), distribution="fake_b")
    manager = plugin_manager(disabled=[])
    assert [(record.name, record.distribution) for record in manager.failures] == [("same", "fake-b")]
    assert "first" in names(manager)
    assert "second" not in names(manager)


def test_two_plugins_that_register_one_name(install: Install) -> None:
    install("mine", GOOD.format(optimizer="adam"))
    with pytest.raises(
        PluginError, match=r"plugins 'mine' and 'parallel' both register 'adam' .*DISABLED_PLUGINS=parallel"
    ):
        plugin_manager(disabled=[]).collect("mcore_optimizers")


def test_an_optional_hook_of_an_absent_package_is_fine(install: Install) -> None:
    code = GOOD.format(optimizer="lion") + "\n@hookimpl(optionalhook=True)\ndef mcore_of_another():\n    return []\n"
    install("mine", code)
    manager = plugin_manager(disabled=[])
    assert manager.failures == []
    assert "lion" in names(manager)


def test_broken_hookspecs_are_a_record(install: Install) -> None:
    install("more", "raise OSError('gone')", group="mcore.hookspecs")
    manager = plugin_manager(disabled=[])
    assert "OSError: gone" in error_of(manager, "more")
    assert "adam" in names(manager)


def test_a_plugin_may_bring_hooks_of_its_own(install: Install) -> None:
    spec = "from mcore_parallel.plugins import hookspec\n@hookspec\ndef mcore_colours():\n    '''Colours.'''\n"
    install("more", spec, group="mcore.hookspecs")
    install("mine", GOOD.format(optimizer="red").replace("mcore_optimizers", "mcore_colours"))
    manager = plugin_manager(disabled=[])
    assert [spec.name for spec in manager.collect("mcore_colours")] == ["red"]


def test_objects_can_be_registered_by_hand() -> None:
    module = ModuleType("by_hand")
    module.mcore_optimizers = hookimpl(lambda: [OptimizerSpec("mine", build=dict)])  # type: ignore[attr-defined]
    manager = plugin_manager(disabled=[])
    manager.register(module, name="by hand")
    assert manager.owners("mcore_optimizers")["mine"] == "by hand"


def test_an_unknown_hook_collects_nothing() -> None:
    assert plugin_manager(disabled=[]).collect("mcore_nothing") == []


def test_managers_share_nothing() -> None:
    first, second = plugin_manager(disabled=[]), plugin_manager(disabled=["parallel"])
    assert "adam" in names(first)
    assert "adam" not in names(second)


def test_registry_answers_with_what_it_knows() -> None:
    registry = Registry("schedule", [ScheduleSpec("1f1b", plan=list), ScheduleSpec("gpipe", plan=list)])
    assert registry["gpipe"].name == "gpipe"
    assert "1f1b" in registry
    assert [spec.name for spec in registry] == ["1f1b", "gpipe"]
    with pytest.raises(ValueError, match=r"unknown schedule '1f1bb'; did you mean '1f1b'\? \(known: 1f1b, gpipe\)"):
        registry["1f1bb"]
    with pytest.raises(ValueError, match=r"unknown schedule 'zzz' \(known: 1f1b, gpipe\)"):
        registry["zzz"]


def test_registry_refuses_duplicates() -> None:
    with pytest.raises(PluginError, match="two plugins register the schedule '1f1b'"):
        Registry("schedule", [ScheduleSpec("1f1b", plan=list), ScheduleSpec("1f1b", plan=tuple)])


def test_lazy_imports_at_the_call() -> None:
    call = lazy("json:dumps")
    assert call.__name__ == "dumps"
    assert call([1], indent=None) == "[1]"
    missing = lazy("no_such_module_anywhere:x")
    with pytest.raises(ModuleNotFoundError):
        missing()
    for bad in ("json", "json:", ":dumps"):
        with pytest.raises(ValueError, match="takes 'package.module:attribute'"):
            lazy(bad)


def test_listing_plugins_imports_no_torch() -> None:
    code = (
        "import sys; from mcore_parallel.plugins import plugin_manager; m = plugin_manager(disabled=[]); "
        "m.collect('mcore_optimizers'); m.collect('mcore_pipeline_schedules'); "
        "assert not m.failures, m.failures; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_planning_a_pipeline_imports_no_torch() -> None:
    """A layout is planned, proven and refused before anything heavy loads."""
    code = (
        "import sys; from mcore_parallel.builtin import mcore_pipeline_schedules as s; "
        "from mcore_parallel.pipeline.compile import compile_schedule as c; "
        "from mcore_parallel.pipeline.stage import place_layers; "
        "c(s()[0], num_ranks=4, num_micro_batches=8); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
