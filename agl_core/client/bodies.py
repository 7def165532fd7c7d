"""Python values to JSON bodies.

What JSON cannot hold is refused here, with the path to it, before anything is sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from agl_core import wire
from agl_core.errors import Invalid

_LEAST, _MOST = -(2**63), 2**64 - 1


def encode(value: Any, where: str = "") -> bytes:
    """``value`` as JSON text.

    Args:
        value: Records, dicts, lists, tuples, strings, numbers, booleans and None.
        where: How messages call ``value`` itself.

    Raises:
        Invalid: Something in it is not JSON; ``details["path"]`` says where it stands.
    """
    try:
        return wire.to_json(_plain(value, where))
    except RecursionError as exc:
        raise Invalid(
            f"{where or 'the body'} contains itself or is nested too deeply for JSON"
        ) from exc


def sparse(record: Any) -> Any:
    """A record as a dict of the fields that differ from their defaults.

    What is left out can be filled in by the other side: defaults of a batch, values of before.
    """
    if isinstance(record, list | tuple):
        return [sparse(item) for item in record]
    if not attrs.has(type(record)):
        return record
    return {
        field.name: sparse(getattr(record, field.name))
        for field in attrs.fields(type(record))
        if getattr(record, field.name) != _default(field)
    }


def _default(field: attrs.Attribute[Any]) -> Any:
    if isinstance(field.default, attrs.Factory):  # type: ignore[arg-type]
        return field.default.factory()  # type: ignore[union-attr]
    return field.default


def _plain(value: Any, path: str) -> Any:
    """``value`` made of exact built-in types, so that no codec converts anything by guess."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return _text(str.__str__(value), path)
    if isinstance(value, int):
        if not _LEAST <= value <= _MOST:
            raise _refusal(path, "a whole number of more than 64 bits", "send it as a string")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _refusal(path, repr(float(value)), "send None, or a string")
        return float(value)
    if isinstance(value, Mapping):
        return {_key(key, path): _plain(item, _below(path, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if attrs.has(type(value)):
        return {
            field.name: _plain(getattr(value, field.name), _below(path, field.name))
            for field in attrs.fields(type(value))
        }
    kind = type(value)
    raise _refusal(
        path,
        f"a value of type {kind.__module__}.{kind.__qualname__}",
        "convert it to dicts, lists, strings, numbers, booleans or None",
    )


def _text(value: str, path: str) -> str:
    if any(0xD800 <= ord(character) < 0xE000 for character in value):
        raise _refusal(path, "text with a lone surrogate", "decode the bytes as UTF-8 first")
    return value


def _key(key: Any, path: str) -> str:
    if not isinstance(key, str):
        raise _refusal(path, f"a dict with the key {key!r}", "use strings as keys")
    return _text(str.__str__(key), path)


def _below(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _refusal(path: str, what: str, hint: str) -> Invalid:
    place = path or "the body"
    return Invalid(f"{place}: {what} is not JSON", hint=hint, details={"path": place})
