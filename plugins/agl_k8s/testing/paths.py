"""What the paths of the API name."""

from __future__ import annotations

from urllib.parse import unquote

from attrs import frozen

from agl_k8s.testing.kinds import KINDS, ApiStatus, Kind

REVIEWS = {
    review.resource: review
    for review in (
        Kind("selfsubjectaccessreviews", "SelfSubjectAccessReview", "authorization.k8s.io"),
        Kind("selfsubjectrulesreviews", "SelfSubjectRulesReview", "authorization.k8s.io"),
    )
}
_SUBRESOURCES = {
    "jobs": {"status"},
    "pods": {"status", "log", "eviction"},
    "nodes": {"status"},
    "namespaces": {"status"},
    "resourcequotas": {"status"},
}


@frozen
class Target:
    """An object, or a collection where there is no name."""

    kind: Kind
    namespace: str | None
    name: str = ""
    subresource: str = ""


def target_of(path: str) -> Target:
    """What a path names.

    Raises:
        ApiStatus: 404, nothing that is known here.
    """
    parts = [unquote(part) for part in path.strip("/").split("/")]
    if parts[:2] == ["api", "v1"]:
        group, rest = "", parts[2:]
    elif parts[0] == "apis" and len(parts) > 3:
        group, version, rest = parts[1], parts[2], parts[3:]
        if version != "v1":
            raise _unknown()
    else:
        raise _unknown()
    namespace = None
    if rest[:1] == ["namespaces"] and len(rest) > 2 and rest[2] not in _SUBRESOURCES["namespaces"]:
        namespace, rest = rest[1], rest[2:]
    if not 1 <= len(rest) <= 3:
        raise _unknown()
    resource, name, subresource = (*rest, "", "")[:3]
    kind = KINDS.get(resource) or REVIEWS.get(resource)
    if kind is None or kind.group != group:
        raise _unknown()
    is_everywhere = namespace is None and not name  # a list of all namespaces
    if resource in KINDS and kind.is_namespaced != (namespace is not None) and not is_everywhere:
        raise _unknown()
    if subresource and subresource not in _SUBRESOURCES.get(resource, ()):
        raise _unknown()
    return Target(kind, namespace, name, subresource)


def _unknown() -> ApiStatus:
    return ApiStatus(404, "NotFound", "the server could not find the requested resource", {})
