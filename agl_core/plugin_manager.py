"""Finds, selects, loads and asks plugins. A broken plugin stops the start with its name.

Nothing of a plugin is imported before it is enabled: discovery reads the metadata of installed
distributions alone.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import attrs
import pluggy
from attrs import frozen

from agl_core import hookspecs
from agl_core.clock import Clock
from agl_core.errors import (
    AglError,
    HookError,
    PluginConflict,
    PluginLoadError,
    PluginNotFound,
)
from agl_core.interfaces import (
    AsgiServer,
    CaptureSink,
    ClientExtension,
    Exporter,
    ModelServers,
    RequestReshaper,
    RolloutHooks,
    RouteResolver,
    Runner,
    Store,
    WebApp,
)

SERVICE_GROUP = "agl.plugins"
CLIENT_GROUP = "agl.client_plugins"
T = TypeVar("T")


@frozen(kw_only=True)
class InstalledPlugin:
    """What the metadata says of a plugin; nothing of it is imported."""

    name: str
    distribution: str
    version: str
    entry_point: importlib.metadata.EntryPoint

    @property
    def origin(self) -> str:
        return f"{self.distribution} {self.version} ({self.entry_point.value})"


def installed_plugins(
    group: str = SERVICE_GROUP,
    entry_points: Iterable[importlib.metadata.EntryPoint] | None = None,
) -> dict[str, InstalledPlugin]:
    """Every plugin of the group that an installed distribution offers, by name.

    Raises:
        PluginConflict: Two distributions offer one name.
    """
    found: dict[str, InstalledPlugin] = {}
    if entry_points is None:
        entry_points = importlib.metadata.entry_points(group=group)
    for entry in entry_points:
        dist = entry.dist
        plugin = InstalledPlugin(
            name=entry.name,
            distribution=dist.name if dist else "?",
            version=dist.version if dist else "?",
            entry_point=entry,
        )
        other = found.get(entry.name)
        if other is not None and (
            _normal(other.distribution) != _normal(plugin.distribution)
            or other.entry_point.value != entry.value
        ):
            raise PluginConflict(
                f"plugin {entry.name!r} is offered by {other.origin} and by {plugin.origin}",
                hint="uninstall one of them",
            )
        found[entry.name] = plugin
    return found


def load_plugin_class(name: str, installed: Mapping[str, InstalledPlugin]) -> type[Any]:
    """Import one plugin.

    Raises:
        PluginNotFound: Nothing installed has that name; the message lists what has.
        PluginLoadError: Its import failed, or it is no class.
    """
    plugin = installed.get(name)
    if plugin is None:
        near = difflib.get_close_matches(name, installed, n=1)
        guess = f", did you mean {near[0]!r}?" if near else ""
        raise PluginNotFound(
            f"unknown plugin {name!r}{guess}",
            hint=f"installed: {', '.join(sorted(installed))}; a package that offers it must be "
            "installed in this environment",
        )
    try:
        loaded = plugin.entry_point.load()
    except Exception as exc:
        raise PluginLoadError(
            f"plugin {name!r} of {plugin.origin} cannot be imported: {type(exc).__name__}: {exc}",
            hint=_install_hint(plugin, exc),
        ) from exc
    if not isinstance(loaded, type):
        raise PluginLoadError(f"plugin {name!r} of {plugin.origin} is no class")
    config = config_class(loaded)
    if config is not None and not (isinstance(config, type) and attrs.has(config)):
        raise PluginLoadError(
            f"Config of plugin {name!r} of {plugin.origin} is no attrs class",
            hint="decorate it with attrs.frozen(kw_only=True), and give every field a default",
        )
    return loaded


def config_class(kind: type[Any]) -> type[Any] | None:
    """The class of a plugin's table, or None where it has no settings."""
    found: type[Any] | None = getattr(kind, "Config", None)
    return found


def missing_extra(distribution: str, module: str) -> str | None:
    """The extra of a distribution that brings a module's package, or None."""
    wanted = _normal(module.partition(".")[0])
    try:
        requirements = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for requirement in requirements:
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", requirement)
        package = re.match(r"[A-Za-z0-9._-]+", requirement)
        if extra and package and _normal(package[0]) == wanted and extra[1] != "dev":
            return extra[1]
    return None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _install_hint(plugin: InstalledPlugin, exc: Exception) -> str | None:
    if not isinstance(exc, ImportError) or exc.name is None:
        return None
    extra = missing_extra(plugin.distribution, exc.name)
    if extra is None:
        return f"the module {exc.name!r} is missing, or another version of it is needed"
    return f"pip install '{plugin.distribution}[{extra}]'"


@frozen(kw_only=True)
class LoadedPlugin:
    """A plugin object and where it comes from."""

    name: str
    origin: str
    instance: object


def make_plugin(
    name: str, kind: type[Any], config: Any, installed: Mapping[str, InstalledPlugin]
) -> LoadedPlugin:
    """Make the object of a plugin class; a class with a ``Config`` gets its settings.

    Raises:
        PluginLoadError: Its constructor raised.
    """
    origin = installed[name].origin if name in installed else kind.__module__
    try:
        instance = kind(config) if config_class(kind) is not None else kind()
    except AglError:
        raise
    except Exception as exc:
        raise PluginLoadError(
            f"plugin {name!r} of {origin} cannot be made: {type(exc).__name__}: {exc}"
        ) from exc
    return LoadedPlugin(name=name, origin=origin, instance=instance)


class Plugins:
    """Asks plugins, in the order that they were given in.

    Each hook has a typed method. Implementations are called one by one, so that an error, or an
    answer that is missing or wrong, is told with the plugin's name.
    """

    def __init__(
        self, loaded: Sequence[LoadedPlugin], specs: type = hookspecs.ServiceHooks
    ) -> None:
        self.loaded = tuple(loaded)
        self._origin = {plugin.name: plugin.origin for plugin in loaded}
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(specs)
        try:
            for plugin in reversed(self.loaded):  # pluggy asks the last registered first
                self._manager.register(plugin.instance, plugin.name)
            self._manager.check_pending()
        except pluggy.PluginValidationError as exc:
            culprit = next(plugin for plugin in self.loaded if plugin.instance is exc.plugin)
            raise HookError(
                f"plugin {culprit.name!r} of {culprit.origin}: " + " ".join(str(exc).split()),
                hint=f"the hooks are: {', '.join(_hook_names(specs))}",
            ) from exc
        for plugin in self.loaded:
            self._refuse_odd_implementations(plugin, specs)

    def _refuse_odd_implementations(self, plugin: LoadedPlugin, specs: type) -> None:
        forgotten = [
            name
            for name in _hook_names(specs)
            if hasattr(plugin.instance, name) and name not in self.hooks_of(plugin.name)
        ]
        if forgotten:
            raise HookError(
                f"{forgotten[0]} of plugin {plugin.name!r} is not marked as a hook",
                hint="decorate it with agl_core.hookspecs.hookimpl",
            )
        for caller in self._manager.get_hookcallers(plugin.instance) or ():
            for implementation in caller.get_hookimpls():
                if implementation.plugin is not plugin.instance:
                    continue
                odd = None
                if inspect.iscoroutinefunction(
                    implementation.function
                ) or inspect.isasyncgenfunction(implementation.function):
                    odd = "must be a plain function, not 'async def'"
                elif implementation.hookwrapper or implementation.wrapper:
                    odd = "must not be a wrapper: hooks here hand over objects"
                if odd:
                    raise HookError(f"{caller.name} of plugin {plugin.name!r} {odd}")

    def hooks_of(self, name: str) -> list[str]:
        """Names of the hooks that a plugin implements."""
        plugin = self._manager.get_plugin(name)
        return sorted(caller.name for caller in self._manager.get_hookcallers(plugin) or ())

    def provide_store(self, clock: Clock) -> Store:
        """The store; exactly one plugin must answer."""
        return self._one("provide_store", Store, clock=clock)

    def provide_runner(self, clock: Clock) -> Runner:
        """The runner; exactly one plugin must answer."""
        return self._one("provide_runner", Runner, clock=clock)

    def provide_route_resolvers(
        self, clock: Clock, servers: ModelServers
    ) -> list[tuple[str, RouteResolver]]:
        """The resolvers with their plugins' names, in order; at least one."""
        found = self._all("provide_route_resolver", RouteResolver, clock=clock, servers=servers)
        if not found:
            raise self._nobody("provide_route_resolver")
        return found

    def provide_request_reshapers(self) -> list[tuple[str, RequestReshaper]]:
        """The reshapers with their plugins' names, in order."""
        return self._all("provide_request_reshaper", RequestReshaper)

    def provide_capture_sinks(self) -> list[tuple[str, CaptureSink]]:
        """The sinks with their plugins' names."""
        return self._all("provide_capture_sink", CaptureSink)

    def provide_exporters(self) -> dict[str, Exporter]:
        """The exporters by format."""
        by_format: dict[str, tuple[str, Exporter]] = {}
        for name, answer in self._ask("provide_exporter"):
            exporters = answer if isinstance(answer, list | tuple) else [answer]
            for exporter in exporters:
                self._check("provide_exporter", name, exporter, Exporter)
                other = by_format.get(exporter.format)
                if other is not None:
                    raise PluginConflict(
                        f"plugins {other[0]!r} and {name!r} both export {exporter.format!r}",
                        hint="disable one of them in plugins.enabled",
                    )
                by_format[exporter.format] = (name, exporter)
        return {format_: exporter for format_, (_, exporter) in by_format.items()}

    def provide_rollout_hooks(self) -> list[tuple[str, RolloutHooks]]:
        """The rollout hooks with their plugins' names, in order."""
        return self._all("provide_rollout_hooks", RolloutHooks)

    def provide_asgi_server(self) -> AsgiServer:
        """The server; exactly one plugin must answer."""
        return self._one("provide_asgi_server", AsgiServer)

    def provide_client_extensions(self) -> list[tuple[str, ClientExtension]]:
        """The client's extensions with their plugins' names."""
        return self._all("provide_client_extension", ClientExtension)

    def register_routes(self, app: WebApp) -> Iterator[str]:
        """Let one plugin after the other add its blueprints; yields the name of each."""
        for name, _ in self._ask("register_routes", may_be_none=True, app=app):
            yield name

    def _one(self, hook: str, interface: type[T], **arguments: Any) -> T:
        found = self._all(hook, interface, **arguments)
        if not found:
            raise self._nobody(hook)
        if len(found) > 1:
            names = " and ".join(repr(name) for name, _ in found)
            raise PluginConflict(
                f"{hook} takes one answer, but plugins {names} both give one",
                hint="disable one of them in plugins.enabled",
            )
        return found[0][1]

    def _nobody(self, hook: str) -> PluginNotFound:
        enabled = ", ".join(plugin.name for plugin in self.loaded) or "none"
        return PluginNotFound(
            f"no enabled plugin implements {hook} (enabled: {enabled})",
            hint="add one to plugins.enabled; 'agl plugins' lists what each does",
        )

    def _all(self, hook: str, interface: type[T], **arguments: Any) -> list[tuple[str, T]]:
        return [
            (name, cast("T", self._check(hook, name, answer, interface)))
            for name, answer in self._ask(hook, **arguments)
        ]

    def _ask(
        self, hook: str, *, may_be_none: bool = False, **arguments: Any
    ) -> Iterable[tuple[str, Any]]:
        caller = getattr(self._manager.hook, hook)
        for implementation in reversed(caller.get_hookimpls()):
            name = implementation.plugin_name
            given = [arguments[argument] for argument in implementation.argnames]
            try:
                answer = implementation.function(*given)
            except AglError:
                raise
            except Exception as exc:
                raise HookError(
                    f"{hook} of plugin {name!r} of {self._origin.get(name, '?')} raised "
                    f"{type(exc).__name__}: {exc}"
                ) from exc
            if answer is None and not may_be_none:
                raise HookError(
                    f"{hook} of plugin {name!r} of {self._origin.get(name, '?')} returned nothing"
                )
            yield name, answer

    def _check(self, hook: str, name: str, answer: Any, interface: type[Any]) -> Any:
        if isinstance(answer, type):
            raise HookError(
                f"{hook} of plugin {name!r} returned the class {answer.__name__}",
                hint="return an object of it",
            )
        lacking = [member for member in _members(interface) if not hasattr(answer, member)]
        if lacking:
            raise HookError(
                f"{hook} of plugin {name!r} returned {type(answer).__name__}, "
                f"which lacks {', '.join(lacking)}",
                hint=f"it must be a {interface.__name__} of agl_core.interfaces",
            )
        return answer


def _hook_names(specs: type) -> list[str]:
    return sorted(name for name in vars(specs) if not name.startswith("_"))


def _members(interface: type[Any]) -> list[str]:
    """Names that an object of the interface must have."""
    names = {name for name in vars(interface) if not name.startswith("_")}
    names |= {name for name in inspect.get_annotations(interface) if not name.startswith("_")}
    if hasattr(interface, "__aenter__"):
        names |= {"__aenter__", "__aexit__"}
    return sorted(names)
