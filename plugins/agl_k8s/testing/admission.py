"""What the API server refuses to a well-formed object: quotas, and namespaces on their way out."""

from __future__ import annotations

from agl_k8s.testing.kinds import Kind, Object, kind_of
from agl_k8s.testing.objects import ObjectStore


def admit(store: ObjectStore, resource: str, namespace: str, item: Object) -> None:
    """Check a new object against what is in its namespace.

    Raises:
        ApiStatus: 404, no such namespace; 403, it is being deleted, or a quota is used up.
    """
    kind = kind_of(resource)
    if not kind.is_namespaced:
        return
    name = item["metadata"]["name"]
    home = store.peek(("namespaces", "", namespace))
    if home is None:
        raise kind_of("namespaces").not_found(namespace)
    if "deletionTimestamp" in home["metadata"]:
        why = (
            f"unable to create new content in namespace {namespace} because it is being terminated"
        )
        cause = {
            "reason": "NamespaceTerminating",
            "message": f"namespace {namespace} is being terminated",
            "field": "metadata.namespace",
        }
        raise kind.forbidden(name, why, [cause])
    if resource != "resourcequotas":
        check_quotas(store, kind, namespace, name)


def check_quotas(store: ObjectStore, kind: Kind, namespace: str, name: str) -> None:
    """Check that the quotas of a namespace leave room for one object more.

    Those that count objects are known: ``count/jobs.batch``, ``count/pods``, ``pods`` and such.
    As in a real cluster, pods that have ended do not count for ``pods``; finished Jobs do count.

    Raises:
        ApiStatus: 403, no room.
    """
    refusal = quota_refusal(store, kind, namespace)
    if refusal is not None:
        raise kind.forbidden(name, refusal)


def quota_refusal(store: ObjectStore, kind: Kind, namespace: str) -> str | None:
    """Why a quota leaves no room for one object more, or None."""
    for quota in store.list("resourcequotas", namespace):
        hard = (quota.get("spec") or {}).get("hard") or {}
        for counted in (f"count/{kind.qualified}", kind.resource):
            if counted not in hard:
                continue
            used = _used(store, kind, namespace, counts_all=counted.startswith("count/"))
            if used + 1 > int(hard[counted]):
                return (
                    f"exceeded quota: {quota['metadata']['name']}, requested: {counted}=1, "
                    f"used: {counted}={used}, limited: {counted}={hard[counted]}"
                )
    return None


def _used(store: ObjectStore, kind: Kind, namespace: str, *, counts_all: bool) -> int:
    items = store.list(kind.resource, namespace)
    if counts_all or kind.resource != "pods":
        return len(items)
    ended = ("Succeeded", "Failed")
    return sum((item.get("status") or {}).get("phase") not in ended for item in items)
