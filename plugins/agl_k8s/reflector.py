"""A copy of what the API server has: a list, then its changes, for as long as it is run."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Literal, Protocol

from agl_core.clock import Clock
from agl_k8s.api import IDLE_SECONDS, WATCH_SECONDS
from agl_k8s.errors import IDLE, KubeError, kind_of
from agl_k8s.resources import Listing, WatchEvent

log = logging.getLogger(__name__)

ChangeType = Literal["ADDED", "MODIFIED", "DELETED"]

SHORTEST_BACKOFF_SECONDS = 1.0
LONGEST_BACKOFF_SECONDS = 30.0
# A watch that ends sooner has failed, even where the server ended it in good order.
SHORTEST_WATCH_SECONDS = 1.0
# A watch that lasts this long has recovered, even where nothing has changed.
STEADY_WATCH_SECONDS = 5.0
# After that many failures in a row the version is no longer trusted.
FAULTS_BEFORE_RELIST = 3


class ReflectorApi(Protocol):
    """What is asked of the API server."""

    async def list(self, resource: str, *, label_selector: str | None = None) -> Listing:
        """All objects that match."""
        ...

    def watch(
        self,
        resource: str,
        *,
        resource_version: str,
        label_selector: str | None = None,
        timeout_seconds: float = ...,
        idle_seconds: float = ...,
    ) -> AsyncGenerator[WatchEvent, None]:
        """What changes after a version."""
        ...


class Reflector:
    """Keeps ``objects`` equal to the cluster's; run ``run`` in a task.

    Losing sight of the cluster changes nothing: an object is gone when an event or a complete list
    says so.

    Args:
        api: Of the cluster.
        resource: The plural of a kind.
        label_selector: Which of them.
        on_change: Told of each change, after ``objects`` has it; of what is gone, with its last
            state. It must not raise or wait.
        clock: For pauses and for the resync.
        idle_seconds: The longest silence of a watch. Bookmarks come every minute, so a longer
            silence means that nobody is there.
        resync_seconds: After which everything is listed again, come what may.
    """

    def __init__(
        self,
        api: ReflectorApi,
        resource: str,
        *,
        label_selector: str | None,
        on_change: Callable[[ChangeType, dict[str, Any]], None],
        clock: Clock,
        idle_seconds: float = IDLE_SECONDS,
        resync_seconds: float = 600.0,
    ) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        """By uid."""
        self.synced = asyncio.Event()
        """Set when ``objects`` has been complete once."""
        self._api = api
        self._resource = resource
        self._label_selector = label_selector
        self._on_change = on_change
        self._clock = clock
        self._idle_seconds = idle_seconds
        self._resync_seconds = resync_seconds
        self._version: str | None = None
        self._listed_at = 0.0
        self._faults = 0

    async def run(self) -> None:
        """Follow the cluster until cancelled."""
        while True:
            try:
                if self._version is None or self._is_resync_due():
                    await self._list()
                await self._watch()
            except KubeError as exc:
                await self._recover(exc)
            except Exception:
                # An object of a form that nobody expects: seeing it again may be seeing it whole.
                log.exception("a watch has failed", extra={"resource": self._resource})
                self._version = None
                await self._back_off()

    async def _list(self) -> None:
        listing = await self._api.list(self._resource, label_selector=self._label_selector)
        found = {item["metadata"]["uid"]: item for item in listing.items}
        # What is gone comes first: its name may be another's now.
        for uid in self.objects.keys() - found.keys():
            self._tell("DELETED", self.objects.pop(uid))
        for item in found.values():
            self._take(item)
        self._version = listing.resource_version
        self._listed_at = self._clock.monotonic()
        self.synced.set()

    async def _watch(self) -> None:
        assert self._version is not None
        started = self._clock.monotonic()
        until_resync = self._listed_at + self._resync_seconds - started
        events = self._api.watch(
            self._resource,
            resource_version=self._version,
            label_selector=self._label_selector,
            timeout_seconds=min(WATCH_SECONDS, max(1.0, until_resync)),
            idle_seconds=self._idle_seconds,
        )
        try:
            async with aclosing(events):
                async for event in events:
                    # Progress, but a watch that is cut after each event is no good one.
                    self._faults = min(self._faults, 1)
                    self._take_event(event)
        finally:
            if self._clock.monotonic() - started >= STEADY_WATCH_SECONDS:
                self._faults = 0
        if self._clock.monotonic() - started < SHORTEST_WATCH_SECONDS:
            await self._back_off()

    def _take_event(self, event: WatchEvent) -> None:
        metadata = event.object["metadata"]
        if event.type == "DELETED":
            self.objects.pop(metadata["uid"], None)
            self._tell("DELETED", event.object)
        elif event.type != "BOOKMARK":
            self._take(event.object)
        self._version = metadata["resourceVersion"]

    def _take(self, item: dict[str, Any]) -> None:
        """An object as it is now; not news where its version is known."""
        metadata = item["metadata"]
        known = self.objects.get(metadata["uid"])
        self.objects[metadata["uid"]] = item
        if known is None:
            self._tell("ADDED", item)
        elif known["metadata"]["resourceVersion"] != metadata["resourceVersion"]:
            self._tell("MODIFIED", item)

    def _tell(self, kind: ChangeType, item: dict[str, Any]) -> None:
        try:
            self._on_change(kind, item)
        except Exception:
            # One object that its reader cannot take must not hide all others.
            name = item["metadata"].get("name")
            log.exception("a change was not taken", extra={"change": kind, "object": name})

    async def _recover(self, error: KubeError) -> None:
        extra = {"resource": self._resource, "problem": error.message}
        is_expired = kind_of(error) == "expired"
        if is_expired:
            log.info("a watch has expired", extra=extra)
        else:
            log.warning("the cluster cannot be watched for the moment", extra=extra)
        # A version from the future, as after a restored backup, is met with silence.
        if is_expired or (error.reason == IDLE and self._version is not None):
            self._version = None
            if self._faults == 0:
                self._faults = 1
                return  # the list that follows tells whether more is wrong
        await self._back_off()

    async def _back_off(self) -> None:
        self._faults += 1
        if self._faults >= FAULTS_BEFORE_RELIST:
            self._version = None
        longest = min(LONGEST_BACKOFF_SECONDS, SHORTEST_BACKOFF_SECONDS * 2.0**self._faults)
        await self._clock.sleep(max(SHORTEST_BACKOFF_SECONDS, longest * random.uniform(0.5, 1.0)))

    def _is_resync_due(self) -> bool:
        return self._clock.monotonic() - self._listed_at >= self._resync_seconds
