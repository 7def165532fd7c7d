"""Plugins are found by metadata, imported when enabled, and stop the start when broken."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from agl_core.clock import Clock, SystemClock
from agl_core.errors import (
    HookError,
    PluginConflict,
    PluginError,
    PluginLoadError,
    PluginNotFound,
    UpstreamRefused,
)
from agl_core.hookspecs import ServiceHooks, hookimpl
from agl_core.interfaces import CaptureSink, Exporter, Route, RouteRequest, ServerAnswer, Store
from agl_core.plugin_manager import (
    LoadedPlugin,
    Plugins,
    installed_plugins,
    load_plugin_class,
    make_plugin,
    missing_extra,
)
from agl_core.records import ModelServer
from agl_memory import MemoryConfig, MemoryPlugin, MemoryStore


def loaded(*instances: object) -> list[LoadedPlugin]:
    return [
        LoadedPlugin(name=f"p{index}", origin=f"dist{index} 1.0", instance=instance)
        for index, instance in enumerate(instances)
    ]


def plugins(*instances: object) -> Plugins:
    return Plugins(loaded(*instances))


class Resolver:
    """Routes nowhere."""

    async def resolve(self, request: RouteRequest, candidates: Sequence[Any]) -> Route | None:
        return None

    def forget(self, rollout_id: str) -> None:
        pass


class NoServers:
    """Nothing is registered."""

    def registered(self) -> Sequence[ModelServer]:
        return ()

    def inflight(self, server: ModelServer) -> int:
        return 0

    async def get(
        self, server: ModelServer, path: str, *, seconds: float, limit_bytes: int
    ) -> ServerAnswer:
        raise UpstreamRefused("nobody is there")


class ResolverPlugin:
    """Gives a resolver of its own."""

    def __init__(self) -> None:
        self.resolver = Resolver()

    @hookimpl
    def provide_route_resolver(self) -> Resolver:
        return self.resolver


# --- discovery and import ------------------------------------------------------------------------


def test_a_plugin_is_found_without_being_imported(install: Any) -> None:
    install("toy-plugin", "raise RuntimeError('imported')", version="2.5")
    found = installed_plugins()["toy-plugin"]
    assert found.origin == "toy-plugin 2.5 (toy_plugin:Plugin)"
    assert "toy_plugin" not in sys.modules


def test_the_built_in_plugins_are_found() -> None:
    assert {"memory", "vllm", "local", "verl", "hypercorn"} <= set(installed_plugins())


def test_two_distributions_with_one_plugin_name_are_an_error_that_names_both(
    install: Any,
) -> None:
    install("first-dist", plugins={"same": "first_dist:Plugin"})
    install("second-dist", plugins={"same": "second_dist:Plugin"}, version="3.0")
    with pytest.raises(PluginConflict) as refused:
        installed_plugins()
    assert "first-dist 1.0" in refused.value.message
    assert "second-dist 3.0" in refused.value.message
    assert refused.value.hint == "uninstall one of them"


def test_two_distributions_that_offer_the_same_class_are_in_conflict_too(install: Any) -> None:
    install("first-dist", plugins={"same": "shared:Plugin"})
    install("second-dist", plugins={"same": "shared:Plugin"})
    with pytest.raises(PluginConflict):
        installed_plugins()


def test_an_unknown_plugin_is_told_with_the_nearest_and_the_installed_ones() -> None:
    with pytest.raises(PluginNotFound) as refused:
        load_plugin_class("memori", installed_plugins())
    assert refused.value.message == "unknown plugin 'memori', did you mean 'memory'?"
    assert "hypercorn, k8s, local, memory" in (refused.value.hint or "")


def test_an_import_that_fails_is_told_with_plugin_distribution_and_error(install: Any) -> None:
    install("toy-plugin", "1 / 0")
    with pytest.raises(PluginLoadError) as refused:
        load_plugin_class("toy-plugin", installed_plugins())
    assert refused.value.message == (
        "plugin 'toy-plugin' of toy-plugin 1.0 (toy_plugin:Plugin) cannot be imported: "
        "ZeroDivisionError: division by zero"
    )
    assert isinstance(refused.value.__cause__, ZeroDivisionError)


def test_a_missing_package_is_told_with_the_extra_that_brings_it(install: Any) -> None:
    install(
        "toy-plugin",
        "import heavy_dependency.core",
        requires=["click", 'Heavy.Dependency>=2; extra == "heavy"'],
    )
    with pytest.raises(PluginLoadError) as refused:
        load_plugin_class("toy-plugin", installed_plugins())
    assert refused.value.hint == "pip install 'toy-plugin[heavy]'"


def test_an_import_error_that_names_a_module_gets_the_extra_too(install: Any) -> None:
    install(
        "toy-plugin",
        "raise ImportError('too old', name='heavy')",
        requires=['heavy; extra == "big"'],
    )
    with pytest.raises(PluginLoadError) as refused:
        load_plugin_class("toy-plugin", installed_plugins())
    assert refused.value.hint == "pip install 'toy-plugin[big]'"


def test_a_missing_package_that_no_extra_brings_is_not_guessed_at(install: Any) -> None:
    install("toy-plugin", "import toy_plugin_missing_part")
    with pytest.raises(PluginLoadError) as refused:
        load_plugin_class("toy-plugin", installed_plugins())
    assert "'toy_plugin_missing_part' is missing" in (refused.value.hint or "")
    assert "pip install" not in (refused.value.hint or "")


def test_the_extras_of_the_built_in_plugins_are_found() -> None:
    assert missing_extra("agl-lite", "openai") == "demo"
    assert missing_extra("agl-lite", "pytest_asyncio") is None
    assert missing_extra("no-such-distribution", "x") is None


def test_an_entry_point_that_names_nothing_is_told(install: Any) -> None:
    install("toy-plugin", "")
    with pytest.raises(PluginLoadError, match="cannot be imported: AttributeError"):
        load_plugin_class("toy-plugin", installed_plugins())


def test_a_plugin_that_is_no_class_is_refused(install: Any) -> None:
    install("toy-plugin", "Plugin = object()")
    with pytest.raises(PluginLoadError, match="is no class"):
        load_plugin_class("toy-plugin", installed_plugins())


@pytest.mark.parametrize("config", ["dict", "5", "lambda: 1"])
def test_a_config_that_is_no_attrs_class_is_refused(install: Any, config: str) -> None:
    install("toy-plugin", f"class Plugin:\n    Config = {config}\n")
    with pytest.raises(PluginLoadError, match=r"Config of plugin 'toy-plugin'.*no attrs class"):
        load_plugin_class("toy-plugin", installed_plugins())


def test_a_constructor_that_fails_is_told_with_plugin_and_distribution(install: Any) -> None:
    install(
        "toy-plugin", "class Plugin:\n    def __init__(self):\n        raise OSError('no disk')"
    )
    installed = installed_plugins()
    kind = load_plugin_class("toy-plugin", installed)
    with pytest.raises(PluginLoadError, match=r"'toy-plugin' of toy-plugin 1\.0 .* no disk"):
        make_plugin("toy-plugin", kind, None, installed)


def test_a_plugin_gets_the_settings_of_its_config() -> None:
    made = make_plugin("memory", MemoryPlugin, MemoryConfig(max_rollouts=3), installed_plugins())
    store = Plugins([made]).provide_store(SystemClock())
    assert isinstance(store, MemoryStore)
    assert made.origin.startswith("agl-lite ")


def test_the_installed_metadata_names_each_built_in_plugins_package() -> None:
    entries = importlib.metadata.entry_points(group="agl.plugins")
    own = [entry for entry in entries if entry.dist and entry.dist.name == "agl-lite"]
    for entry in own:
        assert isinstance(entry.load(), type), entry


# --- registration --------------------------------------------------------------------------------


class Misspelt:
    """Its hook does not exist."""

    @hookimpl
    def provide_stroe(self) -> None: ...


class UnknownArgument:
    """Wants what the hook has not."""

    @hookimpl
    def provide_store(self, clock: Clock, database: str) -> None: ...


class Unmarked:
    """Forgot the decorator."""

    def provide_store(self, clock: Clock) -> None: ...


class Async:
    """Hooks are plain functions."""

    @hookimpl
    async def provide_store(self) -> None: ...


class AsyncGenerator:
    """Hooks are plain functions."""

    @hookimpl
    async def provide_exporter(self) -> Any:
        yield 1


class Wrapper:
    """Wraps what other plugins do."""

    @hookimpl(wrapper=True)
    def provide_store(self) -> Any:
        return (yield)


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        (Misspelt(), r"'p0' of dist0 1\.0: unknown hook 'provide_stroe'"),
        (UnknownArgument(), r"'p0' of dist0 1\.0: .*\{?'database'\}?"),
        (Unmarked(), "provide_store of plugin 'p0' is not marked as a hook"),
        (Async(), "provide_store of plugin 'p0' must be a plain function"),
        (AsyncGenerator(), "provide_exporter of plugin 'p0' must be a plain function"),
        (Wrapper(), "provide_store of plugin 'p0' must not be a wrapper"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_a_hook_that_cannot_work_is_refused_when_it_is_registered(
    plugin: object, said: str
) -> None:
    with pytest.raises(HookError, match=said) as refused:
        plugins(plugin)
    assert "\n" not in refused.value.message


def test_a_misspelt_hook_is_told_with_all_hooks() -> None:
    with pytest.raises(HookError) as refused:
        plugins(Misspelt())
    for name in vars(ServiceHooks):
        if not name.startswith("_"):
            assert name in (refused.value.hint or "")


def test_an_implementation_may_take_fewer_arguments() -> None:
    class Plugin:
        @hookimpl
        def provide_store(self) -> Store:
            return MemoryStore(SystemClock())

    assert isinstance(plugins(Plugin()).provide_store(SystemClock()), MemoryStore)


# --- asking --------------------------------------------------------------------------------------


def test_plugins_are_asked_in_the_order_they_were_given_in() -> None:
    first, second, third = ResolverPlugin(), ResolverPlugin(), ResolverPlugin()
    found = plugins(first, second, third).provide_route_resolvers(SystemClock(), NoServers())
    assert found == [("p0", first.resolver), ("p1", second.resolver), ("p2", third.resolver)]


def test_two_stores_are_a_conflict_that_names_both() -> None:
    store = MemoryPlugin(MemoryConfig())
    other = MemoryPlugin(MemoryConfig())
    with pytest.raises(PluginConflict, match="'p0' and 'p1' both give one") as refused:
        plugins(store, other).provide_store(SystemClock())
    assert "plugins.enabled" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("method", "hook"),
    [
        ("provide_store", "provide_store"),
        ("provide_runner", "provide_runner"),
        ("provide_route_resolvers", "provide_route_resolver"),
        ("provide_asgi_server", "provide_asgi_server"),
    ],
)
def test_a_hook_that_nobody_answers_is_told_with_what_is_enabled(method: str, hook: str) -> None:
    class Nothing:
        pass

    with pytest.raises(PluginNotFound, match=rf"implements {hook} \(enabled: p0\)"):
        ask(Nothing(), method)


@pytest.mark.parametrize(
    "method",
    [
        "provide_request_reshapers",
        "provide_capture_sinks",
        "provide_exporters",
        "provide_rollout_hooks",
    ],
)
def test_hooks_that_take_any_number_take_none(method: str) -> None:
    assert not getattr(plugins(ResolverPlugin()), method)()


def answering(hook: str, answer: Any) -> object:
    def implementation(self: object) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    implementation.__name__ = hook
    return type("Answering", (), {hook: hookimpl(implementation)})()


ASKS: list[tuple[str, str]] = [
    ("provide_store", "provide_store"),
    ("provide_runner", "provide_runner"),
    ("provide_route_resolver", "provide_route_resolvers"),
    ("provide_request_reshaper", "provide_request_reshapers"),
    ("provide_capture_sink", "provide_capture_sinks"),
    ("provide_exporter", "provide_exporters"),
    ("provide_rollout_hooks", "provide_rollout_hooks"),
    ("provide_asgi_server", "provide_asgi_server"),
]


def ask(plugin: object, method: str) -> Any:
    function = getattr(plugins(plugin), method)
    arguments: dict[str, tuple[Any, ...]] = {
        "provide_store": (SystemClock(),),
        "provide_runner": (SystemClock(),),
        "provide_route_resolvers": (SystemClock(), NoServers()),
    }
    return function(*arguments.get(method, ()))


@pytest.mark.parametrize(("hook", "method"), ASKS)
def test_a_hook_that_raises_is_told_with_plugin_distribution_and_error(
    hook: str, method: str
) -> None:
    with pytest.raises(HookError) as refused:
        ask(answering(hook, KeyError("no such thing")), method)
    assert refused.value.message == (
        f"{hook} of plugin 'p0' of dist0 1.0 raised KeyError: 'no such thing'"
    )


@pytest.mark.parametrize(("hook", "method"), ASKS)
def test_a_hook_that_returns_nothing_is_told(hook: str, method: str) -> None:
    with pytest.raises(HookError, match=rf"{hook} of plugin 'p0' of dist0 1\.0 returned nothing"):
        ask(answering(hook, None), method)


@pytest.mark.parametrize(("hook", "method"), ASKS)
def test_an_object_that_lacks_methods_is_told_with_what_it_lacks(hook: str, method: str) -> None:
    with pytest.raises(HookError, match=f"{hook} of plugin 'p0' returned .*lacks") as refused:
        ask(answering(hook, 5), method)
    assert "agl_core.interfaces" in (refused.value.hint or "")


def test_a_class_in_place_of_an_object_is_told() -> None:
    with pytest.raises(HookError, match="returned the class MemoryStore"):
        ask(answering("provide_store", MemoryStore), "provide_store")


def test_an_error_of_ours_passes_through_as_it_is() -> None:
    with pytest.raises(PluginError, match="cannot work together"):
        ask(answering("provide_store", PluginError("cannot work together")), "provide_store")


def test_a_sink_that_cannot_be_opened_is_no_sink() -> None:
    class Sink:
        async def receive(self, event: Any) -> None: ...

    with pytest.raises(HookError, match="lacks __aenter__, __aexit__"):
        ask(answering("provide_capture_sink", Sink()), "provide_capture_sinks")


class Lines:
    """An exporter of a format by choice."""

    media_type = "application/x-ndjson"

    def __init__(self, format_: str) -> None:
        self.format = format_

    def begin(self, options: Any) -> bytes:
        return b""

    def encode(self, rollout: Any, events: Any, options: Any) -> bytes:
        return b""

    def finish(self, options: Any) -> bytes:
        return b""


def test_exporters_of_all_plugins_are_found_by_format() -> None:
    a, b, c = Lines("a"), Lines("b"), Lines("c")
    found = plugins(
        answering("provide_exporter", [a, b]), answering("provide_exporter", c)
    ).provide_exporters()
    assert found == {"a": a, "b": b, "c": c}


def test_two_exporters_of_one_format_are_a_conflict_that_names_both_plugins() -> None:
    both = plugins(
        answering("provide_exporter", [Lines("a")]), answering("provide_exporter", [Lines("a")])
    )
    with pytest.raises(PluginConflict, match="'p0' and 'p1' both export 'a'"):
        both.provide_exporters()


def test_an_exporter_among_several_that_is_none_is_told() -> None:
    with pytest.raises(HookError, match="lacks begin"):
        ask(answering("provide_exporter", [Lines("a"), object()]), "provide_exporters")


def test_the_hooks_of_a_plugin_are_listed() -> None:
    class Two:
        @hookimpl
        def provide_capture_sink(self) -> CaptureSink: ...

        @hookimpl
        def provide_exporter(self) -> list[Exporter]: ...

    assert plugins(Two()).hooks_of("p0") == ["provide_capture_sink", "provide_exporter"]
