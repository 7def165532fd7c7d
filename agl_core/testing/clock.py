"""A clock that tests turn by hand."""

from __future__ import annotations

import asyncio
import heapq
import itertools

from agl_core.clock import SystemClock


class FakeClock:
    """Time stands still until ``advance`` moves it.

    Args:
        start: What ``now`` says at first, in seconds since the epoch.
    """

    def __init__(self, start: float = 1_750_000_000.0) -> None:
        self._start = start
        self._elapsed = 0.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._arrivals: set[asyncio.Future[None]] = set()

    def now(self) -> float:
        return self._start + self._elapsed

    def monotonic(self) -> float:
        return self._elapsed

    @property
    def sleeping(self) -> int:
        """How many tasks wait for the time to move."""
        return sum(not waiter.done() for _, _, waiter in self._sleepers)

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await SystemClock().sleep(0)
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._elapsed + seconds, next(self._order), waiter))
        for arrival in self._arrivals:
            if not arrival.done():
                arrival.set_result(None)
        await waiter

    async def until_sleeping(self, count: int = 1) -> None:
        """Wait (bound it with ``asyncio.timeout``) until that many tasks sleep."""
        while self.sleeping < count:
            arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._arrivals.add(arrival)
            try:
                await arrival
            finally:
                self._arrivals.discard(arrival)

    def advance(self, seconds: float) -> None:
        """Move the time on and wake whose time has come, in the order of their deadlines.

        The woken tasks run when the caller next awaits something; one that sleeps again counts
        from the new time.
        """
        self._elapsed += seconds
        while self._sleepers and self._sleepers[0][0] <= self._elapsed:
            _, _, waiter = heapq.heappop(self._sleepers)
            if not waiter.done():
                waiter.set_result(None)
