"""Compares a plugin's hooks with the specs, which neither pluggy nor a type checker does.

pluggy compares names and refuses unknown arguments when a plugin is registered; a type checker
reads an implementation by itself. Between the two a hook may say that it returns something else
than its spec, and nobody notices before the service asks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_args, get_origin, get_type_hints

from agl_core.hookspecs import PROJECT, ClientHooks, ServiceHooks

_MARK = f"{PROJECT}_impl"


def hook_specs() -> dict[str, Callable[..., Any]]:
    """Every hook's spec by name, of the service and of the client."""
    return {
        name: spec
        for specs in (ServiceHooks, ClientHooks)
        for name, spec in vars(specs).items()
        if not name.startswith("_")
    }


def check_plugin(plugin_class: type[Any]) -> list[str]:
    """Check that the hooks of a plugin have the types of their specs.

    Args:
        plugin_class: What the plugin's entry point names.

    Returns:
        The names of its hooks.

    Raises:
        AssertionError: A hook is unknown, not marked, asynchronous, takes an argument that is
            unknown or of another type, or returns something else than its spec says.
    """
    specs = hook_specs()
    found = []
    for name, function in inspect.getmembers(plugin_class, inspect.isroutine):
        marked = getattr(function, _MARK, None)
        if name not in specs:
            assert marked is None, f"{plugin_class.__name__}.{name}: there is no hook of that name"
            continue
        where = f"{plugin_class.__name__}.{name}"
        assert marked is not None, f"{where}: it is not marked with hookimpl"
        assert not inspect.iscoroutinefunction(function), f"{where}: a hook is no coroutine"
        _check_types(where, function, specs[name])
        found.append(name)
    assert found, f"{plugin_class.__name__} implements no hook"
    return found


def _check_types(where: str, function: Callable[..., Any], spec: Callable[..., Any]) -> None:
    wanted, given = get_type_hints(spec), get_type_hints(function)
    arguments = [name for name in inspect.signature(function).parameters if name != "self"]
    for name in [*arguments, "return"]:
        assert name in wanted, f"{where}: the hook has no argument {name!r}"
        assert name in given, f"{where}: {name!r} has no type"
    for name in arguments:
        assert given[name] == wanted[name], (
            f"{where}: {name!r} is {_text(given[name])}, the hook gives {_text(wanted[name])}"
        )
    assert _returns(given["return"], wanted["return"]), (
        f"{where}: returns {_text(given['return'])}, the hook wants {_text(wanted['return'])}"
    )


def _returns(given: Any, wanted: Any) -> bool:
    """Whether a type may be returned for another: itself, a subclass, or one with its methods."""
    if given == wanted:
        return True
    if get_origin(wanted) is list:
        return get_origin(given) is list and _returns(get_args(given)[0], get_args(wanted)[0])
    if not (isinstance(given, type) and isinstance(wanted, type)):
        return False
    methods = [
        name for name, value in vars(wanted).items() if inspect.isfunction(value) and name[0] != "_"
    ]
    is_alike = bool(methods) and all(callable(getattr(given, name, None)) for name in methods)
    return wanted in given.__mro__ or is_alike


def _text(kind: Any) -> str:
    return str(kind) if get_args(kind) else getattr(kind, "__name__", str(kind))
