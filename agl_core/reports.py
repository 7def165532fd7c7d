"""What a runner tells its watchers: the latest report of each rollout that changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from weakref import WeakSet

from agl_core.interfaces import RunReport


class LatestReports:
    """Hands reports to any number of watchers; what ``Runner.watch`` returns comes from here.

    A watcher that is slow gets the latest report of a rollout and not each one before it, so what
    waits for it is bounded by the number of rollouts.
    """

    def __init__(self) -> None:
        self._watches: WeakSet[_Watch] = WeakSet()

    def put(self, report: RunReport) -> None:
        """Tell all watchers."""
        for watch in self._watches:
            watch.put(report)

    def forget(self, rollout_id: str) -> None:
        """A rollout that was released is not told of any more."""
        for watch in self._watches:
            watch.forget(rollout_id)

    def watch(self) -> AsyncIterator[RunReport]:
        """A watcher that hears of what is put from now on."""
        watch = _Watch()
        self._watches.add(watch)
        return watch

    def close(self) -> None:
        """End the watchers, after what they have not taken yet."""
        for watch in self._watches:
            watch.close()


class _Watch(AsyncIterator[RunReport]):
    def __init__(self) -> None:
        self._waiting: dict[str, RunReport] = {}
        self._wake = asyncio.Event()
        self._is_closed = False

    def put(self, report: RunReport) -> None:
        self._waiting[report.rollout_id] = report
        self._wake.set()

    def forget(self, rollout_id: str) -> None:
        self._waiting.pop(rollout_id, None)

    def close(self) -> None:
        self._is_closed = True
        self._wake.set()

    async def __anext__(self) -> RunReport:
        while not self._waiting:
            if self._is_closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._waiting.pop(next(iter(self._waiting)))
