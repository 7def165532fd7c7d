"""The composition root: settings and plugins become one service."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self, cast

from attrs import define, field, frozen
from quart import Quart

from agl_core.api import register
from agl_core.auth import Authority
from agl_core.clock import Clock, SystemClock
from agl_core.config import RawConfig, build_settings, enabled_plugins, read_config
from agl_core.errors import ConfigError, HookError, PluginNotFound
from agl_core.feed import ChangeFeed
from agl_core.gateway.control import Gateway
from agl_core.interfaces import AsgiApp, AsgiServer, Store
from agl_core.plugin_manager import (
    InstalledPlugin,
    LoadedPlugin,
    Plugins,
    config_class,
    installed_plugins,
    load_plugin_class,
    make_plugin,
)
from agl_core.services import Services
from agl_core.settings import Settings


@frozen(kw_only=True)
class Loaded:
    """A configuration with the plugins that it enables."""

    settings: Settings
    plugins: Plugins
    installed: Mapping[str, InstalledPlugin]
    raw: RawConfig = field(factory=RawConfig)


def load(raw: RawConfig, installed: Mapping[str, InstalledPlugin] | None = None) -> Loaded:
    """Import the enabled plugins and check every setting.

    Raises:
        ConfigError: Settings are wrong; every fault is listed.
        PluginError: A plugin is unknown, broken, or in conflict with another.
    """
    known = installed_plugins() if installed is None else installed
    try:
        enabled = enabled_plugins(raw)
    except ConfigError:
        build_settings(raw, {}, known)  # so that the other tables' faults are said with it
        raise
    classes = {name: load_plugin_class(name, known) for name in enabled}
    configs = {name: config_class(kind) for name, kind in classes.items()}
    settings = build_settings(raw, configs, known)
    made = [
        make_plugin(name, kind, settings.plugins.tables.get(name), known)
        for name, kind in classes.items()
    ]
    return Loaded(settings=settings, plugins=Plugins(made), installed=known, raw=raw)


def load_file(path: Path | None) -> Loaded:
    """``load`` for a file, or for the defaults where there is none."""
    return load(read_config(path))


def load_asgi_server(loaded: Loaded) -> AsgiServer:
    """The server that ``server.use`` names; its plugin need not be enabled.

    Raises:
        ConfigError: The plugin's table is wrong.
        PluginError: The plugin is unknown, broken, or no server.
    """
    name = loaded.settings.server.use
    plugin = next((p for p in loaded.plugins.loaded if p.name == name), None)
    if plugin is None:
        kind = load_plugin_class(name, loaded.installed)
        settings = build_settings(loaded.raw, {name: config_class(kind)}, loaded.installed)
        plugin = make_plugin(name, kind, settings.plugins.tables.get(name), loaded.installed)
    plugins = Plugins([plugin])
    if "provide_asgi_server" not in plugins.hooks_of(name):
        raise PluginNotFound(
            f"server.use names plugin {name!r}, which provides no server",
            hint="'agl plugins' lists what each does; the built-in server is 'hypercorn'",
        )
    return plugins.provide_asgi_server()


@define
class Service:
    """Everything behind the service's one HTTP endpoint. An async context manager."""

    settings: Settings
    store: Store
    gateway: Gateway
    feed: ChangeFeed
    app: AsgiApp
    """The ASGI application; requests are served while the context is open."""
    _stack: AsyncExitStack

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.store)
            await stack.enter_async_context(self.gateway)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()


def create_app(loaded: Loaded, clock: Clock | None = None) -> Service:
    """Build the service; nothing is opened before its context is entered.

    Raises:
        PluginError: A hook failed, or its answer is missing or wrong.
    """
    settings, plugins = loaded.settings, loaded.plugins
    clock = clock or SystemClock()
    store = plugins.provide_store(clock)
    authority = Authority(settings.auth, clock, is_open=settings.server.insecure)
    gateway = Gateway(
        settings.gateway,
        clock,
        store,
        authority,
        resolvers=lambda servers: plugins.provide_route_resolvers(clock, servers),
        reshapers=plugins.provide_request_reshapers(),
        sinks=plugins.provide_capture_sinks(),
        capture=settings.capture,
    )
    feed = ChangeFeed(store, clock, settings.server.max_waiters)
    services = Services(
        settings=settings,
        clock=clock,
        store=store,
        authority=authority,
        feed=feed,
        gateway=gateway,
        exporters=plugins.provide_exporters(),
        rollout_hooks=[hooks for _, hooks in plugins.provide_rollout_hooks()],
        plugins=describe_plugins(plugins.loaded),
    )
    web = Quart("agl_core", static_folder=None)
    register(web, services)
    _register_plugin_routes(web, plugins)
    return Service(
        settings=settings,
        store=store,
        gateway=gateway,
        feed=feed,
        app=cast("AsgiApp", gateway.in_front_of(cast("AsgiApp", web))),
        stack=AsyncExitStack(),
    )


def _register_plugin_routes(web: Quart, plugins: Plugins) -> None:
    """Let plugins add routes; a path and method that exists already stops the start."""
    known = list(web.url_map.iter_rules())
    served = {pair for rule in known for pair in _served(rule)}
    for name in plugins.register_routes(cast("Any", web)):
        new = [rule for rule in web.url_map.iter_rules() if not any(rule is old for old in known)]
        for rule in new:
            for pair in _served(rule):
                if pair in served:
                    raise HookError(
                        f"plugin {name!r} serves {pair[1]} {rule.rule}, which is served already"
                    )
                served.add(pair)
        known += new


def _served(rule: Any) -> list[tuple[str, str]]:
    """What a rule answers to; two names for the same variable part are the same path."""
    path = re.sub(r"<[^>]*>", "<>", rule.rule)
    methods = set(rule.methods or ()) - {"HEAD", "OPTIONS"}
    return [(path, method) for method in sorted(methods)]


def describe_plugins(loaded: Sequence[LoadedPlugin]) -> list[dict[str, Any]]:
    """What ``/healthz`` tells of the plugins."""
    return [{"name": plugin.name, "origin": plugin.origin} for plugin in loaded]
