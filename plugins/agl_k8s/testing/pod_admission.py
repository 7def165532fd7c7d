"""What keeps a controller from creating a pod, in the words of the API server."""

from __future__ import annotations

import re
from collections.abc import Iterator

from agl_k8s.testing.admission import admit
from agl_k8s.testing.kinds import Object, kind_of
from agl_k8s.testing.objects import ObjectStore

_UNITS = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_QUANTITY = re.compile(r"^([0-9.]+)([a-zA-Z]*)$")


def admit_pod(store: ObjectStore, pod: Object) -> None:
    """Check a new pod against what is in its namespace.

    Looked at are service accounts (``default`` always exists), priority classes, the largest
    values of limit ranges, quotas that count pods, and quotas that ask for resources.

    Raises:
        ApiStatus: 403.
    """
    metadata, spec = pod["metadata"], pod["spec"]
    namespace = metadata["namespace"]
    why = (
        _missing_account(store, namespace, spec)
        or _missing_priority(store, spec)
        or next(_over_limit(store, namespace, spec), None)
        or next(_unspecified(store, namespace, spec), None)
    )
    if why is not None:
        raise kind_of("pods").forbidden(metadata["name"], why)
    admit(store, "pods", namespace, pod)


def quantity(text: str | float) -> float:
    """A number such as ``500m`` or ``1Gi``."""
    found = _QUANTITY.match(str(text))
    if found is None:
        raise ValueError(f"no quantity: {text!r}")
    return float(found[1]) * _UNITS.get(found[2], 1.0)


def _missing_account(store: ObjectStore, namespace: str, spec: Object) -> str | None:
    name = spec.get("serviceAccountName") or "default"
    if name == "default" or store.peek(("serviceaccounts", namespace, name)) is not None:
        return None
    return f'error looking up service account {namespace}/{name}: serviceaccount "{name}" not found'


def _missing_priority(store: ObjectStore, spec: Object) -> str | None:
    name = spec.get("priorityClassName")
    if not name or name.startswith("system-"):
        return None
    if store.peek(("priorityclasses", "", name)) is not None:
        return None
    return f"no PriorityClass with name {name} was found"


def _over_limit(store: ObjectStore, namespace: str, spec: Object) -> Iterator[str]:
    for item in store.list("limitranges", namespace):
        for limit in item["spec"].get("limits") or ():
            if limit.get("type") != "Container":
                continue
            for resource, largest in (limit.get("max") or {}).items():
                for container in spec["containers"]:
                    limits = (container.get("resources") or {}).get("limits") or {}
                    wanted = limits.get(resource)
                    if wanted is not None and quantity(wanted) > quantity(largest):
                        yield (
                            f"maximum {resource} usage per Container is {largest}, "
                            f"but limit is {wanted}"
                        )


def _unspecified(store: ObjectStore, namespace: str, spec: Object) -> Iterator[str]:
    for quota in store.list("resourcequotas", namespace):
        missing = []
        for name in sorted((quota.get("spec") or {}).get("hard") or {}):
            group, _, resource = name.rpartition(".")
            if group not in ("requests", "limits") or resource not in ("cpu", "memory"):
                continue
            lacking = [
                container["name"]
                for container in spec["containers"]
                if resource not in ((container.get("resources") or {}).get(group) or {})
            ]
            if lacking:
                missing.append(f"{name} for: {','.join(lacking)}")
        if missing:
            yield f"failed quota: {quota['metadata']['name']}: must specify {'; '.join(missing)}"
