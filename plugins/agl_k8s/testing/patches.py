"""JSON merge patch and strategic merge patch, as far as the kinds here need them."""

from __future__ import annotations

from typing import Any

from agl_k8s.testing.kinds import ApiStatus, Object
from agl_k8s.testing.objects import copied

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"

# By which field the items of a list are the same one; other lists are replaced.
_MERGE_KEYS = {
    "conditions": "type",
    "containers": "name",
    "env": "name",
    "ephemeralContainers": "name",
    "hostAliases": "ip",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "ownerReferences": "uid",
    "podIPs": "ip",
    "ports": "containerPort",
    "secrets": "name",
    "taints": "key",
    "topologySpreadConstraints": "topologyKey",
    "volumeDevices": "devicePath",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
_SETS = {"finalizers"}
_DELETE_ITEMS = "$deleteFromPrimitiveList/"


def patched(item: Object, patch: Any, content_type: str) -> Object:
    """The object that a patch makes of another; neither is changed.

    Raises:
        ApiStatus: 400, the patch is no object; 415, of a kind that is not known here.
    """
    if content_type not in (MERGE, STRATEGIC):
        message = (
            "the body of the request was in an unknown format - accepted media types include: "
            f"{MERGE}, {STRATEGIC}"
        )
        raise ApiStatus(415, "UnsupportedMediaType", message)
    if not isinstance(patch, dict):
        raise ApiStatus(400, "BadRequest", "the patch is no object")
    result = copied(item)
    _merge(result, copied(patch), is_strategic=content_type == STRATEGIC)
    return result


def _merge(target: Object, patch: Object, *, is_strategic: bool) -> None:
    for name, value in patch.items():
        if is_strategic and name.startswith("$"):
            _drop_items(target, name, value)
        elif value is None:
            target.pop(name, None)
        elif isinstance(value, dict):
            if is_strategic and value.get("$patch") == "delete":
                target.pop(name, None)
                continue
            present = target.get(name)
            is_fresh = not isinstance(present, dict) or (
                is_strategic and value.get("$patch") == "replace"
            )
            below: Object = {} if is_fresh else target[name]
            target[name] = below
            _merge(below, value, is_strategic=is_strategic)
        elif isinstance(value, list) and is_strategic:
            target[name] = _merged_list(name, target.get(name) or [], value)
        else:
            target[name] = value


def _merged_list(name: str, present: list[Any], patch: list[Any]) -> list[Any]:
    if name in _SETS:
        return present + [value for value in patch if value not in present]
    key = _MERGE_KEYS.get(name)
    if key is None or any(not isinstance(item, dict) for item in patch):
        return patch
    is_replaced = any(item.get("$patch") == "replace" for item in patch)
    result = [] if is_replaced else list(present)
    for item in patch:
        if item.get("$patch") == "replace":
            continue
        same = next((i for i, old in enumerate(result) if old.get(key) == item.get(key)), None)
        if item.get("$patch") == "delete":
            if same is not None:
                del result[same]
        elif same is not None:
            _merge(result[same], item, is_strategic=True)
        else:
            fresh: Object = {}
            _merge(fresh, item, is_strategic=True)
            # What is new comes first, as the server does it.
            result.insert(0, fresh)
    return result


def _drop_items(target: Object, name: str, values: Any) -> None:
    """Take values from a list of texts; the other directives only order or trim."""
    if name.startswith(_DELETE_ITEMS):
        below = name[len(_DELETE_ITEMS) :]
        target[below] = [value for value in target.get(below) or () if value not in values]
