"""The kinds of objects that the fake cluster keeps, and the errors it answers with."""

from __future__ import annotations

from typing import Any

from attrs import frozen

Object = dict[str, Any]
Objects = list[Object]


class ApiStatus(Exception):
    """What the API server answers where it refuses, or has no object to give.

    Attributes:
        code: The HTTP status.
        reason: The server's word, such as ``AlreadyExists``.
        message: Its text.
        details: Of the ``Status`` object, such as name, kind and causes.
        metadata: Of the ``Status`` object; an expired list has a ``continue`` there.
    """

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        details: Object | None = None,
        *,
        metadata: Object | None = None,
    ) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details
        self.metadata = metadata or {}

    def to_object(self) -> Object:
        """The ``Status`` object that is sent."""
        found: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": self.metadata,
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
        }
        if self.details is not None:
            found["details"] = self.details
        return found | {"code": self.code}


@frozen
class Kind:
    """One resource of the API."""

    resource: str
    """The plural of the paths."""
    kind: str
    group: str = ""
    version: str = "v1"
    is_namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """As messages call it: ``jobs.batch``."""
        return f"{self.resource}.{self.group}" if self.group else self.resource

    @property
    def qualified_kind(self) -> str:
        """As messages about invalid objects call it: ``Job.batch``."""
        return f"{self.kind}.{self.group}" if self.group else self.kind

    def details(self, name: str) -> Object:
        """The ``details`` of a status about the object of a name."""
        group = {"group": self.group} if self.group else {}
        return {"name": name, **group, "kind": self.resource}

    def not_found(self, name: str) -> ApiStatus:
        message = f'{self.qualified} "{name}" not found'
        return ApiStatus(404, "NotFound", message, self.details(name))

    def exists(self, name: str, *, is_being_deleted: bool) -> ApiStatus:
        message = f'{self.qualified} "{name}" already exists'
        if is_being_deleted:
            message = f"object is being deleted: {message}"
        return ApiStatus(409, "AlreadyExists", message, self.details(name))

    def conflict(self, name: str, why: str) -> ApiStatus:
        message = f'Operation cannot be fulfilled on {self.qualified} "{name}": {why}'
        return ApiStatus(409, "Conflict", message, self.details(name))

    def forbidden(self, name: str, why: str, causes: Objects | None = None) -> ApiStatus:
        named = f' "{name}"' if name else ""
        details = self.details(name) | ({"causes": causes} if causes else {})
        return ApiStatus(403, "Forbidden", f"{self.qualified}{named} is forbidden: {why}", details)


KINDS = {
    kind.resource: kind
    for kind in (
        Kind("jobs", "Job", "batch"),
        Kind("pods", "Pod"),
        Kind("secrets", "Secret"),
        Kind("configmaps", "ConfigMap"),
        Kind("events", "Event"),
        Kind("services", "Service"),
        Kind("serviceaccounts", "ServiceAccount"),
        Kind("resourcequotas", "ResourceQuota"),
        Kind("limitranges", "LimitRange"),
        Kind("leases", "Lease", "coordination.k8s.io"),
        Kind("namespaces", "Namespace", is_namespaced=False),
        Kind("nodes", "Node", is_namespaced=False),
        Kind("priorityclasses", "PriorityClass", "scheduling.k8s.io", is_namespaced=False),
    )
}


def kind_of(resource: str) -> Kind:
    """The kind of a resource.

    Raises:
        ApiStatus: 404, in the words of a server that does not know the path.
    """
    kind = KINDS.get(resource)
    if kind is None:
        raise ApiStatus(404, "NotFound", "the server could not find the requested resource", {})
    return kind
