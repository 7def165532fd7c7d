"""One worker per rollout: steps for one id never overlap, and one that fails is taken again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from agl_core.clock import Clock
from agl_core.controller.waiting import backoff, first_of
from agl_core.errors import AglError, ApiError

log = logging.getLogger(__name__)

STEPS_AT_ONCE = 16


class Workers:
    """Runs ``step(rollout_id)`` for each id that is to be looked at.

    Args:
        step: Compares and acts; called again after it has raised.
        clock: Waits between tries.
    """

    def __init__(self, step: Callable[[str], Awaitable[None]], clock: Clock) -> None:
        self._step = step
        self._clock = clock
        self._dirty: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._steps = asyncio.Semaphore(STEPS_AT_ONCE)
        self._recovered = asyncio.Event()
        self.idle = asyncio.Event()
        """Set whenever the last worker ends; whoever waits for it clears it."""

    def __contains__(self, rollout_id: object) -> bool:
        return rollout_id in self._tasks

    def __len__(self) -> int:
        return len(self._tasks)

    def look_at(self, *rollout_ids: str) -> None:
        """Have each of them looked at, once more if that is being done just now."""
        for rollout_id in rollout_ids:
            self._dirty.add(rollout_id)
            if rollout_id not in self._tasks:
                self._tasks[rollout_id] = asyncio.create_task(self._work(rollout_id))

    def recover(self) -> None:
        """The service is back: those that back off need not wait any longer."""
        self._recovered.set()
        self._recovered = asyncio.Event()

    async def pause(self, faults: int) -> None:
        """Wait after a fault, at most until the service is back."""
        await first_of(self._clock.sleep(backoff(faults)), self._recovered.wait())

    async def close(self) -> None:
        """Drop what is being done; every step may be taken anew by whoever comes next."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    async def _work(self, rollout_id: str) -> None:
        faults = 0
        while rollout_id in self._dirty:
            self._dirty.discard(rollout_id)
            try:
                async with self._steps:
                    await self._step(rollout_id)
                faults = 0
            except Exception as exc:
                self._dirty.add(rollout_id)
                faults += 1
                # Something has changed under our hands: looking again is the answer to it.
                has_changed = isinstance(exc, ApiError) and exc.status in (404, 409)
                if not has_changed or faults > 1:
                    complain("a step for a rollout failed", exc, rollout_id)
                    await self.pause(faults)
        # Nothing is awaited since the last look at ``_dirty``, so no wake-up is lost.
        del self._tasks[rollout_id]
        if not self._tasks:
            self.idle.set()


def complain(what: str, exc: Exception, rollout_id: str | None = None) -> None:
    """Log a fault that the loop survives; a traceback only where nobody expected it."""
    extra = {"rollout_id": rollout_id, "problem": str(exc)}
    if isinstance(exc, AglError):
        log.warning(what, extra=extra)
    else:
        log.error(what, extra=extra, exc_info=exc)
