"""An answer that the agent gets piece by piece, and the comments that keep a quiet one open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from attrs import define

from agl_core.gateway.incoming import Header, Reply
from agl_core.gateway.timers import Heartbeat

HEARTBEAT = b": keep-alive\n\n"


@define(eq=False)
class StreamReply:
    """Writes pieces and comments to one reply, never one into the other.

    It lasts as long as its call: a comment of one try may still be on its way in the next.
    """

    reply: Reply
    _beat: asyncio.Task[None] | None = None
    _last_write: float = 0.0

    async def write(self, status: int, headers: Sequence[Header], data: bytes) -> None:
        """Send a piece, with the head before the first one; nothing for no bytes."""
        if not data:
            return
        if self._beat is not None and not self._beat.done():
            await self.settle()
        if not self.reply.has_begun:
            await self.reply.begin(status, headers)
        self._last_write = asyncio.get_running_loop().time()
        await self.reply.write(data)

    def start_heartbeat(
        self,
        seconds: float | None,
        status: int,
        headers: Sequence[Header],
        is_between_events: Callable[[], bool],
    ) -> Heartbeat:
        """Send a comment whenever nothing was written for a while, until it is cancelled.

        Args:
            seconds: How long a stream may be quiet; None: for ever.
            status: Of the answer, where a comment comes before its first piece.
            headers: Of the answer, likewise.
            is_between_events: Whether a comment would fall between whole events.
        """

        def beat() -> None:
            # Who writes waits for this task first, so that nothing comes in between.
            if is_between_events() and (self._beat is None or self._beat.done()):
                self._beat = asyncio.create_task(self._comment(status, headers))

        self._last_write = asyncio.get_running_loop().time()
        return Heartbeat(seconds, lambda: self._last_write, beat)

    async def _comment(self, status: int, headers: Sequence[Header]) -> None:
        if not self.reply.has_begun:
            await self.reply.begin(status, headers)
        self._last_write = asyncio.get_running_loop().time()
        await self.reply.write(HEARTBEAT)

    async def settle(self) -> None:
        """Wait for a comment that is being sent; a cancelled wait leaves it whole."""
        if self._beat is not None and not self._beat.done():
            await asyncio.wait({self._beat})
