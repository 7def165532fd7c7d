"""The change feed: long-polls over the store's change order, cheap with a thousand waiters.

Waiting costs a future and a timer. Changes coalesce for 20 ms, then only the waiters that they
concern are woken, a few at a time, so that no wake-up holds the event loop for long; those that
wait for the same thing share one encoded page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator

from agl_core.clock import Clock
from agl_core.errors import Unavailable
from agl_core.interfaces import Change, RolloutQuery, Store
from agl_core.records import RolloutPage
from agl_core.wire import to_json

COALESCE_SECONDS = 0.02
PAUSE_SECONDS = 0.001
WOKEN_AT_ONCE = 16

_EVERYTHING = ("all", None)


class ChangeFeed:
    """Answers list requests, at once or when there is something new.

    Args:
        store: Whose changes it follows from now until ``close``.
        clock: Times the coalescing. Waiters' own time-outs are timers of the event loop.
        max_waiters: More at once are refused.
    """

    def __init__(self, store: Store, clock: Clock, max_waiters: int) -> None:
        self._store = store
        self._clock = clock
        self._max_waiters = max_waiters
        self._count = 0
        self._waiters: dict[Hashable, set[asyncio.Future[bool]]] = {}
        self._woken: dict[asyncio.Future[bool], None] = {}
        self._waker: asyncio.Task[None] | None = None
        self._pages: dict[RolloutQuery, asyncio.Task[tuple[bool, str, bytes]]] = {}
        self._is_closed = False
        self._stop_listening = store.on_change(self._on_change)

    @property
    def waiting(self) -> int:
        """How many long-polls wait now."""
        return self._count

    async def page(self, query: RolloutQuery, wait_seconds: float) -> bytes:
        """One page as JSON; with nothing to show, wait up to ``wait_seconds`` for a change.

        A wait that runs out gives no items and the cursor that was asked with.

        Raises:
            CursorExpired: The cursor belongs to another life of the store.
            Unavailable: Too many wait already.
        """
        if wait_seconds <= 0 or self._is_closed:
            return (await self._look(query))[2]
        if self._count >= self._max_waiters:
            raise Unavailable(
                f"{self._count} long-polls wait already", hint="ask again, or without 'wait'"
            )
        self._count += 1
        try:
            return await self._wait(query, wait_seconds)
        finally:
            self._count -= 1

    async def _wait(self, query: RolloutQuery, wait_seconds: float) -> bytes:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_seconds
        # The first look asks the store itself: a shared page may be older than what the caller has
        # just written through a store that tells of changes late.
        look = self._look
        while True:
            # Registered before it looks, so that no change falls between the two.
            waiter: asyncio.Future[bool] = loop.create_future()
            timer = loop.call_at(deadline, _resolve, waiter, False)
            try:
                self._register(query, waiter)
                is_empty, cursor, encoded = await look(query)
                if not is_empty or self._is_closed:
                    return encoded
                if not await waiter:
                    return to_json({"items": [], "cursor": query.changed_after or cursor})
            finally:
                timer.cancel()
                self._unregister(query, waiter)
            look = self._look_together

    async def _look(self, query: RolloutQuery) -> tuple[bool, str, bytes]:
        page: RolloutPage = await self._store.list_rollouts(query)
        return not page.items, page.cursor, to_json(page)

    async def _look_together(self, query: RolloutQuery) -> tuple[bool, str, bytes]:
        """One look for all who were woken by the same change."""
        task = self._pages.get(query)
        if task is None:
            task = asyncio.create_task(self._look(query))
            task.add_done_callback(_mark_retrieved)
            self._pages[query] = task
        return await asyncio.shield(task)

    def close(self) -> None:
        """Answer all who wait, now, and let nobody wait any more."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stop_listening()
        if self._waker is not None:
            self._waker.cancel()
        for waiters in list(self._waiters.values()):
            for waiter in list(waiters):
                _resolve(waiter, False)
        self._pages.clear()

    def _register(self, query: RolloutQuery, waiter: asyncio.Future[bool]) -> None:
        for key in _keys_of(query):
            self._waiters.setdefault(key, set()).add(waiter)

    def _unregister(self, query: RolloutQuery, waiter: asyncio.Future[bool]) -> None:
        self._woken.pop(waiter, None)
        for key in _keys_of(query):
            waiters = self._waiters.get(key)
            if waiters is not None:
                waiters.discard(waiter)
                if not waiters:
                    del self._waiters[key]

    def _on_change(self, change: Change) -> None:
        if change.kind != "rollout":
            return
        self._pages.clear()
        if change.rollout_id is None:  # a store that only knows that something changed
            keys = list(self._waiters)
        else:
            keys = [_EVERYTHING, ("id", change.rollout_id), ("group", change.group_id)]
        for key in keys:
            self._woken.update(dict.fromkeys(self._waiters.get(key, ())))
        if self._woken and self._waker is None:
            self._waker = asyncio.get_running_loop().create_task(self._wake())

    async def _wake(self) -> None:
        try:
            while self._woken:
                await self._clock.sleep(COALESCE_SECONDS)
                batch = list(self._woken)
                self._woken.clear()
                for start in range(0, len(batch), WOKEN_AT_ONCE):
                    for waiter in batch[start : start + WOKEN_AT_ONCE]:
                        _resolve(waiter, True)
                    await self._clock.sleep(PAUSE_SECONDS)  # they look now
            self._pages.clear()
        finally:
            self._waker = None


def _keys_of(query: RolloutQuery) -> Iterator[Hashable]:
    """Under which keys a change finds those who ask this: the narrowest filter decides."""
    if query.ids is not None:
        yield from (("id", rollout_id) for rollout_id in query.ids)
    elif query.group_id is not None:
        yield ("group", query.group_id)
    else:
        yield _EVERYTHING


def _resolve(waiter: asyncio.Future[bool], is_woken: bool) -> None:
    if not waiter.done():
        waiter.set_result(is_woken)


def _mark_retrieved(task: asyncio.Task[tuple[bool, str, bytes]]) -> None:
    """An error that nobody waits for any more is nobody's error."""
    if not task.cancelled():
        task.exception()
