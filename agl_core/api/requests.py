"""Reading requests: query parameters and JSON bodies, with errors that name the way out."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl

from agl_core.errors import BadRequest, Invalid
from agl_core.wire import read_json, structure

T = TypeVar("T")

MAX_QUERY_PARAMETERS = 10_000


def read_query(
    query_string: bytes, kind: type[Any], *, is_open: bool
) -> tuple[Any, dict[str, str]]:
    """Query parameters as an attrs class.

    Args:
        query_string: As it stands in the URL.
        kind: The attrs class whose fields are the parameters.
        is_open: Whether other parameters are given back instead of refused.

    Returns:
        An instance of ``kind``, and the other parameters.

    Raises:
        Invalid: A value is not allowed, or a parameter is unknown; the nearest one is named.
    """
    try:
        pairs = parse_qsl(
            query_string.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=MAX_QUERY_PARAMETERS,
        )
    except ValueError as exc:
        raise BadRequest(f"the query cannot be read: {exc}") from exc
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    others: dict[str, str] = {}
    for name, text in pairs:
        if name in hints and is_list(hints[name]):
            values.setdefault(name, []).extend(part for part in text.split(",") if part)
        elif name in values or name in others:
            raise Invalid(f"query: {name!r} stands there twice")
        elif name in hints:
            values[name] = _value_of(text, hints[name])
        elif is_open:
            others[name] = text
        else:
            values[name] = text  # refused below, with the nearest name
    return structure(values, kind, "query"), others


def read_fields(value: Any, kind: type[T], where: str = "") -> tuple[T, dict[str, str]]:
    """A JSON object as an attrs class that leaves other keys to somebody else, as text.

    Raises:
        Invalid: A value is not allowed.
    """
    if not isinstance(value, Mapping):
        return structure(value, kind, where), {}
    names = set(get_type_hints(kind))
    others: dict[str, str] = {}
    for name, other in value.items():
        if name in names:
            continue
        if not isinstance(other, str | int | float):
            raise Invalid(f"{name}: must be a string, a number, true or false")
        others[name] = str(other).lower() if isinstance(other, bool) else str(other)
    known = {name: other for name, other in value.items() if name in names}
    return structure(known, kind, where), others


def read_body(body: bytes) -> Any:
    """A request's JSON.

    Raises:
        BadJson: It is none.
    """
    return read_json(body, "the body")


def read_one_or_more(value: Any, kind: type[T], name: str) -> tuple[list[T], bool]:
    """One object or a list of them; errors name the index.

    Returns:
        The records, and whether it was a list.

    Raises:
        Invalid: With ``details["index"]`` where it was a list.
    """
    if not isinstance(value, list):
        return [structure(value, kind)], False
    if not value:
        raise Invalid("the list is empty")
    items: list[T] = []
    for index, item in enumerate(value):
        try:
            items.append(structure(item, kind, f"{name}[{index}]"))
        except Invalid as exc:
            exc.details["index"] = index
            raise
    return items, True


def members(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the hint alone."""
    if get_origin(hint) in (Union, types.UnionType):
        return get_args(hint)
    return (hint,)


def is_list(hint: Any) -> bool:
    """Whether a parameter may have several values."""
    return any(get_origin(member) is tuple for member in members(hint))


def _value_of(text: str, hint: Any) -> Any:
    """The JSON value that a text stands for; text of another kind stays, and is refused later."""
    kinds: Iterable[Any] = members(hint)
    if bool in kinds:
        return {"true": True, "false": False}.get(text, text)
    if int in kinds or float in kinds:
        try:
            return int(text) if int in kinds else float(text)
        except ValueError:
            return text
    return text
