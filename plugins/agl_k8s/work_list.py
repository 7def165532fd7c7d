"""Looks at things by name, a few at a time, and again whenever that failed."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from agl_core.clock import Clock
from agl_core.errors import AglError

log = logging.getLogger(__name__)

AT_ONCE = 16
LONGEST_BACKOFF_SECONDS = 15.0


class WorkList:
    """Runs ``step(name)`` for each name that was added; never twice at once for one name.

    Args:
        step: Called again, after a pause, when it has raised.
        clock: Waits between tries.
    """

    def __init__(self, step: Callable[[str], Awaitable[None]], clock: Clock) -> None:
        self._step = step
        self._clock = clock
        self._added: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._places = asyncio.Semaphore(AT_ONCE)

    def add(self, name: str) -> None:
        """Have it looked at, once more if that is being done just now."""
        self._added.add(name)
        if name not in self._tasks:
            self._tasks[name] = asyncio.create_task(self._work(name))

    async def close(self) -> None:
        """Drop what is being done."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    async def _work(self, name: str) -> None:
        faults = 0
        while name in self._added:
            self._added.discard(name)
            try:
                async with self._places:
                    await self._step(name)
                faults = 0
            except Exception as exc:
                faults += 1
                self._added.add(name)
                expected = isinstance(exc, AglError)
                extra = {"job_uid": name, "problem": str(exc)}
                log.warning("a step failed", extra=extra, exc_info=None if expected else exc)
                longest = min(LONGEST_BACKOFF_SECONDS, 0.25 * 2.0 ** min(faults, 10))
                await self._clock.sleep(longest * random.uniform(0.5, 1.0))
        # Nothing is awaited since the last look at ``_added``, so no name is lost.
        del self._tasks[name]
