"""The one plugin manager of mcore: discovery, blocking, error isolation and registries of specs.

Every package contributes its hook specifications through the entry-point group ``mcore.hookspecs`` and its
built-ins through the group ``mcore``; third parties use the same group ``mcore``. Registering hooks take no
arguments and return lists of frozen specs, and run at start-up only.
"""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Generic, Protocol, TypeVar

import pluggy

PROJECT = "mcore"
DISABLED_VARIABLE = "MCORE_DISABLED_PLUGINS"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Named(Protocol):
    """Anything a registry can hold: a spec with a ``name``."""

    @property
    def name(self) -> str: ...


Spec = TypeVar("Spec", bound=Named)


class PluginError(ValueError):
    """A plugin broke the rules (duplicate name, unknown hook); the text names plugin, rule and fix."""


@dataclass(frozen=True)
class PluginRecord:
    """One entry point of the group ``mcore``: where it came from and whether it loaded."""

    name: str
    distribution: str
    value: str
    error: str | None = None
    disabled: bool = False


class PluginManager(pluggy.PluginManager):
    """``pluggy.PluginManager`` that remembers what it loaded, what it was told to skip and what failed."""

    def __init__(self) -> None:
        super().__init__(PROJECT)
        self.records: list[PluginRecord] = []

    @property
    def failures(self) -> list[PluginRecord]:
        """The plugins that could not be loaded; the others go on without them."""
        return [record for record in self.records if record.error is not None]

    def load_entry_points(self, disabled: Iterable[str] = ()) -> None:
        """Load the groups ``mcore.hookspecs`` then ``mcore``; a plugin that fails becomes a record, not an exception."""
        for point in _entry_points("mcore.hookspecs"):
            self.add_hookspecs(point.load())
        blocked = set(disabled)
        for point in _entry_points(PROJECT):
            distribution = point.dist.name if point.dist is not None else "unknown"
            if point.name in blocked:
                self.set_blocked(point.name)
                self.records.append(PluginRecord(point.name, distribution, point.value, disabled=True))
                continue
            error = self._load_one(point)
            self.records.append(PluginRecord(point.name, distribution, point.value, error=error))

    def _load_one(self, point: metadata.EntryPoint) -> str | None:
        plugin: Any = None
        try:
            plugin = point.load()
            self.register(plugin, name=point.name)
            self._check_hooks_known(plugin, point.name)
        except Exception as error:
            if plugin is not None and self.is_registered(plugin):
                self.unregister(plugin)
            return f"{type(error).__name__}: {error}"
        return None

    def _check_hooks_known(self, plugin: Any, name: str) -> None:
        known = {hook for hook in vars(self.hook) if not hook.startswith("_")}
        for attribute in dir(plugin):
            options = self.parse_hookimpl_opts(plugin, attribute)
            if options is None or options.get("optionalhook"):
                continue
            caller = getattr(self.hook, options.get("specname") or attribute, None)
            if caller is None or not caller.has_spec():
                near = difflib.get_close_matches(attribute, sorted(known), n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise PluginError(f"plugin {name!r} implements unknown hook {attribute!r}{hint}")

    def collect(self, hook: str) -> list[Any]:
        """Call the registering hook ``hook`` and flatten the lists of specs it returns."""
        caller = getattr(self.hook, hook, None)
        if caller is None:
            return []
        return [spec for result in caller() for spec in result]


def _entry_points(group: str) -> list[metadata.EntryPoint]:
    # A distribution seen twice on sys.path (editable and installed) must not register twice.
    unique = {(point.name, point.value): point for point in metadata.entry_points(group=group)}
    return [unique[key] for key in sorted(unique)]


def plugin_manager(disabled: Iterable[str] | None = None) -> PluginManager:
    """Build a fresh manager with everything installed, less ``disabled`` (default: ``MCORE_DISABLED_PLUGINS``)."""
    manager = PluginManager()
    if disabled is None:
        disabled = [name.strip() for name in os.environ.get(DISABLED_VARIABLE, "").split(",") if name.strip()]
    manager.load_entry_points(disabled)
    manager.check_pending()
    return manager


class Registry(Generic[Spec]):
    """Specs of one kind by name. Refuses duplicates; answers an unknown name with those it knows."""

    def __init__(self, kind: str, specs: Iterable[Spec]) -> None:
        self.kind = kind
        self._specs: dict[str, Spec] = {}
        for spec in specs:
            if spec.name in self._specs:
                raise PluginError(f"two plugins register the {kind} {spec.name!r}; disable one with {DISABLED_VARIABLE}")
            self._specs[spec.name] = spec

    def __getitem__(self, name: str) -> Spec:
        try:
            return self._specs[name]
        except KeyError:
            near = difflib.get_close_matches(name, self._specs, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown {self.kind} {name!r}{hint} (known: {', '.join(self.names())})") from None

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def __iter__(self) -> Iterator[Spec]:
        return iter(self._specs.values())

    def names(self) -> list[str]:
        """All registered names, sorted."""
        return sorted(self._specs)


def lazy(target: str) -> Callable[..., Any]:
    """A callable that imports ``"package.module:attribute"`` at its first call, so that listing plugins stays cheap."""
    module, _, attribute = target.partition(":")

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), attribute)(*args, **kwargs)

    call.__name__ = attribute
    call.__doc__ = f"Imports and calls {target}."
    return call
