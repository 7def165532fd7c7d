"""The answer of a model server, as its reader sees it: status, headers, and a body that arrives.

What it costs: what has arrived while the reader was busy is handed over as one piece, never waited
for. A wait with a limit only notes its deadline: one timer per answer looks at it now and then
and is set anew when it was early, so a chunk costs no timer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Protocol

from agl_core.errors import UpstreamError, UpstreamTimeout
from agl_core.gateway.upstream_request import Phase, Timeouts, fault_details


class AnswerSource(Protocol):
    """What an answer needs of the connection that it comes over."""

    loop: asyncio.AbstractEventLoop

    def resume(self) -> None:
        """Read from the socket again after the reader had lagged."""

    def abort(self) -> None:
        """Close the socket without waiting for anything."""


class UpstreamAnswer:
    """An answer whose head is in; the body is read from it.

    One reader at a time. Leaving ``async with`` before the end closes the connection, as do
    ``abort``, a cancelled read and a time-out; whoever does not read to the end must do one of
    them. A failure comes after everything that was received before it has been read.

    Attributes:
        status: The HTTP status, never 1xx.
        headers: Names in lower case, in the order of the wire; trailers are dropped.
        complete: The end of the body has arrived, though it may not have been read yet.
        received: At least one byte has come back, if only of an interim answer.
        reused: It came over a connection that had carried an answer before.
        resent: The request went out twice: the first, reused connection turned out to be closed.
    """

    __slots__ = (
        "_buffered_bytes",
        "_connection",
        "_deadline",
        "_due",
        "_error",
        "_loop",
        "_now",
        "_parts",
        "_time_is_up",
        "_timeouts",
        "_timer",
        "_waiter",
        "complete",
        "headers",
        "received",
        "resent",
        "reused",
        "status",
    )

    def __init__(self, connection: AnswerSource, timeouts: Timeouts, *, reused: bool) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = False
        self.received = False
        self.reused = reused
        self.resent = False
        self._connection: AnswerSource | None = connection
        self._timeouts = timeouts
        self._loop = connection.loop
        self._now = timeouts.now or self._loop.time
        self._parts: list[bytes] = []
        self._buffered_bytes = 0
        self._error: UpstreamError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._deadline = 0.0
        self._time_is_up = ""

    async def __aenter__(self) -> UpstreamAnswer:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()

    @property
    def buffered_bytes(self) -> int:
        """Bytes of the body that have arrived and were not read."""
        return self._buffered_bytes

    @property
    def phase(self) -> Phase:
        """``head`` until the head is in, then ``body``."""
        return "body" if self.status else "head"

    async def read(self) -> bytes:
        """Return all of the body that has arrived, waiting only if nothing has; b"" at the end.

        Raises:
            UpstreamTimeout: ``idle_timeout``.
            UpstreamError: ``upstream_truncated``: the connection ended before the body did;
                ``upstream_malformed``: it is not HTTP; ``upstream_aborted``: ``abort`` was called.
        """
        while not self._parts:
            if self._error is not None:
                raise self._error
            if self.complete:
                return b""
            await self._wait(self._timeouts.idle_seconds, "idle_timeout")
        parts = self._parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self._parts = []
        self._buffered_bytes = 0
        if self._connection is not None:
            self._connection.resume()
        return data

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield what ``read`` returns until the end."""
        while data := await self.read():
            yield data

    async def read_all(self, limit: int | None = None) -> bytes:
        """Return the rest of the body.

        Args:
            limit: The most bytes to accept.

        Raises:
            UpstreamError: ``upstream_too_large``: there is more than that; the connection is
                closed. Else as ``read``.
        """
        parts: list[bytes] = []
        size = 0
        while data := await self.read():
            size += len(data)
            if limit is not None and size > limit:
                self.abort()
                raise UpstreamError(
                    f"the model server's answer is larger than {limit} bytes",
                    code="upstream_too_large",
                    details=fault_details("body"),
                )
            parts.append(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def abort(self) -> None:
        """Close the connection at once and drop what was not read; does nothing after the end.

        A read that is waiting fails with ``upstream_aborted``.
        """
        if self.complete or self._error is not None:
            return
        self._parts = []
        self._buffered_bytes = 0
        self.fail(
            UpstreamError(
                "the answer was given up by its reader",
                code="upstream_aborted",
                details=fault_details(self.phase, ours=True),
            )
        )

    async def wait_for_head(self) -> None:
        """Return when the status and the headers are in."""
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._wait(self._timeouts.first_byte_seconds, "first_byte_timeout")

    def add(self, data: bytes) -> None:
        """Take a piece of the body from the connection."""
        self._parts.append(data)
        self._buffered_bytes += len(data)

    def finish(self) -> None:
        """Take note of the proper end of the body."""
        self.complete = True
        self._connection = None
        self._stop_timer()

    def fail(self, error: UpstreamError) -> None:
        """End with an error, closing the connection and waking the reader."""
        connection, self._connection = self._connection, None
        self._error = error
        self._stop_timer()
        if connection is not None:
            connection.abort()
        self.wake()

    def wake(self) -> None:
        """Let a waiting reader look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self, seconds: float | None, time_is_up: str) -> None:
        if self._waiter is not None:
            raise RuntimeError("an upstream answer has one reader at a time")
        if seconds is None:
            self._deadline = math.inf
        else:
            self._deadline = self._now() + seconds
            self._time_is_up = time_is_up
            if self._timer is None or self._deadline < self._due:
                self._set_timer(seconds)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            self._waiter = None

    def _set_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._due = self._deadline
        self._timer = self._loop.call_later(seconds, self._look_at_deadline)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_at_deadline(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        remaining = self._deadline - self._now()
        if remaining == math.inf:
            return
        # A timer may fire up to the clock's resolution early.
        if remaining > 0.001:
            self._set_timer(remaining)
            return
        what = "the head" if self._time_is_up == "first_byte_timeout" else "more"
        self.fail(
            UpstreamTimeout(
                f"the model server sent nothing in time: {what} of its answer did not come",
                code=self._time_is_up,
                details=fault_details(self.phase),
            )
        )
