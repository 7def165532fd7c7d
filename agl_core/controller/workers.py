"""The workers of rollouts, which know the faults of the service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from agl_core.clock import Clock
from agl_core.controller.waiting import first_of
from agl_core.errors import AglError, ApiError
from agl_core.work_list import WorkList, backoff

log = logging.getLogger(__name__)


class Workers(WorkList):
    """Runs ``step(rollout_id)`` for each rollout that is to be looked at."""

    def __init__(self, step: Callable[[str], Awaitable[None]], clock: Clock) -> None:
        super().__init__(step, clock)
        self._recovered = asyncio.Event()

    def recover(self) -> None:
        """The service is back: those that back off need not wait any longer."""
        self._recovered.set()
        self._recovered = asyncio.Event()

    async def rest(self, name: str, error: Exception, faults: int) -> None:
        """Wait after a fault, at most until the service is back."""
        # Something has changed under our hands: looking again is the answer to it.
        has_changed = isinstance(error, ApiError) and error.status in (404, 409)
        if has_changed and faults == 1:
            return
        complain("a step for a rollout failed", error, name)
        await first_of(self._clock.sleep(backoff(faults)), self._recovered.wait())


def complain(what: str, exc: Exception, rollout_id: str | None = None) -> None:
    """Log a fault that the loop survives; a traceback only where nobody expected it."""
    extra = {"rollout_id": rollout_id, "problem": str(exc)}
    if isinstance(exc, AglError):
        log.warning(what, extra=extra)
    else:
        log.error(what, extra=extra, exc_info=exc)
