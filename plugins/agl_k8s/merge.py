"""Strategic merge: how Kubernetes lays a partial manifest over another.

After the ``patchMergeKey`` tags of Kubernetes' API types (``k8s.io/api/core/v1/types.go``): lists
that have a merge key are merged item by item, all others are replaced.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "schedulingGates": "name",
    "resourceClaims": "name",
    "ownerReferences": "uid",
}
DIRECTIVE = "$patch"
# Their items have one source, and two would be invalid: another takes the first one's place, as
# with Kubernetes' ``$retainKeys``, which its own patches have to ask for.
_ONE_SOURCE = {"env", "volumes"}


def merge(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Lay ``patch`` over ``base``; neither is changed.

    A null removes a field; ``$patch: replace`` takes the patch's object as it is, ``$patch:
    delete`` removes the object, or the list's item of that key.
    """
    if patch.get(DIRECTIVE) == "replace":
        return _without_directives(patch)
    merged = dict(base)
    for name, value in patch.items():
        if name == DIRECTIVE:
            continue
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, Mapping):
            if value.get(DIRECTIVE) == "delete":
                merged.pop(name, None)
                continue
            below = merged.get(name)
            merged[name] = merge(below if isinstance(below, Mapping) else {}, value)
        elif name in MERGE_KEYS and _are_objects(value):
            below = merged.get(name, ())
            merged[name] = _merge_lists(below if _are_objects(below) else (), value, name)
        else:
            merged[name] = copy.deepcopy(value)
    return merged


def _merge_lists(
    base: Sequence[Mapping[str, Any]], patch: Sequence[Mapping[str, Any]], name: str
) -> list[dict[str, Any]]:
    key = MERGE_KEYS[name]
    if any(item.get(DIRECTIVE) == "replace" for item in patch):
        return [_without_directives(i) for i in patch if i.get(DIRECTIVE) != "replace"]
    items: dict[Any, dict[str, Any]] = {}
    for place, item in enumerate(base):
        items[_name_of(item, key) or ("unnamed", place)] = dict(item)
    for place, item in enumerate(patch):
        known = _name_of(item, key) or ("new", place)
        if item.get(DIRECTIVE) == "delete":
            items.pop(known, None)
            continue
        below = items.get(known, {})
        sources = {field for field, value in item.items() if value is not None} - {key, DIRECTIVE}
        if name in _ONE_SOURCE and sources:
            below = {field: below[field] for field in below if field == key or field in sources}
        items[known] = merge(below, item)
    return list(items.values())


def _name_of(item: Mapping[str, Any], key: str) -> Any:
    found = item.get(key)
    return found if isinstance(found, str | int) else None


def _without_directives(value: Mapping[str, Any]) -> dict[str, Any]:
    return merge({}, {name: item for name, item in value.items() if name != DIRECTIVE})


def _are_objects(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return is_list and all(isinstance(item, Mapping) for item in value)
