"""Where kinds of objects live in the API, and what lists and watches of them give."""

from __future__ import annotations

from typing import Any, Literal, get_args
from urllib.parse import quote

from attrs import frozen

from agl_core.errors import BadJson
from agl_core.wire import read_json
from agl_k8s.errors import error_of_status, no_answer

_CORE = "/api/v1"
_AUTHORIZATION = "/apis/authorization.k8s.io/v1"
# Where each kind lives, and whether in a namespace.
_RESOURCES: dict[str, tuple[str, bool]] = {
    "jobs": ("/apis/batch/v1", True),
    "pods": (_CORE, True),
    "secrets": (_CORE, True),
    "events": (_CORE, True),
    "resourcequotas": (_CORE, True),
    "limitranges": (_CORE, True),
    "serviceaccounts": (_CORE, True),
    "leases": ("/apis/coordination.k8s.io/v1", True),
    "namespaces": (_CORE, False),
    "nodes": (_CORE, False),
    "priorityclasses": ("/apis/scheduling.k8s.io/v1", False),
    "selfsubjectaccessreviews": (_AUTHORIZATION, False),
    "selfsubjectrulesreviews": (_AUTHORIZATION, False),
}

EventType = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]


@frozen
class Listing:
    """All objects that matched at one moment."""

    items: list[dict[str, Any]]
    resource_version: str
    """From which a watch goes on."""


@frozen
class WatchEvent:
    """One change; a bookmark's object has a resource version and nothing else."""

    type: EventType
    object: dict[str, Any]


def path_of(resource: str, namespace: str, name: str | None = None) -> str:
    """The path of a collection, or of one object in it."""
    base, is_namespaced = _RESOURCES[resource]
    parts = [resource] if name is None else [resource, name]
    if is_namespaced:
        parts = ["namespaces", namespace, *parts]
    return "/".join([base, *(quote(part, safe="") for part in parts)])


def items_of(page: dict[str, Any], what: str) -> list[dict[str, Any]]:
    """The objects of a list.

    Raises:
        KubeError: It is none.
    """
    found = page.get("items")
    if not isinstance(page.get("metadata"), dict) or not isinstance(found, list | None):
        raise no_answer(what, "NoList", "the answer is no list")
    # Objects of a list do not say what they are, those of a watch do.
    kind = str(page.get("kind", "")).removesuffix("List")
    told = {"apiVersion": page.get("apiVersion"), "kind": kind}
    return [told | item for item in found or ()]


def event_of(line: bytes, what: str) -> WatchEvent:
    """The event of a line of a watch.

    Raises:
        KubeError: It is an error, such as that of an expired version, or no event at all.
    """
    try:
        found = read_json(line)
    except BadJson as exc:
        text = " ".join(line[:200].decode(errors="replace").split())
        raise no_answer(what, "NoEvent", f"a line is no event, or was cut: {text}") from exc
    changed = found.get("object") if isinstance(found, dict) else None
    if not isinstance(changed, dict):
        raise no_answer(what, "NoEvent", "a line is no event")
    if found.get("type") == "ERROR":
        raise error_of_status(changed, 500)
    if found.get("type") not in get_args(EventType) or not isinstance(
        changed.get("metadata"), dict
    ):
        raise no_answer(what, "NoEvent", "a line is no event of an object")
    return WatchEvent(found["type"], changed)
