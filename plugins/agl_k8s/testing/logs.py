"""Logs of containers, as the API server passes them on from the node."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Protocol

from agl_k8s.testing.kinds import ApiStatus, Object

if TYPE_CHECKING:
    from aiohttp import web


class LogSource(Protocol):
    """Where the text comes from: the node."""

    def read(self, namespace: str, pod: str, container: str) -> bytes | ApiStatus:
        """All that a container has written, or what to answer instead.

        Args:
            namespace: Of the pod.
            pod: Its name.
            container: One that has been started.
        """
        ...

    def follow(self, namespace: str, pod: str, container: str) -> AsyncIterator[bytes]:
        """The same from its beginning, as it is written, until the container ends."""
        ...


class NoLogs:
    """A node whose log files are gone."""

    def read(self, namespace: str, pod: str, container: str) -> bytes | ApiStatus:
        return b"unable to retrieve container logs for containerd://0000000000000000"

    async def follow(self, namespace: str, pod: str, container: str) -> AsyncIterator[bytes]:
        yield b"unable to retrieve container logs for containerd://0000000000000000"


async def answer_log(request: web.Request, source: LogSource, pod: Object) -> web.StreamResponse:
    """The answer to a GET of a pod's ``log``.

    Raises:
        ApiStatus: There is none, or not yet.
    """
    from aiohttp import web

    query = request.query
    container = container_of(pod, query)
    place = (pod["metadata"]["namespace"], pod["metadata"]["name"], container)
    found = source.read(*place)
    if isinstance(found, ApiStatus):
        raise found
    start = len(found) - len(_tail(found, query))
    limit = int(query["limitBytes"]) if "limitBytes" in query else None
    if query.get("follow") not in ("true", "1"):
        text = found[start:] if limit is None else found[start : start + limit]
        return web.Response(body=text, content_type="text/plain")
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    await response.prepare(request)
    left = limit
    async for piece in source.follow(*place):
        skipped = min(start, len(piece))
        start -= skipped
        text = piece[skipped:] if left is None else piece[skipped : skipped + left]
        if text:
            await response.write(text)
        if left is not None:
            left -= len(text)
            if left == 0:
                break
    await response.write_eof()
    return response


def container_of(pod: Object, query: Mapping[str, str]) -> str:
    """Which container's log is asked for.

    Raises:
        ApiStatus: 400, it is none of the pod's, or has not started.
    """
    name, spec = pod["metadata"]["name"], pod["spec"]
    containers = [c["name"] for c in spec.get("containers") or ()]
    init = [c["name"] for c in spec.get("initContainers") or ()]
    wanted = query.get("container") or ""
    if not wanted:
        if len(containers) != 1:
            raise _bad(
                f"a container name must be specified for pod {name}, "
                f"choose one of: [{' '.join(containers)}]"
            )
        wanted = containers[0]
    elif wanted not in containers + init:
        raise _bad(f"container {wanted} is not valid for pod {name}")
    if query.get("previous") in ("true", "1"):
        raise _bad(f'previous terminated container "{wanted}" in pod "{name}" not found')
    status = pod.get("status") or {}
    statuses = [
        *(status.get("containerStatuses") or ()),
        *(status.get("initContainerStatuses") or ()),
    ]
    state = next((s.get("state") or {} for s in statuses if s.get("name") == wanted), {})
    if "running" not in state and "terminated" not in state:
        why = (state.get("waiting") or {}).get("reason") or "ContainerCreating"
        raise _bad(f'container "{wanted}" in pod "{name}" is waiting to start: {why}')
    return wanted


def _tail(text: bytes, query: Mapping[str, str]) -> bytes:
    """The last lines of a text, as many as are asked for; a cut one counts."""
    if "tailLines" not in query:
        return text
    lines = text.splitlines(keepends=True)
    count = int(query["tailLines"])
    return b"".join(lines[len(lines) - count :] if count < len(lines) else lines)


def _bad(message: str) -> ApiStatus:
    return ApiStatus(400, "BadRequest", message)
