"""One connection to a model server: writes requests, parses answers, keeps back-pressure.

What it costs: a socket read is one parser run and at most one wake-up of the reader, however many
chunks it held.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from agl_core.errors import UpstreamError
from agl_core.gateway.upstream_answer import UpstreamAnswer
from agl_core.gateway.upstream_request import (
    Origin,
    Phase,
    Timeouts,
    UpstreamRequest,
    fault_details,
)

# Head, trailers or chunk extensions without a byte of body in between: past it, the peer only
# fills memory. Engines send heads of less than 2 KiB.
MAX_OVERHEAD_BYTES = 256 * 1024
# Up to here one copy of the body costs less than a second system call.
_JOIN_BYTES = 64 * 1024


class ConnectionOwner(Protocol):
    """What a connection tells about itself: the pool."""

    def connection_released(self, connection: UpstreamConnection) -> None:
        """Take back a connection whose answer is whole and which can carry another."""

    def connection_lost(self, connection: UpstreamConnection) -> None:
        """Forget a connection that is closed."""


class UpstreamConnection(asyncio.Protocol):
    """One TCP or TLS connection: writes a request, parses its answer, says when it is free.

    Attributes:
        origin: What it is connected to.
        loop: The event loop that it lives on.
        idle_since: Loop time at which it was last given back.
    """

    def __init__(
        self,
        owner: ConnectionOwner,
        origin: Origin,
        loop: asyncio.AbstractEventLoop,
        high_water_bytes: int,
    ) -> None:
        self.origin = origin
        self.loop = loop
        self.idle_since = 0.0
        self._owner = owner
        self._high_water_bytes = high_water_bytes
        self._transport: asyncio.Transport | None = None
        self._parser: HttpResponseParser | None = None
        self._answer: UpstreamAnswer | None = None
        self._answers = 0
        self._is_paused = False
        # The message being parsed.
        self._headers: list[tuple[bytes, bytes]] = []
        self._is_head_request = False
        self._is_interim = False
        self._is_whole = False
        self._keeps_alive = False
        self._has_surplus = False
        self._overhead_bytes = 0

    @property
    def phase(self) -> Phase:
        """How far the call in flight has come."""
        return "connect" if self._answer is None else self._answer.phase

    @property
    def is_attached(self) -> bool:
        """Whether it has a socket whose loss is still to be reported."""
        return self._transport is not None

    @property
    def is_open(self) -> bool:
        """Whether a request can be written."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, request: UpstreamRequest, head: bytes, timeouts: Timeouts) -> UpstreamAnswer:
        """Write a request and return its answer, whose head is still to come."""
        if self._answer is not None:
            raise RuntimeError("the connection is not free")
        answer = UpstreamAnswer(self, timeouts, reused=self._answers > 0)
        transport = self._transport
        if transport is None or transport.is_closing():
            # A server may close, or speak unasked, before the first request is written.
            answer.fail(self._truncated("head", None))
            return answer
        self._answer = answer
        if self._parser is None:
            self._parser = HttpResponseParser(self)
        self._headers = []
        self._is_head_request = request.method == "HEAD"
        self._is_interim = self._is_whole = self._has_surplus = False
        self._overhead_bytes = 0
        if len(request.body) <= _JOIN_BYTES:
            transport.write(head + request.body)
        else:
            transport.write(head)
            transport.write(request.body)
        return answer

    def resume(self) -> None:
        """Read from the socket again after the reader had lagged."""
        if self._is_paused:
            self._is_paused = False
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def abort(self) -> None:
        """Close the socket without waiting for anything; the answer in flight is not told."""
        self._answer = None
        if self._transport is not None:
            self._transport.abort()

    def close(self, error: UpstreamError) -> None:
        """Close the socket; an answer in flight fails with this error."""
        if self._answer is not None:
            self._answer.fail(error)
        self.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Parse one socket read and wake the reader at most once."""
        answer = self._answer
        parser = self._parser
        if answer is None or parser is None:
            # Bytes that answer nothing: the connection is out of step and never used again.
            self.abort()
            return
        answer.received = True
        status_before = answer.status
        buffered_before = answer.buffered_bytes
        try:
            parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as exc:
            if not self._is_whole:
                answer.fail(self._malformed(answer.phase, exc))
                return
            self._has_surplus = True
        if self._is_whole:
            self._finish(answer)
        elif answer.buffered_bytes > buffered_before:
            self._overhead_bytes = 0
            if answer.buffered_bytes > self._high_water_bytes and not self._is_paused:
                self._is_paused = True
                cast("asyncio.Transport", self._transport).pause_reading()
        else:
            self._overhead_bytes += len(data)
            if self._overhead_bytes > MAX_OVERHEAD_BYTES:
                answer.fail(self._malformed(answer.phase, f"over {MAX_OVERHEAD_BYTES} bytes"))
                return
        if self._is_whole or answer.buffered_bytes or answer.status != status_before:
            answer.wake()

    def eof_received(self) -> None:
        """Take the end of the stream, which ends a body that has no length of its own."""
        answer = self._answer
        if answer is not None:
            if answer.status and not _has_own_end(answer.headers):
                self._is_whole = True
                self._has_surplus = True
                self._finish(answer)
                answer.wake()
            else:
                answer.fail(self._truncated(answer.phase, None))
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the reader and the pool."""
        answer = self._answer
        if answer is not None:
            answer.fail(self._truncated(answer.phase, exc))
        self._transport = None
        # The parser holds this object and this object the parser: no work for the collector.
        self._parser = None
        self._owner.connection_lost(self)

    # httptools

    def on_message_begin(self) -> None:
        """Notice a second answer that nobody asked for."""
        if self._is_whole:
            self._has_surplus = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep one header; trailers come after the head and are dropped."""
        answer = self._answer
        if answer is not None and not answer.status:
            self._headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """Take the head, unless it is an interim one (1xx)."""
        answer = self._answer
        parser = self._parser
        if answer is None or parser is None or self._is_whole:
            return
        status = parser.get_status_code()
        if status < 200:
            self._headers = []
            self._is_interim = True
            return
        answer.headers = self._headers
        answer.status = status
        if self._is_head_request:
            # The parser cannot be told that no body follows, so it is not used again.
            self._is_whole = True
            self._keeps_alive = parser.should_keep_alive()
            self._parser = None

    def on_body(self, data: bytes) -> None:
        """Hand on a piece of the body."""
        if self._is_whole:
            self._has_surplus = True
        elif self._answer is not None:
            self._answer.add(data)

    def on_message_complete(self) -> None:
        """Take note of the end of the message."""
        if self._is_interim:
            self._is_interim = False
        elif not self._is_whole and self._parser is not None:
            self._is_whole = True
            self._keeps_alive = self._parser.should_keep_alive()

    def _finish(self, answer: UpstreamAnswer) -> None:
        self._answer = None
        self._answers += 1
        answer.finish()
        transport = self._transport
        if transport is None:
            return
        if (
            self._keeps_alive
            and not self._has_surplus
            and not transport.is_closing()
            # Answered before the request was all sent: the rest would precede the next request.
            and not transport.get_write_buffer_size()
        ):
            self.resume()
            self._owner.connection_released(self)
        else:
            transport.abort()

    def _truncated(self, phase: Phase, exc: Exception | None) -> UpstreamError:
        what = "before its answer" if phase == "head" else "in the middle of its answer"
        error = UpstreamError(
            f"{_name(self.origin)} closed the connection {what}",
            code="upstream_truncated",
            details=fault_details(phase),
        )
        error.__cause__ = exc
        return error

    def _malformed(self, phase: Phase, cause: Exception | str) -> UpstreamError:
        error = UpstreamError(
            f"{_name(self.origin)} answered something that is not HTTP/1.1: {cause}",
            code="upstream_malformed",
            details=fault_details(phase),
        )
        error.__cause__ = cause if isinstance(cause, Exception) else None
        return error


def _name(origin: Origin) -> str:
    scheme, host, port = origin
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _has_own_end(headers: list[tuple[bytes, bytes]]) -> bool:
    # RFC 9112, 6.3: a length or a final "chunked" says where the body ends; else the close does.
    for name, value in headers:
        if name == b"content-length":
            return True
        if name == b"transfer-encoding" and value.lower().endswith(b"chunked"):
            return True
    return False
