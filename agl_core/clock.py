"""The only module that waits or tells the time, so that tests can do both at will."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Tells the time and waits."""

    def now(self) -> float:
        """Seconds since the epoch, UTC: for records."""
        ...

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back: for durations."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait for ``seconds``; 0 lets other tasks run once."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)  # noqa: TID251 - this is the place


def sleep_blocking(seconds: float) -> None:
    """Wait in a program that has no event loop, such as the synchronous client."""
    time.sleep(seconds)  # noqa: TID251 - this is the place


async def poll(
    condition: Callable[[], bool], clock: Clock, *, seconds: float, every: float = 0.01
) -> bool:
    """Wait until ``condition`` holds, at most ``seconds``; returns whether it held."""
    deadline = clock.monotonic() + seconds
    while not condition():
        if clock.monotonic() >= deadline:
            return False
        await clock.sleep(every)
    return True
