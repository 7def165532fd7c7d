"""The hooks of plugins have the types of their specs, and the helper that says so can fail."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from mypy import api as mypy

from agl_core.hookspecs import ClientHooks, ServiceHooks, hookimpl
from agl_core.interfaces import CaptureSink, Exporter, Runner, Store
from agl_core.testing.hooks import check_plugin, hook_specs

ROOT = Path(__file__).parents[2]
AUTHOR = ROOT / "tests" / "typing" / "plugin_author.py"


@pytest.fixture
def author() -> Iterator[ModuleType]:
    """The plugin that implements every hook."""
    spec = importlib.util.spec_from_file_location("plugin_author_of_the_test", AUTHOR)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def built_in() -> list[importlib.metadata.EntryPoint]:
    found: list[importlib.metadata.EntryPoint] = []
    for group in ("agl.plugins", "agl.client_plugins"):
        found += importlib.metadata.entry_points(group=group)
    return found


@pytest.mark.parametrize("entry", built_in(), ids=lambda entry: f"{entry.group}.{entry.name}")
def test_the_hooks_of_a_built_in_plugin_have_the_types_of_their_specs(
    entry: importlib.metadata.EntryPoint,
) -> None:
    assert check_plugin(entry.load())


def test_the_authors_plugins_implement_every_hook(author: ModuleType) -> None:
    assert set(check_plugin(author.AuthorPlugin)) == {
        name for name in vars(ServiceHooks) if not name.startswith("_")
    }
    assert set(check_plugin(author.AuthorClientPlugin)) == {
        name for name in vars(ClientHooks) if not name.startswith("_")
    }


def test_the_authors_plugins_are_typed_strictly() -> None:
    config = ["--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary"]
    out, err, status = mypy.run([*config, str(AUTHOR)])
    assert (status, out, err) == (0, "", "")


@pytest.mark.parametrize("name", sorted(hook_specs()))
def test_every_spec_says_when_it_is_called_and_what_happens(name: str) -> None:
    text = hook_specs()[name].__doc__ or ""
    for line in ("Called:", "Answers:", "Errors:", "Since:"):
        assert line in text, line


class WrongReturn:
    @hookimpl
    def provide_store(self) -> Runner: ...


class WrongItem:
    @hookimpl
    def provide_exporter(self) -> list[Store]: ...


class OneOfSeveral:
    @hookimpl
    def provide_exporter(self) -> Exporter: ...


class WrongArgument:
    @hookimpl
    def provide_store(self, clock: int) -> Store: ...


class ExtraArgument:
    @hookimpl
    def provide_store(self, database: str) -> Store: ...


class Untyped:
    @hookimpl
    def provide_store(self, clock) -> Store: ...


class NoReturnType:
    @hookimpl
    def provide_store(self): ...


class Unmarked:
    def provide_store(self) -> Store: ...


class Misspelt:
    @hookimpl
    def provide_stroe(self) -> Store: ...


class Coroutine:
    @hookimpl
    async def provide_store(self) -> Store: ...


class Nothing:
    pass


class Unlike:
    """Lacks what a sink has."""


class ReturnsUnlike:
    @hookimpl
    def provide_capture_sink(self) -> Unlike: ...


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        (WrongReturn, "provide_store: returns Runner, the hook wants Store"),
        (WrongItem, "provide_exporter: returns list"),
        (OneOfSeveral, "provide_exporter: returns Exporter"),
        (WrongArgument, "provide_store: 'clock' is int, the hook gives Clock"),
        (ExtraArgument, "provide_store: the hook has no argument 'database'"),
        (Untyped, "provide_store: 'clock' has no type"),
        (NoReturnType, "provide_store: 'return' has no type"),
        (Unmarked, "provide_store: it is not marked"),
        (Misspelt, "provide_stroe: there is no hook of that name"),
        (Coroutine, "provide_store: a hook is no coroutine"),
        (ReturnsUnlike, "provide_capture_sink: returns Unlike"),
        (Nothing, "Nothing implements no hook"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_hook_that_differs_from_its_spec_is_told(plugin: type[Any], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_plugin(plugin)


class NarrowSink:
    """Has what a sink needs, and inherits from nothing."""

    async def receive(self, event: Any) -> None: ...


class Narrow:
    @hookimpl
    def provide_store(self) -> Store: ...

    @hookimpl
    def provide_capture_sink(self) -> NarrowSink: ...


def test_fewer_arguments_and_a_narrower_return_are_right() -> None:
    assert check_plugin(Narrow) == ["provide_capture_sink", "provide_store"]


def test_a_type_that_inherits_from_the_interface_is_right() -> None:
    assert CaptureSink in InheritingSink.__mro__
    assert check_plugin(Inheriting) == ["provide_capture_sink"]


class InheritingSink(CaptureSink):
    async def receive(self, event: Any) -> None: ...

    async def __aexit__(self, *exc_info: object) -> None: ...


class Inheriting:
    @hookimpl
    def provide_capture_sink(self) -> InheritingSink: ...
