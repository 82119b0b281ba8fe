"""The one plugin manager of mcore: discovery, blocking, error isolation and registries of specs.

Every package contributes its hook specifications through the entry-point group ``mcore.hookspecs`` and its
built-ins through the group ``mcore``; third parties use the same group ``mcore``. Registering hooks take no
arguments and return lists of frozen specs, and run at start-up only.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Generic, Protocol, TypeVar

import pluggy

PROJECT = "mcore"
HOOKSPEC_GROUP = "mcore.hookspecs"
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
        """Load the groups ``mcore.hookspecs`` then ``mcore``; a plugin that fails becomes a record, not an exception.

        Raises:
            PluginError: ``disabled`` names a plugin that is not installed.
        """
        installed = metadata.entry_points()  # it reads the lists of all distributions, so once
        for point in _unique(installed.select(group=HOOKSPEC_GROUP)):
            error = self._load_hookspecs(point)
            if error is not None:
                self.records.append(PluginRecord(point.name, _distribution(point), point.value, error=error))
        points = _unique(installed.select(group=PROJECT))
        blocked = _check_installed(disabled, [point.name for point in points])
        for point in points:
            if point.name in blocked:
                self.set_blocked(point.name)
                self.records.append(PluginRecord(point.name, _distribution(point), point.value, disabled=True))
                continue
            error = self._load_one(point)
            self.records.append(PluginRecord(point.name, _distribution(point), point.value, error=error))

    def _load_hookspecs(self, point: metadata.EntryPoint) -> str | None:
        try:
            self.add_hookspecs(point.load())
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _load_one(self, point: metadata.EntryPoint) -> str | None:
        plugin: Any = None
        try:
            plugin = point.load()
            self.register(plugin, name=point.name)
            self._check_hooks(plugin, point.name)
            for hook in self.get_hookcallers(plugin) or []:
                if hook.has_spec():
                    self._contributions(hook, only=plugin)
        except Exception as error:
            if plugin is not None and self.get_name(plugin) == point.name:
                self.unregister(plugin)
            return f"{type(error).__name__}: {error}"
        return None

    def _check_hooks(self, plugin: Any, name: str) -> None:
        """Refuse what pluggy would silently ignore: unknown hooks, hooks without the marker, plugins without hooks."""
        known = sorted(hook for hook, caller in vars(self.hook).items() if hook[0] != "_" and caller.has_spec())
        found = False
        for attribute in dir(plugin):
            options = self.parse_hookimpl_opts(plugin, attribute)
            if options is None:
                if attribute in known and _is_unmarked_function(plugin, attribute):
                    raise PluginError(f"plugin {name!r} defines {attribute!r} without the marker @hookimpl")
                continue
            found = True
            hook = options.get("specname") or attribute
            if hook not in known and not options.get("optionalhook"):
                raise PluginError(f"plugin {name!r} implements unknown hook {hook!r}{_did_you_mean(hook, known)}")
        if not found:
            raise PluginError(f"plugin {name!r} implements no hook (are its functions marked with @hookimpl?)")

    def collect(self, hook: str) -> list[Any]:
        """Call the registering hook ``hook`` of every plugin and join the lists of specs that they return.

        Raises:
            PluginError: a plugin's hook raised or returned something else than a list of named specs, or two plugins
                registered the same name.
        """
        caller = getattr(self.hook, hook, None)
        if caller is None:
            return []
        owners: dict[str, str] = {}
        specs = []
        for plugin, spec in self._contributions(caller):
            if spec.name in owners:
                raise PluginError(
                    f"plugins {owners[spec.name]!r} and {plugin!r} both register {spec.name!r} by {hook}; "
                    f"leave one out: {DISABLED_VARIABLE}={plugin}"
                )
            owners[spec.name] = plugin
            specs.append(spec)
        return specs

    def owners(self, hook: str) -> dict[str, str]:
        """Which plugin registered each name by ``hook``."""
        caller = getattr(self.hook, hook, None)
        return {} if caller is None else {spec.name: plugin for plugin, spec in self._contributions(caller)}

    def _contributions(self, caller: pluggy.HookCaller, only: Any = None) -> list[tuple[str, Any]]:
        """Plugin name and spec of everything that ``caller``'s hook returns, in the order of registration."""
        found = []
        for implementation in caller.get_hookimpls():
            if only is not None and implementation.plugin is not only:
                continue
            name = implementation.plugin_name
            try:
                specs = implementation.function()
            except Exception as error:
                raise PluginError(f"plugin {name!r}: {caller.name} raised {type(error).__name__}: {error}") from error
            if not isinstance(specs, list | tuple) or not all(isinstance(_name_of(spec), str) for spec in specs):
                raise PluginError(
                    f"plugin {name!r}: {caller.name} must return a list of specs with a name, got {specs!r}"
                )
            found += [(name, spec) for spec in specs]
        return found


def _name_of(spec: Any) -> Any:
    return getattr(spec, "name", None)


def _is_unmarked_function(plugin: Any, attribute: str) -> bool:
    function = getattr(plugin, attribute)
    return inspect.isroutine(function) and not hasattr(function, f"{PROJECT}_spec")


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _distribution(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "unknown"


def _unique(points: Iterable[metadata.EntryPoint]) -> list[metadata.EntryPoint]:
    # A distribution seen twice on sys.path (editable and installed) must not register twice.
    unique = {(point.name, point.value): point for point in points}
    return [unique[key] for key in sorted(unique)]


def _check_installed(disabled: Iterable[str], installed: list[str]) -> set[str]:
    names = set(disabled)
    for name in sorted(names.difference(installed)):
        raise PluginError(
            f"{DISABLED_VARIABLE} names {name!r}, which is not installed{_did_you_mean(name, installed)} "
            f"(installed: {', '.join(installed)})"
        )
    return names


def plugin_manager(disabled: Iterable[str] | None = None) -> PluginManager:
    """Build a fresh manager with everything installed, less ``disabled`` (default: ``MCORE_DISABLED_PLUGINS``).

    Raises:
        PluginError: ``disabled`` names a plugin that is not installed.
    """
    manager = PluginManager()
    if disabled is None:
        disabled = [name.strip() for name in os.environ.get(DISABLED_VARIABLE, "").split(",") if name.strip()]
    manager.load_entry_points(disabled)
    manager.check_pending()
    return manager


class Registry(Generic[Spec]):
    """Specs of one kind by name or by any of their ``aliases``, if they have some.

    Refuses duplicates; answers an unknown name with those it knows.
    """

    def __init__(self, kind: str, specs: Iterable[Spec]) -> None:
        self.kind = kind
        self._specs: dict[str, Spec] = {}
        self._aliases: dict[str, Spec] = {}
        for spec in specs:
            self._specs[self._unused(spec.name)] = spec
            for alias in getattr(spec, "aliases", ()):
                self._aliases[self._unused(alias)] = spec

    def _unused(self, name: str) -> str:
        if name in self:
            raise PluginError(f"two plugins register the {self.kind} {name!r}; disable one with {DISABLED_VARIABLE}")
        return name

    def __getitem__(self, name: str) -> Spec:
        spec = self._specs.get(name) or self._aliases.get(name)
        if spec is None:
            hint = _did_you_mean(name, [*self._specs, *self._aliases])
            raise ValueError(f"unknown {self.kind} {name!r}{hint} (known: {', '.join(self.names())})")
        return spec

    def __contains__(self, name: object) -> bool:
        return name in self._specs or name in self._aliases

    def __iter__(self) -> Iterator[Spec]:
        return iter(self._specs.values())

    def names(self) -> list[str]:
        """All registered names, sorted, without aliases."""
        return sorted(self._specs)

    def aliases(self) -> list[str]:
        """All further names by which specs can be had, sorted."""
        return sorted(self._aliases)


def lazy(target: str) -> Callable[..., Any]:
    """A callable that imports ``"package.module:attribute"`` when it is called, so that listing plugins stays cheap.

    Raises:
        ValueError: ``target`` is not of that form.
    """
    module, _, attribute = target.partition(":")
    if not module or not attribute:
        raise ValueError(f"lazy() takes 'package.module:attribute', got {target!r}")

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), attribute)(*args, **kwargs)

    call.__name__ = attribute
    call.__doc__ = f"Imports and calls {target}."
    return call
