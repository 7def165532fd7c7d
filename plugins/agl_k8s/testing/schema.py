"""Which fields objects have, and of which types: read from the models of the client."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from agl_k8s.testing.kinds import ApiStatus, Kind, Object

_MODELS = {
    "Event": "CoreV1Event",
    "Status": "V1Status",
}
_WRAPPED = re.compile(r"^(?P<outer>list|dict)\[(?:str, ?)?(?P<inner>.+)\]$", re.IGNORECASE)
_GO_TYPES = {"int": "int32", "bool": "bool", "str": "string"}
# Maps of quantities, which may be written as numbers.
_QUANTITIES = {"limits", "requests", "overhead", "capacity", "allocatable", "hard", "used"} | {
    f"{word}{suffix}" for word in ("default", "max", "min") for suffix in ("", "Request")
}


class Reading:
    """What was found while an object was read.

    Attributes:
        unknown: The paths of fields that the kind does not have.
    """

    def __init__(self, kind_name: str, version: str) -> None:
        self.unknown: list[str] = []
        self._places: list[tuple[Object, str]] = []
        self._what = f'{kind_name} in version "{version}" cannot be handled as a {kind_name}'

    def read(self, value: Any, type_name: str, path: str) -> None:
        """Check a value, and all within it.

        Raises:
            ApiStatus: 400, it is of another type.
        """
        if value is None or type_name in ("object", "datetime"):
            return
        if type_name in _GO_TYPES:
            self._read_scalar(value, type_name, path)
            return
        wrapped = _WRAPPED.match(type_name)
        if wrapped is None:
            self._read_object(value, type_name, path)
        elif wrapped["outer"].lower() == "list":
            if not isinstance(value, list):
                raise self._mismatch(value, path, "slice")
            for place, item in enumerate(value):
                self.read(item, wrapped["inner"], f"{path}[{place}]")
        else:
            if not isinstance(value, dict):
                raise self._mismatch(value, path, "map")
            is_free = path.rsplit(".", 1)[-1] in _QUANTITIES or wrapped["inner"] == "bytes"
            for key, item in value.items():
                if not (is_free and isinstance(item, (str, int, float))):
                    self.read(item, wrapped["inner"], f"{path}.{key}")

    def refusal(self) -> ApiStatus:
        """The answer to an object with unknown fields, where they are refused."""
        fields = ", ".join(f'unknown field "{path}"' for path in self.unknown)
        return ApiStatus(400, "BadRequest", f"{self._what}: strict decoding error: {fields}")

    def warnings(self) -> list[str]:
        """The values of ``Warning`` headers, where they are let through."""
        return [f'299 - "unknown field \\"{path}\\""' for path in self.unknown]

    def drop_unknown(self) -> None:
        """Take the unknown fields out of what was read, as they are not stored."""
        for value, name in self._places:
            del value[name]

    # ---------------------------------------------------------------------------------------------

    def _read_object(self, value: Any, model: str, path: str) -> None:
        fields = _fields_of(model)
        if fields is None:
            return
        if not isinstance(value, dict):
            raise self._mismatch(value, path, model)
        for name, item in value.items():
            below = f"{path}.{name}" if path else name
            if name in fields:
                self.read(item, fields[name], below)
            else:
                self.unknown.append(below)
                self._places.append((value, name))

    def _read_scalar(self, value: Any, type_name: str, path: str) -> None:
        fits = {
            "int": isinstance(value, int) and not isinstance(value, bool),
            "bool": isinstance(value, bool),
            "str": isinstance(value, str),
        }[type_name]
        # Ports and quantities are typed as text by the client, and may be numbers.
        is_free = type_name == "str" and path.rsplit(".", 1)[-1] in ("targetPort", "sizeLimit")
        if not fits and not is_free:
            raise self._mismatch(value, path, _GO_TYPES[type_name])

    def _mismatch(self, value: Any, path: str, wanted: str) -> ApiStatus:
        found = {bool: "bool", int: "number", float: "number", str: "string", list: "array"}
        message = (
            f"{self._what}: json: cannot unmarshal {found.get(type(value), 'object')} "
            f"into Go struct field .{path} of type {wanted}"
        )
        return ApiStatus(400, "BadRequest", message)


def read_object(kind: Kind, body: Any) -> Reading:
    """Check the fields and types of an object that was sent.

    Raises:
        ApiStatus: 400, it is no object, of another kind, or a field is of another type.
    """
    reading = Reading(kind.kind, kind.version)
    if not isinstance(body, dict):
        message = "couldn't get version/kind; json parse error: the body is no object"
        raise ApiStatus(400, "BadRequest", message)
    for part, wanted in (("apiVersion", kind.api_version), ("kind", kind.kind)):
        if body.get(part, wanted) != wanted:
            message = (
                f"the {part} in the data ({body[part]}) does not match "
                f"the expected {part} ({wanted})"
            )
            raise ApiStatus(400, "BadRequest", message)
    reading.read(body, _MODELS.get(kind.kind, f"V1{kind.kind}"), "")
    return reading


@cache
def _fields_of(model: str) -> dict[str, str] | None:
    """The types of a model's fields by their names in JSON; None if there is no such model."""
    # Half a second, and 50 MB: only where a server of this kind runs.
    from kubernetes.client import models

    found = getattr(models, model, None)
    if found is None:
        return None
    types: dict[str, str] = found.openapi_types
    return {found.attribute_map[name]: type_name for name, type_name in types.items()}
