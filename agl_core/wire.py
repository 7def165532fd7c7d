"""Records to JSON and back: the only module that knows a codec.

Writing goes through msgspec, which reads attrs classes itself. Reading goes through cattrs, which
finds every fault of a body at once and refuses unknown keys. JSON's own rules are kept strictly:
NaN and Infinity are refused, and so are lone surrogates; an integer may be written ``3.0``.
"""

from __future__ import annotations

import base64
import collections.abc
import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, get_args, get_origin

import attrs
import cattrs
import msgspec
from cattrs.errors import (
    ClassValidationError,
    ForbiddenExtraKeysError,
    IterableValidationError,
    IterableValidationNote,
)
from cattrs.gen import make_dict_structure_fn

from agl_core.errors import BadJson, CursorExpired, Invalid
from agl_core.records import Rollout, RolloutPage, Tombstone

T = TypeVar("T")

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder()


def to_json(value: Any) -> bytes:
    """A record, or anything made of records and JSON values, as compact JSON."""
    return _encoder.encode(value)


def to_builtins(value: Any) -> Any:
    """A record as dicts, lists, strings and numbers."""
    return msgspec.to_builtins(value)


def read_json(body: bytes, what: str = "the body") -> Any:
    """JSON text as Python values.

    Raises:
        BadJson: It is no JSON by RFC 8259, or nested too deeply.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as exc:
        raise BadJson(f"{what} is not JSON: {exc}", hint="send UTF-8 JSON without NaN") from exc


@attrs.frozen
class Problem:
    """One fault of a value: where it stands, and what is wrong."""

    path: tuple[str, ...]
    message: str


def _as_str(value: Any, _type: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"must be a string, not {_kind(value)}")
    return value


def _as_bool(value: Any, _type: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"must be true or false, not {_kind(value)}")
    return value


def _as_float(value: Any, _type: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"must be a number, not {_kind(value)}")
    if not math.isfinite(value):
        raise TypeError("must be a finite number")
    return float(value)


def _as_strict_int(value: Any, _type: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"must be a whole number, not {_kind(value)}")
    return value


def _as_json_int(value: Any, _type: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return _as_strict_int(value, _type)


def _kind(value: Any) -> str:
    """How JSON and TOML call a value's type, with the value itself where it is short."""
    names = {type(None): "null", dict: "an object", list: "a list"}
    return names.get(type(value)) or repr(value)[:80]


def _as_literal(value: Any, literal: Any) -> Any:
    allowed = get_args(literal)
    for choice in allowed:
        if type(choice) is type(value) and choice == value:
            return choice
    raise ValueError(f"must be one of {', '.join(map(repr, allowed))}, not {_kind(value)}")


def _as_mapping(converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    def structure(value: Any, kind: Any) -> Any:
        if not isinstance(value, Mapping):
            raise TypeError(f"must be an object, not {_kind(value)}")
        of_values = get_args(kind)[1]
        if of_values is Any:
            return dict(value)
        return dict(_each(value.items(), lambda item: converter.structure(item, of_values), kind))

    return structure


def _as_tuple(converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    def structure(value: Any, kind: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise TypeError(f"must be a list, not {_kind(value)}")
        item_type = get_args(kind)[0]
        made = _each(enumerate(value), lambda item: converter.structure(item, item_type), kind)
        return tuple(item for _, item in made)

    return structure


def _each(
    items: Iterable[tuple[Any, Any]], make: Callable[[Any], Any], kind: Any
) -> list[tuple[Any, Any]]:
    """Make every item; the faults of all of them are raised together, each with its place."""
    made: list[tuple[Any, Any]] = []
    faults: list[Exception] = []
    for place, item in items:
        try:
            made.append((place, make(item)))
        except Exception as exc:
            exc.add_note(IterableValidationNote(f"at {place!r}", place, kind))
            faults.append(exc)
    if faults:
        raise IterableValidationError("items are wrong", faults, kind)
    return made


def _as_class(converter: cattrs.Converter, forbid_extra_keys: bool) -> Callable[[Any], Any]:
    def factory(kind: Any) -> Callable[[Any, Any], Any]:
        fill = make_dict_structure_fn(kind, converter, _cattrs_forbid_extra_keys=forbid_extra_keys)

        def structure(value: Any, _type: Any) -> Any:
            # cattrs would take a list or a text for an object without keys.
            if not isinstance(value, Mapping):
                raise TypeError(f"must be an object, not {_kind(value)}")
            return fill(value, kind)

        return structure

    return factory


def _is_mapping(kind: Any) -> bool:
    origin: Any = get_origin(kind)
    return origin is dict or origin is collections.abc.Mapping


def _is_open_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple and len(get_args(kind)) == 2 and get_args(kind)[1] is Ellipsis


def make_converter(*, forbid_extra_keys: bool = True, json_integers: bool) -> cattrs.Converter:
    """A cattrs converter that converts nothing by guess.

    Args:
        forbid_extra_keys: Whether an unknown key is a fault.
        json_integers: Whether ``3.0`` counts as a whole number, as in JSON Schema.
    """
    converter = cattrs.Converter(forbid_extra_keys=forbid_extra_keys)
    converter.register_structure_hook(str, _as_str)
    converter.register_structure_hook(bool, _as_bool)
    converter.register_structure_hook(float, _as_float)
    converter.register_structure_hook(int, _as_json_int if json_integers else _as_strict_int)
    converter.register_structure_hook_func(
        lambda kind: get_origin(kind) is not None and str(get_origin(kind)) == "typing.Literal",
        _as_literal,
    )
    converter.register_structure_hook_factory(attrs.has, _as_class(converter, forbid_extra_keys))
    converter.register_structure_hook_func(_is_mapping, _as_mapping(converter))
    converter.register_structure_hook_func(_is_open_tuple, _as_tuple(converter))
    return converter


_requests = make_converter(json_integers=True)
_answers = make_converter(forbid_extra_keys=False, json_integers=True)


def structure(value: Any, kind: type[T], where: str = "") -> T:
    """Make a record of JSON values that somebody sent; unknown keys are faults.

    Args:
        value: What ``read_json`` gave.
        kind: An attrs class.
        where: Put in front of each path in the message, such as ``rollouts[3]``.

    Raises:
        Invalid: ``details["problems"]`` lists every fault as ``{path, message}``.
    """
    return _structure(_requests, value, kind, where)


def structure_answer(value: Any, kind: type[T]) -> T:
    """Make a record of what the service answered; keys of a newer service are left out."""
    return _structure(_answers, value, kind, "answer")


def structure_page(value: Any) -> RolloutPage:
    """A rollout list, in which a deletion stands as a tombstone."""
    items: list[Rollout | Tombstone] = []
    for item in value["items"]:
        if item.get("deleted"):
            items.append(structure_answer(item, Tombstone))
        else:
            items.append(structure_answer(item, Rollout))
    return RolloutPage(items=tuple(items), cursor=value["cursor"])


def _structure(converter: cattrs.Converter, value: Any, kind: type[T], where: str) -> T:
    if attrs.has(kind) and not isinstance(value, Mapping):
        message = f"must be an object, not {_kind(value)}"
        raise Invalid(f"{where or 'the body'}: {message}")
    try:
        return converter.structure(value, kind)
    except Exception as exc:
        problems = [*problems_of(exc)]
        lines = [f"{_where(where, problem.path)}: {problem.message}" for problem in problems]
        raise Invalid(
            "; ".join(lines),
            details={
                "problems": [
                    {"path": _where(where, p.path), "message": p.message} for p in problems
                ]
            },
        ) from exc


def _where(where: str, path: Iterable[str]) -> str:
    return dotted(path, where) or "the body"


def dotted(path: Iterable[str], start: str = "") -> str:
    """A path as people write it: ``rollouts[3].config.env``."""
    text = start
    for part in path:
        text += part if part.startswith("[") else f".{part}" if text else part
    return text


def problems_of(exc: BaseException, path: tuple[str, ...] = ()) -> Iterable[Problem]:
    """Every fault in what cattrs raised, with the path to it."""
    if isinstance(exc, ClassValidationError):
        noted, other = exc.group_exceptions()
        for inner, note in noted:
            yield from problems_of(inner, (*path, note.name))
        for inner in other:
            yield from problems_of(inner, path)
    elif isinstance(exc, IterableValidationError):
        with_index, rest = exc.group_exceptions()
        for inner, index_note in with_index:
            place = index_note.index
            part = f"[{place}]" if isinstance(place, int) else str(place)
            yield from problems_of(inner, (*path, part))
        for inner in rest:
            yield from problems_of(inner, path)
    elif isinstance(exc, ForbiddenExtraKeysError):
        allowed = [field.name for field in attrs.fields(exc.cl)]
        for key in sorted(exc.extra_fields):
            yield Problem((*path, str(key)), unknown_key(str(key), allowed))
    elif isinstance(exc, KeyError):
        yield Problem(path, f"{exc.args[0]!r} is missing")
    else:
        yield Problem(path, str(exc.args[0]) if exc.args else str(exc))


def unknown_key(key: str, allowed: Iterable[str]) -> str:
    """The sentence for an unknown key, with the nearest known one."""
    names = sorted(allowed)
    near = difflib.get_close_matches(key, names, n=1)
    guess = f", did you mean {near[0]!r}?" if near else ""
    return f"unknown key {key!r}{guess} (allowed: {', '.join(names)})"


def cursor_text(epoch: str, position: int) -> str:
    """An opaque cursor: a store's epoch and a place in its change order."""
    return base64.urlsafe_b64encode(f"{epoch}:{position}".encode()).decode().rstrip("=")


def cursor_position(cursor: str, epoch: str) -> int:
    """The place that a cursor of this epoch names.

    Raises:
        Invalid: It is no cursor.
        CursorExpired: It belongs to another epoch.
    """
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        of_epoch, _, position = base64.urlsafe_b64decode(padded.encode()).decode().rpartition(":")
        if not (position.isascii() and position.isdecimal()):
            raise ValueError("no place")
        place = int(position)
    except ValueError as exc:
        raise Invalid(f"{cursor!r} is no cursor", hint="use one that a list returned") from exc
    if of_epoch != epoch:
        raise CursorExpired(
            "the cursor belongs to another life of the store", hint="list again from the start"
        )
    return place
