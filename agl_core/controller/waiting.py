"""Waiting for one of several things, and for how long after a fault."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from typing import Any

FIRST_BACKOFF_SECONDS = 0.25
LONGEST_BACKOFF_SECONDS = 15.0


def backoff(faults: int) -> float:
    """Seconds, doubled with each fault, with jitter, so that many do not come back at once."""
    longest = min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(faults - 1, 10))
    return longest * random.uniform(0.5, 1.0)


async def first_of(*waits: Awaitable[Any]) -> None:
    """Wait until one of them is done; the others are cancelled."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
