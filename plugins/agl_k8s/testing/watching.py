"""Watches: streams of changes, with bookmarks, and with what goes wrong with them."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import TYPE_CHECKING, Literal, NoReturn

from agl_core.clock import Clock
from agl_core.wire import to_json
from agl_k8s.testing.faults import Fault, Faults
from agl_k8s.testing.kinds import ApiStatus, Object
from agl_k8s.testing.objects import Change, ObjectStore, copied
from agl_k8s.testing.operations import check_watch_version
from agl_k8s.testing.paths import Target
from agl_k8s.testing.selectors import FieldSelector, LabelSelector

if TYPE_CHECKING:
    from aiohttp import web

# Of a watch that names no time-out.
SHORTEST_SECONDS = 1800.0
# The last bookmark comes so long before the end, or half way where there is less.
LAST_BOOKMARK_SECONDS = 1.5


class Watch:
    """One watch.

    Args:
        store: Whose changes.
        clock: Times bookmarks and the end.
        faults: Asked before each line.
        bookmark_seconds: Between bookmarks.
        request: Its query is read here.
        target: A collection.

    Raises:
        ApiStatus: The query cannot be read.
    """

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        faults: Faults,
        bookmark_seconds: float,
        request: web.Request,
        target: Target,
    ) -> None:
        query = request.query
        self._store = store
        self._clock = clock
        self._faults = faults
        self._bookmark_seconds = bookmark_seconds
        self._request = request
        self._path = request.path_qs
        self._target = target
        self._labels = LabelSelector(query.get("labelSelector"))
        fields = query.get("fieldSelector")
        self._fields = FieldSelector(target.kind.resource, fields)
        self._start = check_watch_version(query.get("resourceVersion"))
        self._has_bookmarks = query.get("allowWatchBookmarks") in ("true", "1")
        stated = float(query.get("timeoutSeconds") or 0)
        self._seconds = stated or random.uniform(SHORTEST_SECONDS, 2 * SHORTEST_SECONDS)
        self._lines: deque[bytes] = deque()
        self._sent = 0
        self._wake = asyncio.Event()
        self._response: web.StreamResponse | None = None

    async def run(self) -> web.StreamResponse:
        """Send changes until the time is over."""
        from aiohttp import web

        response = self._response = web.StreamResponse(headers={"Content-Type": "application/json"})
        # From the first look at the store on nothing may be missed, while the head is sent too.
        unsubscribe = self._store.follow(self._take)
        unsubscribe_faults = self._faults.subscribe(self._wake.set)
        try:
            expired = self._read_past()
            await response.prepare(self._request)
            if expired is None:
                await self._send_until_end(response)
            else:
                await response.write(_line("ERROR", expired.to_object()))
        except ApiStatus as exc:
            await response.write(_line("ERROR", exc.to_object()))
        except (ConnectionError, _CutError):
            return response
        finally:
            unsubscribe()
            unsubscribe_faults()
        await response.write_eof()
        return response

    # ---------------------------------------------------------------------------------------------

    def _read_past(self) -> ApiStatus | None:
        """Queue what is there, or what has happened since; returns the error if that is gone."""
        if self._start is None:
            resource, namespace = self._target.kind.resource, self._target.namespace
            for item in self._store.list_at(resource, namespace, self._store.version):
                if self._matches(item):
                    self._lines.append(_line("ADDED", item))
            return None
        try:
            for change in self._store.changes_after(self._start):
                self._take(change)
        except ApiStatus as exc:
            return exc
        return None

    async def _send_until_end(self, response: web.StreamResponse) -> None:
        end = self._clock.monotonic() + self._seconds
        last = end - min(LAST_BOOKMARK_SECONDS, self._seconds / 2)
        bookmark = min(self._clock.monotonic() + self._bookmark_seconds, last)
        while True:
            if await self._send_lines(response):
                return
            now = self._clock.monotonic()
            if now >= end:
                return
            if now >= bookmark:
                await self._send_bookmark(response)
                is_last = now >= last
                bookmark = end if is_last else min(now + self._bookmark_seconds, last)
            await self._wait(min(bookmark, end) - now)

    async def _send_lines(self, response: web.StreamResponse) -> bool:
        """Send what is queued; returns whether the stream ends now."""
        while True:
            self._wake.clear()
            has_line = bool(self._lines)
            fault = self._faults.take_stream(self._path, self._sent, has_line=has_line)
            if fault is not None:
                await self._fail(fault, response)
                return True
            if not has_line:
                return False
            await response.write(self._lines.popleft())
            self._sent += 1

    async def _fail(self, fault: Fault, response: web.StreamResponse) -> None:
        if fault.act == "silence":
            await _never()
        if fault.act == "expire":
            version = self._store.version
            raise ApiStatus(410, "Expired", f"too old resource version: {version} ({version})")
        if fault.act == "cut":
            line = self._lines.popleft()
            await response.write(line[: len(line) // 2])
            if self._request.transport is not None:
                self._request.transport.abort()
            raise _CutError

    async def _send_bookmark(self, response: web.StreamResponse) -> None:
        # Those of a version from the future would be from the past.
        if self._has_bookmarks and (self._start or 0) <= self._store.version:
            kind = self._target.kind
            metadata = {"resourceVersion": str(self._store.version), "creationTimestamp": None}
            bookmark = {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": metadata}
            await response.write(_line("BOOKMARK", bookmark))

    async def _wait(self, seconds: float) -> None:
        """Until something is to be sent, at most so long."""
        waiting = {
            asyncio.ensure_future(self._wake.wait()),
            asyncio.ensure_future(self._clock.sleep(seconds)),
        }
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    def _take(self, change: Change) -> None:
        """Queue a change as it looks through the selectors."""
        if change.resource != self._target.kind.resource or change.version <= (self._start or 0):
            return
        namespace = change.object["metadata"].get("namespace", "")
        if self._target.namespace not in (None, "", namespace):
            return
        previous = change.previous
        was = previous is not None and self._matches(previous)
        is_ = change.type != "DELETED" and self._matches(change.object)
        if is_:
            self._lines.append(_line("MODIFIED" if was else "ADDED", change.object))
        elif was:
            last = change.object
            if change.type != "DELETED" and previous is not None:
                # To this watch it is gone; what it was is told with the version of the change.
                last = copied(previous)
                last["metadata"]["resourceVersion"] = str(change.version)
            self._lines.append(_line("DELETED", last))
        self._wake.set()

    def _matches(self, item: Object) -> bool:
        return self._labels.matches(item) and self._fields.matches(item)


class _CutError(Exception):
    """The connection is to be cut."""


def _line(
    type_: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"], item: Object
) -> bytes:
    return to_json({"type": type_, "object": item}) + b"\n"


async def _never() -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")
