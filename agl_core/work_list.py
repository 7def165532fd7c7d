"""One worker per name: steps for one name never overlap, and one that fails is taken again."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from agl_core.clock import Clock
from agl_core.errors import AglError

log = logging.getLogger(__name__)

STEPS_AT_ONCE = 16
FIRST_BACKOFF_SECONDS = 0.25
LONGEST_BACKOFF_SECONDS = 15.0


def backoff(faults: int) -> float:
    """Seconds, doubled with each fault, with jitter, so that many do not come back at once."""
    longest = min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(faults - 1, 10))
    return longest * random.uniform(0.5, 1.0)


class WorkList:
    """Runs ``step(name)`` for each name that is to be looked at.

    Args:
        step: Compares and acts; called again, after a rest, when it has raised.
        clock: Waits between tries.
    """

    def __init__(self, step: Callable[[str], Awaitable[None]], clock: Clock) -> None:
        self._step = step
        self._clock = clock
        self._dirty: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._steps = asyncio.Semaphore(STEPS_AT_ONCE)
        self.idle = asyncio.Event()
        """Set whenever the last worker ends; whoever waits for it clears it."""

    def __contains__(self, name: object) -> bool:
        return name in self._tasks

    def __len__(self) -> int:
        return len(self._tasks)

    def look_at(self, *names: str) -> None:
        """Have each of them looked at, once more if that is being done just now."""
        for name in names:
            self._dirty.add(name)
            if name not in self._tasks:
                self._tasks[name] = asyncio.create_task(self._work(name))

    async def close(self) -> None:
        """Drop what is being done; every step may be taken anew by whoever comes next."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    async def rest(self, name: str, error: Exception, faults: int) -> None:
        """Wait after a step has failed for the ``faults``-th time in a row."""
        expected = isinstance(error, AglError)
        extra = {"item": name, "problem": str(error)}
        log.warning("a step failed", extra=extra, exc_info=None if expected else error)
        await self._clock.sleep(backoff(faults))

    async def _work(self, name: str) -> None:
        faults = 0
        while name in self._dirty:
            self._dirty.discard(name)
            try:
                async with self._steps:
                    await self._step(name)
                faults = 0
            except Exception as exc:
                self._dirty.add(name)
                faults += 1
                await self.rest(name, exc, faults)
        # Nothing is awaited since the last look at ``_dirty``, so no wake-up is lost.
        del self._tasks[name]
        if not self._tasks:
            self.idle.set()
