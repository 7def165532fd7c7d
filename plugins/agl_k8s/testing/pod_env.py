"""The variables of a container, and what Kubernetes makes of ``$`` in them."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping

from agl_k8s.testing.kinds import Object
from agl_k8s.testing.objects import ObjectStore

_REFERENCE = re.compile(r"\$(?:\$|\(([^()]*)\))")
_KEYED = re.compile(r"^metadata\.(labels|annotations)\['(.+)'\]$")


class CannotConfigureError(Exception):
    """Something that a container refers to is missing; it may come yet."""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Put variables in the place of ``$(NAME)``; ``$$`` is a ``$``, and the unknown stays."""

    def value(found: re.Match[str]) -> str:
        if found[1] is None:
            return "$"
        return variables.get(found[1], found[0])

    return _REFERENCE.sub(value, text)


def variables_of(store: ObjectStore, pod: Object, container: Object) -> dict[str, str]:
    """The variables that a container's ``env`` sets, in order: each sees those above it.

    Raises:
        CannotConfigureError: A Secret or ConfigMap, or a key of one, is missing.
    """
    found: dict[str, str] = {}
    for entry in container.get("env") or ():
        source = entry.get("valueFrom")
        if source is None:
            found[entry["name"]] = expand(str(entry.get("value") or ""), found)
            continue
        value = _fetch(store, pod, source)
        if value is not None:
            found[entry["name"]] = value
    return found


def command_of(container: Object, variables: Mapping[str, str]) -> list[str]:
    """What is run; the image's own command is taken to be ``sh``."""
    words = [*(container.get("command") or ("sh",)), *(container.get("args") or ())]
    return [expand(str(word), variables) for word in words]


def image_variables(pod: Object, home: str) -> dict[str, str]:
    """What the image and the runtime set, before the container's own."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOSTNAME": pod["metadata"]["name"],
        "HOME": home,
    }


def _fetch(store: ObjectStore, pod: Object, source: Object) -> str | None:
    if "fieldRef" in source:
        return _field(pod, source["fieldRef"]["fieldPath"])
    for part, resource, word in (
        ("secretKeyRef", "secrets", "Secret"),
        ("configMapKeyRef", "configmaps", "ConfigMap"),
    ):
        if part not in source:
            continue
        wanted, namespace = source[part], pod["metadata"]["namespace"]
        item = store.peek((resource, namespace, wanted["name"]))
        data = None if item is None else (item.get("data") or {}).get(wanted["key"])
        if data is None and wanted.get("optional"):
            return None
        if item is None:
            raise CannotConfigureError(f'{word.lower()} "{wanted["name"]}" not found')
        if data is None:
            place = f"{namespace}/{wanted['name']}"
            raise CannotConfigureError(f"couldn't find key {wanted['key']} in {word} {place}")
        return base64.b64decode(data).decode() if resource == "secrets" else str(data)
    return None


def _field(pod: Object, path: str) -> str:
    if keyed := _KEYED.match(path):
        return str((pod["metadata"].get(keyed[1]) or {}).get(keyed[2], ""))
    value: object = pod
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return "" if value is None else str(value)
