"""Extensions of the client: found by name among the entry points, or given as objects."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points

import pluggy

from agl_core.errors import HookError, PluginConflict, PluginLoadError, PluginNotFound
from agl_core.hookspecs import PROJECT, ClientHooks
from agl_core.interfaces import ClientExtension

GROUP = "agl.client_plugins"


def installed_names() -> list[str]:
    """The extensions that installed distributions offer; nothing of theirs is imported."""
    return sorted(entry_points(group=GROUP).names)


def load_extension(name: str) -> ClientExtension:
    """Import the plugin of that name and ask it for its extension.

    Raises:
        PluginNotFound: Nothing installed offers it.
        PluginConflict: Two distributions do.
        PluginLoadError: Its import or its constructor failed.
        HookError: Its hook is misspelt, failed, or gave no extension.
    """
    entry = _entry(name)
    try:
        plugin = entry.load()()
    except Exception as exc:
        raise PluginLoadError(f"{_origin(entry)} cannot be loaded: {exc!r}") from exc
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(ClientHooks)
    try:
        manager.register(plugin, name)
        manager.check_pending()
        answers = manager.hook.provide_client_extension()
    except Exception as exc:
        raise HookError(f"{_origin(entry)}: {exc}") from exc
    if not answers:
        raise HookError(f"{_origin(entry)} gave nothing for provide_client_extension")
    extension = checked(answers[0], _origin(entry))
    if extension.name != name:
        raise HookError(f"{_origin(entry)} gave an extension that calls itself {extension.name!r}")
    return extension


def checked(extension: object, origin: str) -> ClientExtension:
    """The object, if it is an extension."""
    name = getattr(extension, "name", None)
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        raise HookError(f"{origin} has no usable name: {name!r}", hint="a Python identifier")
    for method in ("headers", "namespace"):
        if not callable(getattr(extension, method, None)):
            raise HookError(f"{origin} has no method {method!r}")
    return extension  # type: ignore[return-value]


def _entry(name: str) -> EntryPoint:
    found: list[EntryPoint] = [*entry_points(group=GROUP, name=name)]
    if not found:
        raise PluginNotFound(
            f"no client plugin {name!r} is installed",
            hint=f"installed: {', '.join(installed_names()) or 'none'}",
        )
    if len({(entry.dist.name if entry.dist else "", entry.value) for entry in found}) > 1:
        raise PluginConflict(
            f"two distributions offer the client plugin {name!r}: "
            + ", ".join(sorted(_origin(entry) for entry in found)),
            hint="uninstall one of them",
        )
    return found[0]


def _origin(entry: EntryPoint) -> str:
    dist = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown distribution"
    return f"client plugin {entry.name!r} ({dist})"


class Extensions:
    """The extensions of one client: those that it was given, and those that it came to need."""

    def __init__(self, given: Sequence[str | ClientExtension], reserved: type) -> None:
        """Load what was given.

        Args:
            given: Names or objects.
            reserved: The client's class, whose methods no namespace may hide.
        """
        self._given: dict[str, ClientExtension] = {}
        self._namespaces: dict[str, object] = {}
        if isinstance(given, str):
            given = (given,)
        for item in given:
            if isinstance(item, str):
                extension = load_extension(item)
            else:
                extension = checked(item, f"extension {type(item).__qualname__}")
            if extension.name in self._given:
                raise PluginConflict(f"two extensions are called {extension.name!r}")
            if hasattr(reserved, extension.name):
                raise HookError(
                    f"an extension cannot be called {extension.name!r}: the client has a method "
                    "of that name"
                )
            self._given[extension.name] = extension

    def headers(self) -> dict[str, str]:
        """Headers for the next request, of the extensions that were given; later ones win."""
        merged: dict[str, str] = {}
        for name, extension in self._given.items():
            try:
                merged.update(extension.headers())
            except Exception as exc:
                raise HookError(f"extension {name!r} gave no headers: {exc!r}") from exc
        return merged

    def namespace(self, name: str, client: object) -> object:
        """What ``client.<name>`` is.

        Raises:
            PluginNotFound: There is no such extension.
        """
        if name not in self._namespaces:
            extension = self._given.get(name) or load_extension(name)
            self._namespaces[name] = extension.namespace(client)
        return self._namespaces[name]
