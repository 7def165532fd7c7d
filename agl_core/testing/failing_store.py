"""A store that fails when it is told to, around one that works."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from agl_core.errors import StoreError
from agl_core.interfaces import EventQuery, Store
from agl_core.records import Event, EventDraft, EventPage, Rollout


def is_down() -> Exception:
    """What a store raises that cannot be reached."""
    return StoreError("the store is down")


class FailingStore:
    """Hands everything on to ``inner``; events fail as told.

    Attributes:
        fault: Makes the error that appending and listing events ends in; None: they work.
        is_done_before_fault: Whether events are appended all the same before the error, as when
            the answer of a database is lost.
        held: While it is set, appending waits for it.
        appends: How often events were to be appended.
    """

    def __init__(self, inner: Store, *, is_durable: bool | None = None) -> None:
        self.inner = inner
        self.is_durable = inner.is_durable if is_durable is None else is_durable
        self.fault: Callable[[], Exception] | None = None
        self.is_done_before_fault = False
        self.held: asyncio.Event | None = None
        self.appends = 0

    async def __aenter__(self) -> FailingStore:
        await self.inner.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.inner.__aexit__(kind, error, traceback)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def append_events(
        self,
        rollout_id: str,
        attempt_id: str,
        drafts: Sequence[EventDraft],
        *,
        timestamp: float,
        guard: Callable[[Rollout], None] | None = None,
    ) -> tuple[Event, ...]:
        """Append, or fail."""
        self.appends += 1
        if self.held is not None:
            await self.held.wait()
        if self.fault is not None and not self.is_done_before_fault:
            raise self.fault()
        events = await self.inner.append_events(
            rollout_id, attempt_id, drafts, timestamp=timestamp, guard=guard
        )
        if self.fault is not None:
            raise self.fault()
        return events

    async def list_events(self, query: EventQuery) -> EventPage:
        """List, or fail."""
        if self.fault is not None:
            raise self.fault()
        return await self.inner.list_events(query)
