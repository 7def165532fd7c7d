"""An answer as it is sent, kept so that others can get it too: live, or after its end.

It works on ASGI messages: what went to the first client goes to the others unchanged, its
``x-request-id`` included, by which they find the one record there is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from agl_core.errors import Unavailable
from agl_core.gateway.incoming import Send

Message = dict[str, Any]


class Broadcast:
    """A bounded buffer of the messages of one answer, and who follows it.

    Over the bound nobody can join any more. Without followers the messages are then let go; with
    one the answer goes on at that one's pace; with several the slowest is cut off.

    Args:
        limit_bytes: The bound.
        take: Reserves bytes (returns them if negative) of what all answers may hold together, and
            returns whether they are within that.
    """

    def __init__(self, limit_bytes: int, take: Callable[[int], bool]) -> None:
        self.status: int | None = None
        self.has_ended = False
        """The last message is in: the answer ended as it should."""
        self.is_broken = False
        """Nothing comes any more, and the last message did not."""
        self.is_whole = True
        """Every message is still here, so that one may join."""
        self.followers: list[Follower] = []
        self._limit_bytes = limit_bytes
        self._take = take
        self._messages: deque[Message] = deque()
        self._first = 0
        self._size = 0
        self._moved = asyncio.Event()

    async def put(self, message: Message) -> None:
        """Take a message; waits only for a follower that is too far behind and the only one."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif not message.get("more_body", False):
            self.has_ended = True
        if not self.is_whole and not self.followers:
            return
        size = _size_of(message)
        self._messages.append(message)
        self._size += size
        within_total = self._take(size)
        for follower in self.followers:
            follower.wake()
        if not within_total or self._size > self._limit_bytes:
            await self._shrink()

    async def _shrink(self) -> None:
        self.release()
        while self._size > self._limit_bytes and self.followers:
            if len(self.followers) > 1:
                # Of those that are equally far the first to come is the likeliest to be gone.
                min(self.followers, key=lambda follower: follower.position).leave()
            else:
                self._moved.clear()
                await self._moved.wait()
            self._trim()

    def release(self) -> None:
        """Keep no more than what the followers still have to get."""
        self.is_whole = False
        self._trim()

    def close(self) -> None:
        """Nothing comes any more."""
        self.is_broken = not self.has_ended
        for follower in self.followers:
            follower.wake()

    def _trim(self) -> None:
        if self.is_whole:
            return
        kept_from = min(
            (follower.position for follower in self.followers),
            default=self._first + len(self._messages),
        )
        freed = 0
        while self._first < kept_from:
            freed += _size_of(self._messages.popleft())
            self._first += 1
        if freed:
            self._size -= freed
            self._take(-freed)

    def message(self, position: int) -> Message | None:
        """Return the message of that number, None where it has not come."""
        index = position - self._first
        return self._messages[index] if index < len(self._messages) else None

    def moved(self) -> None:
        """A follower has got a message, or has left."""
        self._trim()
        self._moved.set()


class Follower:
    """Somebody who gets an answer that was made for another's request.

    Args:
        broadcast: The answer.
        on_end: Told once when it ends, and whether all of the answer was sent.
    """

    def __init__(self, broadcast: Broadcast, on_end: Callable[[bool], None]) -> None:
        self.position = 0
        """The number of the message that it gets next."""
        self._broadcast = broadcast
        self._on_end: Callable[[bool], None] | None = on_end
        self._has_left = False
        self._wake = asyncio.Event()
        broadcast.followers.append(self)

    def wake(self) -> None:
        """Look again: something has come, or nothing comes any more."""
        self._wake.set()

    def leave(self) -> None:
        """Send nothing more; a call that nobody waits for any more is then ended.

        To be called when its client has gone, and in any case when it was served.
        """
        self._has_left = True
        self._end(is_delivered=False)

    async def relay(self, send: Send) -> bool:
        """Send the whole answer, and then what comes; returns whether it ended as it should.

        A client that leaves ends it too, by ``leave``.

        Raises:
            Unavailable: The call ended before it had any answer.
        """
        broadcast = self._broadcast
        while not self._has_left:
            message = broadcast.message(self.position)
            if message is None:
                if broadcast.is_broken:
                    break
                self._wake.clear()
                await self._wake.wait()
                continue
            await send(message)
            if self._has_left:
                break
            self.position += 1
            is_last = broadcast.has_ended and broadcast.message(self.position) is None
            broadcast.moved()
            if is_last:
                self._end(is_delivered=True)
                return True
        has_left = self._has_left
        self.leave()
        if self.position == 0 and not has_left:
            raise Unavailable(
                "the call that this one repeats ended without an answer", code="repeat_lost"
            )
        return False

    def _end(self, *, is_delivered: bool) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            self._broadcast.followers.remove(self)
            self._broadcast.moved()
            self._wake.set()
            on_end(is_delivered)


def _size_of(message: Message) -> int:
    """Return about how much a message holds in memory."""
    headers = message.get("headers", ())
    return 128 + len(message.get("body", b"")) + sum(len(n) + len(v) + 128 for n, v in headers)
