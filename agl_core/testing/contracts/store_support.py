"""What the rules of stores share: records to put in, and ways to read all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import attrs

from agl_core.interfaces import Change, EventQuery, RolloutQuery, Store
from agl_core.records import Event, EventDraft, Rollout, RolloutPatch, Tombstone
from agl_core.transitions import apply_patch

WAIT_SECONDS = 10
NOW = 1_700_000_000.25


def make_rollout(rollout_id: str, **fields: Any) -> Rollout:
    """A rollout as the core hands it to a store."""
    return Rollout(rollout_id=rollout_id, created_at=NOW, **fields)


def noted(**metadata: Any) -> Callable[[Rollout], Rollout]:
    """A change that is one in any state."""
    return lambda rollout: attrs.evolve(rollout, metadata={**rollout.metadata, **metadata})


def patched(**fields: Any) -> Callable[[Rollout], Rollout]:
    """A change by a PATCH."""
    return lambda rollout: apply_patch(rollout, RolloutPatch(**fields), NOW)


def drafts(*event_types: str) -> list[EventDraft]:
    """Events to post, each with data of its own."""
    return [EventDraft(event_type=t, data={"n": n}) for n, t in enumerate(event_types)]


class Heard:
    """Collects what a store says to its listeners."""

    def __init__(self, store: Store) -> None:
        self.changes: list[Change] = []
        self._news = asyncio.Event()
        self.stop = store.on_change(self._hear)

    def _hear(self, change: Change) -> None:
        self.changes.append(change)
        self._news.set()

    async def until(self, condition: Callable[[Change], bool]) -> list[Change]:
        """Wait for a change, and return all that were heard up to it."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not any(map(condition, self.changes)):
                self._news.clear()
                await self._news.wait()
        return list(self.changes)

    async def until_rollout(self, rollout_id: str) -> list[Change]:
        """Wait until a rollout is named."""
        return await self.until(lambda change: change.rollout_id == rollout_id)


async def read_ids(store: Store, **filters: Any) -> list[str]:
    """Ids of all that a query shows, over all of its pages."""
    return [item.rollout_id for item in (await read_pages(store, **filters))[0]]


async def read_pages(store: Store, **filters: Any) -> tuple[list[Rollout | Tombstone], str]:
    """All that a query shows, over all of its pages, and the last cursor."""
    items: list[Rollout | Tombstone] = []
    query = RolloutQuery(**filters)
    while True:
        page = await store.list_rollouts(query)
        if not page.items:
            return items, page.cursor
        assert len(page.items) <= query.limit
        items += page.items
        query = attrs.evolve(query, changed_after=page.cursor)


async def read_events(store: Store, rollout_id: str, **filters: Any) -> list[Event]:
    """All events that a query shows, over all of its pages."""
    items: list[Event] = []
    query = EventQuery(rollout_id=rollout_id, **filters)
    while True:
        page = await store.list_events(query)
        if not page.items:
            return items
        assert len(page.items) <= query.limit
        items += page.items
        query = attrs.evolve(query, after=page.cursor)


async def end_of(store: Store) -> str:
    """The cursor of the present end of the change order."""
    return (await read_pages(store, limit=1000))[1]
