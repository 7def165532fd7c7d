"""Tasks of the fake cluster's parts, none of which outlives its part."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from agl_core.clock import Clock

log = logging.getLogger(__name__)


class Background:
    """Runs coroutines, and keeps what they raise for whoever closes the cluster."""

    def __init__(self, clock: Clock) -> None:
        self.errors: list[BaseException] = []
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    async def close(self) -> None:
        """Cancel what runs, and wait until it has ended."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_for(self, event: asyncio.Event, seconds: float) -> bool:
        """Wait until an event is set, at most so long by the cluster's clock; was it set?"""
        if event.is_set() or seconds <= 0:
            return event.is_set()
        waits = [
            asyncio.ensure_future(event.wait()),
            asyncio.ensure_future(self._clock.sleep(seconds)),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return event.is_set()

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self.errors.append(error)
            log.error("a part of the fake cluster failed", exc_info=error)
