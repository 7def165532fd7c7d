"""Label and field selectors, as the API server reads them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from agl_k8s.testing.kinds import ApiStatus, Object

_SET = re.compile(r"^(?P<key>\S+)\s+(?P<word>in|notin)\s*\((?P<values>[^()]*)\)$")
_EQUAL = re.compile(r"^(?P<key>[^\s=!,]+)\s*(?P<word>==|=|!=)\s*(?P<value>[^\s=!,]*)$")
_EXISTS = re.compile(r"^(?P<not>!?)\s*(?P<key>[^\s=!,()]+)$")

# What can be selected by besides name and namespace; all else is an error.
_FIELDS = {
    "pods": {
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.schedulerName",
        "spec.serviceAccountName",
        "spec.hostNetwork",
        "status.phase",
        "status.podIP",
        "status.nominatedNodeName",
    },
    "events": {
        "involvedObject.kind",
        "involvedObject.namespace",
        "involvedObject.name",
        "involvedObject.uid",
        "involvedObject.apiVersion",
        "involvedObject.resourceVersion",
        "involvedObject.fieldPath",
        "reason",
        "reportingComponent",
        "source",
        "type",
    },
    "jobs": {"status.successful"},
    "secrets": {"type"},
    "namespaces": {"status.phase"},
    "nodes": {"spec.unschedulable"},
}


class LabelSelector:
    """A selector such as ``a=b,c in (d,e),!f``; None and an empty text select all.

    Raises:
        ApiStatus: 400, it cannot be read.
    """

    def __init__(self, text: str | None) -> None:
        parts = [part.strip() for part in re.split(r",(?![^(]*\))", text or "")]
        self._tests = [_label_test(part) for part in parts if part]

    @property
    def is_empty(self) -> bool:
        return not self._tests

    def matches(self, item: Object) -> bool:
        labels = item["metadata"].get("labels") or {}
        return all(test(labels) for test in self._tests)


class FieldSelector:
    """A selector such as ``status.phase=Running,metadata.name!=x``.

    Raises:
        ApiStatus: 400, it cannot be read, or names a field that cannot be selected by.
    """

    def __init__(self, resource: str, text: str | None) -> None:
        self._tests: list[tuple[str, bool, str]] = []
        for part in filter(None, (text or "").split(",")):
            found = _EQUAL.match(part.strip())
            if found is None:
                message = f"unable to parse requirement: invalid selector: '{part}'"
                raise ApiStatus(400, "BadRequest", message)
            known = {"metadata.name", "metadata.namespace"} | _FIELDS.get(resource, set())
            if found["key"] not in known:
                message = f"field label not supported: {found['key']}"
                raise ApiStatus(400, "BadRequest", message)
            self._tests.append((found["key"], found["word"] != "!=", found["value"]))

    @property
    def is_empty(self) -> bool:
        return not self._tests

    def matches(self, item: Object) -> bool:
        return all((_field(item, path) == value) is equal for path, equal, value in self._tests)


def _label_test(part: str) -> Callable[[dict[str, str]], bool]:
    if found := _SET.match(part):
        key, values = found["key"], {value.strip() for value in found["values"].split(",")}
        if found["word"] == "in":
            return lambda labels: labels.get(key) in values
        return lambda labels: labels.get(key) not in values
    if found := _EQUAL.match(part):
        key, value = found["key"], found["value"]
        if found["word"] == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    if found := _EXISTS.match(part):
        key, is_wanted = found["key"], not found["not"]
        return lambda labels: (key in labels) is is_wanted
    message = f"unable to parse requirement: found '{part}', expected: an operator or a key"
    raise ApiStatus(400, "BadRequest", message)


def _field(item: Object, path: str) -> str:
    """A field as text; what is missing is empty."""
    if path == "status.successful":
        return str((item.get("status") or {}).get("succeeded", 0))
    if path == "source":
        return str((item.get("source") or {}).get("component", ""))
    value: Any = item
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)
