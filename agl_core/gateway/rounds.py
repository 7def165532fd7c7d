"""Spreading long pieces of work over the rounds of the event loop.

Reading or writing a request with images takes some milliseconds in which nothing else runs. That is
short, but the bodies of many calls may come to their end in one round of the loop, and then their
work would follow each other without a break.
"""

from __future__ import annotations

import asyncio
from collections import deque

# What is smaller takes well below a millisecond.
LONG_WORK_BYTES = 256 * 2**10


class Rounds:
    """Lets one long piece of work begin in each round of the event loop, in order of arrival."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Return as soon as this round is free; up to its next wait the caller may work."""
        loop = asyncio.get_running_loop()
        if self._is_taken:
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._free()  # it was this one's turn, which is now the next one's
                raise
        self._is_taken = True
        loop.call_soon(self._free)

    def _free(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return  # it stays taken until that one has worked
        self._is_taken = False
