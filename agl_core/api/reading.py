"""Reading whole lists out of a store that gives pages."""

from __future__ import annotations

from collections.abc import AsyncIterator

import attrs

from agl_core.interfaces import EventQuery, RolloutQuery, Store
from agl_core.records import Event, Rollout
from agl_core.services import Services

PAGE = 1000


async def iter_rollouts(store: Store, query: RolloutQuery) -> AsyncIterator[Rollout]:
    """Every rollout of the query once, though some may change and move on meanwhile."""
    seen: set[str] = set()
    query = attrs.evolve(query, limit=PAGE)
    while True:
        page = await store.list_rollouts(query)
        for item in page.items:
            if isinstance(item, Rollout) and item.rollout_id not in seen:
                seen.add(item.rollout_id)
                yield item
        if not page.items:
            return
        query = attrs.evolve(query, changed_after=page.cursor)


async def iter_events(store: Store, query: EventQuery) -> AsyncIterator[Event]:
    """Every event of the query, in order."""
    query = attrs.evolve(query, limit=PAGE)
    while True:
        page = await store.list_events(query)
        for event in page.items:
            yield event
        if not page.items:
            return
        query = attrs.evolve(query, after=page.cursor)


async def default_events(services: Services, rollout: Rollout) -> tuple[Event, ...]:
    """The events of the attempt that counts, after what was accepted so far has been stored."""
    attempt_id = rollout.default_attempt_id
    if attempt_id is None:
        return ()
    await services.gateway.captured(rollout.rollout_id)
    query = EventQuery(rollout_id=rollout.rollout_id, attempt_id=attempt_id)
    return tuple([event async for event in iter_events(services.store, query)])
