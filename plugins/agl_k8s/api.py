"""The Kubernetes API as the runner needs it: raw objects, whole lists, watches that end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from agl_core.clock import Clock
from agl_k8s.credentials import SERVICE_ACCOUNT, load_access
from agl_k8s.errors import KubeError, kind_of
from agl_k8s.resources import Listing, WatchEvent, event_of, items_of, path_of
from agl_k8s.transport import REQUEST_SECONDS, Transport, lines_of

if TYPE_CHECKING:
    from agl_k8s.config import K8sConfig

PAGE_ITEMS = 500
LIST_TRIES = 3
# A whole log may be tens of megabytes.
LOG_SECONDS = 300.0
# The server ends a watch by then, and sends a bookmark every minute.
WATCH_SECONDS = 300.0
IDLE_SECONDS = 130.0

# An answer of 200 that is no log, of a container whose log file is gone.
NO_LOG = b"unable to retrieve container logs for "

Propagation = Literal["Background", "Foreground"]


class KubeApi:
    """Calls of the API server in one namespace; one per process, which shares its connections.

    Every method raises ``KubeError``; entering raises ``ConfigError``.

    Args:
        config: Says which cluster, and which namespace.
        clock: Waits where the server is busy.
        service_account: The folder of a pod's own credentials.
        request_seconds: How long any request may take that is no watch and no log.
    """

    def __init__(
        self,
        config: K8sConfig,
        clock: Clock,
        *,
        service_account: Path = SERVICE_ACCOUNT,
        request_seconds: float = REQUEST_SECONDS,
    ) -> None:
        self.namespace = ""
        self._config = config
        self._clock = clock
        self._service_account = service_account
        self._request_seconds = request_seconds
        self._transport: Transport | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> KubeApi:
        access = await load_access(self._config, self._clock, service_account=self._service_account)
        self.namespace = access.namespace
        transport = Transport(access, self._clock, request_seconds=self._request_seconds)
        self._transport = await self._stack.enter_async_context(transport)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._transport = None
        await self._stack.aclose()

    async def create(
        self,
        resource: str,
        body: dict[str, Any],
        *,
        name: str | None = None,
        subresource: str | None = None,
        is_dry_run: bool = False,
    ) -> dict[str, Any]:
        """Create an object, or a ``subresource`` of the one called ``name`` (an eviction, say).

        A dry run is all but the creation: the server says whether it would take the object.

        It is tried once: a ``busy`` server says when to ask again.

        Unknown fields of a Job are refused. Where the outcome is unknown (``unreachable``), a get
        by name tells.
        """
        query = {"fieldValidation": "Strict"} if resource == "jobs" else {}
        if is_dry_run:
            query["dryRun"] = "All"
        path = self._path(resource, name) + (f"/{subresource}" if subresource else "")
        return await self._open_transport().json(
            "POST", path, query=query or None, body=body, is_repeatable=False
        )

    async def server_version(self) -> str:
        """Of the API server, such as ``v1.36.2``."""
        found = await self._open_transport().json("GET", "/version")
        return str(found.get("gitVersion") or "unknown")

    async def get(self, resource: str, name: str) -> dict[str, Any]:
        return await self._open_transport().json("GET", self._path(resource, name))

    async def list(
        self,
        resource: str,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
    ) -> Listing:
        """All objects, page by page; begun anew where its snapshot expires on the way."""
        for attempt in range(1, LIST_TRIES + 1):
            try:
                return await self._list_once(resource, _selecting(label_selector, field_selector))
            except KubeError as exc:
                # The server then offers the rest as of now, which would not be one moment.
                if kind_of(exc) != "expired" or attempt == LIST_TRIES:
                    raise
        raise AssertionError("the last try returns or raises")

    async def replace(self, resource: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Write an object; its ``resourceVersion`` must be the present one (else ``conflict``)."""
        return await self._open_transport().json("PUT", self._path(resource, name), body=body)

    async def delete(
        self,
        resource: str,
        name: str,
        *,
        propagation: Propagation | None = None,
        uid: str | None = None,
        grace_seconds: int | None = None,
    ) -> bool:
        """Ask for an object's deletion.

        Args:
            resource: Its plural.
            name: Its name.
            propagation: What becomes of what it owns. The pods of a Job would be orphaned without
                a policy, so a Job's is ``Background`` where none is given.
            uid: Delete only the object of this uid; another is a ``conflict``.
            grace_seconds: Of a pod; 0 takes it from the API though its node may still run it.

        Returns:
            Whether it was there.
        """
        if propagation is None and resource == "jobs":
            propagation = "Background"
        options: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if propagation is not None:
            options["propagationPolicy"] = propagation
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        try:
            await self._open_transport().json("DELETE", self._path(resource, name), body=options)
        except KubeError as exc:
            if kind_of(exc) != "not_found":
                raise
            return False
        return True

    async def watch(
        self,
        resource: str,
        *,
        resource_version: str,
        label_selector: str | None = None,
        timeout_seconds: float = WATCH_SECONDS,
        idle_seconds: float = IDLE_SECONDS,
    ) -> AsyncGenerator[WatchEvent, None]:
        """Changes after a version, until the server ends the watch.

        Args:
            resource: Its plural.
            resource_version: Of a listing, an event or a bookmark.
            label_selector: As in ``list``.
            timeout_seconds: After which the server ends it.
            idle_seconds: The longest silence; afterwards ``unreachable`` with the reason ``Idle``.

        Raises:
            KubeError: ``expired``: list again. Else it broke off: go on from the last version.
        """
        path = self._path(resource)
        what = f"watch of {resource}"
        query = _selecting(label_selector, None) | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(max(1, round(timeout_seconds))),
        }
        async with self._open_transport().stream(
            path,
            query=query,
            total_seconds=timeout_seconds + idle_seconds,
            idle_seconds=idle_seconds,
        ) as pieces:
            async for line in lines_of(pieces, what):
                yield event_of(line, what)

    async def log_tail(
        self, pod: str, container: str, *, lines: int, size_bytes: int
    ) -> bytes | None:
        """The end of a container's log; None where there is no log, or not any more."""
        # limitBytes would cut the end, so the end is what is kept of what is read.
        tail = bytearray()
        try:
            async with self._log(
                pod, {"container": container, "tailLines": str(lines)}, total=REQUEST_SECONDS
            ) as pieces:
                async for piece in pieces:
                    tail += piece
                    if len(tail) > 2 * size_bytes:
                        del tail[: len(tail) - size_bytes]
        except KubeError as exc:
            if kind_of(exc) == "not_found" or (
                exc.status == 400 and "is waiting to start" in exc.message
            ):
                return None
            raise
        if tail.startswith(NO_LOG):
            return None
        return bytes(tail[max(0, len(tail) - size_bytes) :])

    async def read_log(
        self,
        pod: str,
        container: str,
        *,
        tail_lines: int | None = None,
        since_seconds: int | None = None,
        follow: bool = False,
        idle_seconds: float | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """A container's log in pieces, from its beginning where nothing else is said.

        Args:
            pod: Its name.
            container: One that has started; another is ``bad_request``.
            tail_lines: Only the last ones.
            since_seconds: Only what was written since then.
            follow: Go on with what is written until the container ends.
            idle_seconds: The longest silence; afterwards ``unreachable`` with the reason ``Idle``.
        """
        query = {"container": container}
        if tail_lines is not None:
            query["tailLines"] = str(tail_lines)
        if since_seconds is not None:
            query["sinceSeconds"] = str(since_seconds)
        if follow:
            query["follow"] = "true"
        total = None if follow else LOG_SECONDS
        async with self._log(pod, query, total=total, idle=idle_seconds) as pieces:
            async for piece in pieces:
                yield piece

    async def review_access(
        self, verb: str, group: str, resource: str, subresource: str = ""
    ) -> bool:
        """Whether we may do something in this namespace."""
        attributes = {
            "namespace": self.namespace,
            "verb": verb,
            "group": group,
            "resource": resource,
            "subresource": subresource,
        }
        review = await self._open_transport().json(
            "POST",
            self._path("selfsubjectaccessreviews"),
            body={
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": attributes},
            },
        )
        return bool(review.get("status", {}).get("allowed"))

    # ---------------------------------------------------------------------------------------------

    async def _list_once(self, resource: str, selecting: dict[str, str]) -> Listing:
        items: list[dict[str, Any]] = []
        query = selecting | {"limit": str(PAGE_ITEMS)}
        while True:
            path = self._path(resource)
            page = await self._open_transport().json("GET", path, query=query)
            items += items_of(page, f"GET {path}")
            metadata = page["metadata"]
            if not metadata.get("continue"):
                return Listing(items, str(metadata.get("resourceVersion", "")))
            query = selecting | {"limit": str(PAGE_ITEMS), "continue": metadata["continue"]}

    def _log(
        self,
        pod: str,
        query: dict[str, str],
        *,
        total: float | None,
        idle: float | None = None,
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        path = self._path("pods", pod) + "/log"
        return self._open_transport().stream(
            path, query=query, total_seconds=total, idle_seconds=idle
        )

    def _path(self, resource: str, name: str | None = None) -> str:
        return path_of(resource, self.namespace, name)

    def _open_transport(self) -> Transport:
        assert self._transport is not None, "the API is used inside 'async with'"
        return self._transport


def _selecting(labels: str | None, fields: str | None) -> dict[str, str]:
    query = {"labelSelector": labels, "fieldSelector": fields}
    return {name: value for name, value in query.items() if value}
