"""The client that carries requests to the model servers: HTTP/1.1, pooled, cheap per chunk.

What it costs: opening is one dictionary look-up or one connect, whatever the number of calls
already open (the pool keeps idle connections only, newest last, and counts the rest); a request is
one write, an answer one parser run per socket read. Nothing here redirects, keeps cookies, reads
proxies from the environment, decompresses, or sends a request again, save for the one repeat that
a stale pooled connection calls for.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from typing import NoReturn, Protocol, Self

from agl_core.errors import UpstreamError, UpstreamRefused, UpstreamTimeout
from agl_core.gateway.upstream_answer import UpstreamAnswer
from agl_core.gateway.upstream_connection import UpstreamConnection
from agl_core.gateway.upstream_request import (
    Origin,
    Phase,
    Timeouts,
    UpstreamRequest,
    UpstreamUrl,
    encode_head,
    fault_details,
    is_before_head,
    is_ours,
    upstream_url,
)

__all__ = [
    "PooledUpstreamClient",
    "Timeouts",
    "UpstreamAnswer",
    "UpstreamClient",
    "UpstreamRequest",
    "UpstreamUrl",
    "is_before_head",
    "is_ours",
    "upstream_url",
]

_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
# Expired connections are looked for at most this often.
_SWEEP_SECONDS = 0.25
# A loop that stood still runs its timers first. So many turns later it has made the connections
# that the system had made meanwhile.
_LATE_TURNS = 10


class UpstreamClient(Protocol):
    """What the gateway needs of an HTTP client."""

    async def open(self, request: UpstreamRequest, *, timeouts: Timeouts) -> UpstreamAnswer:
        """Send a request and return when the head of its answer is in.

        Cancelling it closes the connection at once.

        Raises:
            UpstreamRefused: ``upstream_refused``, ``upstream_unresolvable``, ``upstream_tls``.
            UpstreamTimeout: ``connect_timeout``, ``first_byte_timeout``.
            UpstreamError: ``upstream_truncated``, ``upstream_malformed``; ours and not the
                server's: ``upstream_bad_request``, ``upstream_closed``, ``fd_exhausted``.
        """

    async def close(self) -> None:
        """Close every connection; calls in flight fail with ``upstream_closed``."""


class PooledUpstreamClient:
    """Keeps connections for reuse, per origin, the one used last first.

    Attributes:
        resent_requests: How many requests went out a second time, because the server had closed
            the pooled connection before the first reached it.
    """

    def __init__(
        self,
        *,
        idle_seconds: float = 4.0,
        high_water_bytes: int = 256 * 1024,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Make a client; connections are made as they are needed.

        Args:
            idle_seconds: How long an idle connection is kept. Below the 5 s after which uvicorn
                and Hypercorn close theirs: a request must not meet a close.
            high_water_bytes: From here on an answer that nobody reads is left in the kernel; what
                one answer holds in memory is at most this and one socket read.
            tls: For https; the system's trust store where None.
        """
        self._idle_seconds = idle_seconds
        self._high_water_bytes = high_water_bytes
        self._tls = tls
        self._connections: set[UpstreamConnection] = set()
        # The inner dictionaries are ordered sets: newest at the end, removal anywhere is cheap.
        self._idle: dict[Origin, dict[UpstreamConnection, None]] = {}
        self._connecting: set[asyncio.Timeout] = set()
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._all_closed = asyncio.Event()
        self.resent_requests = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def open_connections(self) -> int:
        """Connections that hold a socket, busy or idle."""
        return len(self._connections)

    @property
    def idle_connections(self) -> int:
        """Connections that wait for a request."""
        return sum(map(len, self._idle.values()))

    async def open(self, request: UpstreamRequest, *, timeouts: Timeouts) -> UpstreamAnswer:
        """Send a request and return when the head of its answer is in (see ``UpstreamClient``)."""
        if self._is_closed:
            raise _closed()
        head = encode_head(request)
        pooled = self._take_idle(request.url.origin)
        if pooled is not None:
            answer = pooled.send(request, head, timeouts)
            try:
                await answer.wait_for_head()
            except UpstreamError as exc:
                # With a byte of an answer seen, the server has the request: never twice.
                if answer.received or exc.code != "upstream_truncated":
                    raise
                self.resent_requests += 1
            else:
                return answer
        connection = await self._connect(request.url, timeouts.connect_seconds)
        answer = connection.send(request, head, timeouts)
        answer.resent = pooled is not None
        await answer.wait_for_head()
        return answer

    async def close(self) -> None:
        """Close every connection and return when all sockets are closed."""
        self._is_closed = True
        now = asyncio.get_running_loop().time()
        for limit in self._connecting:
            if not limit.expired():
                limit.reschedule(now)
        for connection in list(self._connections):
            connection.close(_closed(connection.phase))
        self._idle.clear()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
            self._sweep_timer = None
        self._note_if_all_closed()
        await self._all_closed.wait()

    def connection_released(self, connection: UpstreamConnection) -> None:
        """Keep a connection for the next request."""
        if self._is_closed:
            connection.abort()
            return
        connection.idle_since = connection.loop.time()
        self._idle.setdefault(connection.origin, {})[connection] = None
        if self._sweep_timer is None:
            self._sweep_timer = connection.loop.call_later(self._idle_seconds, self._sweep)

    def connection_lost(self, connection: UpstreamConnection) -> None:
        """Forget a connection."""
        self._connections.discard(connection)
        idle = self._idle.get(connection.origin)
        if idle is not None:
            idle.pop(connection, None)
            if not idle:
                del self._idle[connection.origin]
        self._note_if_all_closed()

    def _take_idle(self, origin: Origin) -> UpstreamConnection | None:
        idle = self._idle.get(origin)
        if idle is None:
            return None
        found = None
        while idle and found is None:
            connection, _ = idle.popitem()
            if not connection.is_open:
                continue
            if connection.loop.time() - connection.idle_since < self._idle_seconds:
                found = connection
            else:
                connection.abort()
        if not idle:
            del self._idle[origin]
        return found

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweep_timer = None
        expired: list[UpstreamConnection] = []
        oldest = None
        limit = loop.time() - self._idle_seconds
        for idle in self._idle.values():
            for connection in idle:
                if connection.idle_since > limit:
                    oldest = min(oldest or connection.idle_since, connection.idle_since)
                    break
                expired.append(connection)
        self._drop(expired)
        if oldest is not None:
            self._sweep_timer = loop.call_later(max(oldest - limit, _SWEEP_SECONDS), self._sweep)

    def _drop(self, connections: list[UpstreamConnection]) -> None:
        for connection in connections:
            idle = self._idle[connection.origin]
            del idle[connection]
            if not idle:
                del self._idle[connection.origin]
            connection.abort()

    async def _connect(self, url: UpstreamUrl, seconds: float | None) -> UpstreamConnection:
        loop = asyncio.get_running_loop()

        def connection() -> UpstreamConnection:
            return UpstreamConnection(self, url.origin, loop, self._high_water_bytes)

        # Through it, close() ends a connect that is under way.
        limit = asyncio.timeout(None)
        timer = None if seconds is None else loop.call_later(seconds, _expire, limit, loop)
        try:
            async with limit:
                self._connecting.add(limit)
                _, connected = await loop.create_connection(
                    connection,
                    url.host,
                    url.port,
                    ssl=self._tls_context() if url.scheme == "https" else None,
                )
                # Counted here and not in connection_made, which uvloop also calls for a connect
                # that was cancelled and whose loss it never reports.
                if connected.is_attached:
                    self._connections.add(connected)
        except OSError as exc:  # time-outs are among them
            if self._is_closed:
                raise _closed() from exc
            self._raise_connect_error(url, exc)
        finally:
            if timer is not None:
                timer.cancel()
            self._connecting.discard(limit)
            self._note_if_all_closed()
        if self._is_closed:
            connected.abort()
            raise _closed()
        return connected

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls

    def _raise_connect_error(self, url: UpstreamUrl, exc: OSError) -> NoReturn:
        name = f"{url.scheme}://{url.authority.decode()}"
        if _is_out_of_descriptors(exc):
            # Idle ones of other servers are worth less now than a descriptor.
            self._drop([connection for idle in self._idle.values() for connection in idle])
            raise UpstreamError(
                f"no file descriptor is left to connect to {name}",
                hint="raise the limit on open files (ulimit -n)",
                code="fd_exhausted",
                status=503,
                details=fault_details("connect", ours=True),
            ) from exc
        details = fault_details("connect")
        if isinstance(exc, TimeoutError):
            raise UpstreamTimeout(
                f"no connection to {name} in time", code="connect_timeout", details=details
            ) from exc
        if isinstance(exc, socket.gaierror):
            message, code = f"the name in {name} cannot be resolved", "upstream_unresolvable"
        elif isinstance(exc, ssl.SSLError):
            message, code = f"no TLS connection to {name}: {exc}", "upstream_tls"
        else:
            message, code = f"no connection to {name}: {exc}", "upstream_refused"
        raise UpstreamRefused(message, code=code, details=details) from exc

    def _note_if_all_closed(self) -> None:
        if self._is_closed and not self._connections and not self._connecting:
            self._all_closed.set()


def _expire(
    limit: asyncio.Timeout, loop: asyncio.AbstractEventLoop, turns: int = _LATE_TURNS
) -> None:
    """End what a limit is on, unless it is over once the loop has seen what is there already."""
    if turns:
        loop.call_soon(_expire, limit, loop, turns - 1)
        return
    with contextlib.suppress(RuntimeError):  # it is over
        limit.reschedule(loop.time())


def _closed(phase: Phase = "connect") -> UpstreamError:
    return UpstreamError(
        "the gateway is shutting down",
        code="upstream_closed",
        status=503,
        details=fault_details(phase, ours=True),
    )


def _is_out_of_descriptors(exc: OSError) -> bool:
    if isinstance(exc, socket.gaierror):
        # The resolver needs descriptors too and does not say so: see whether one can be had.
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as probe:
            return probe.errno in _OUT_OF_DESCRIPTORS
        return False
    if exc.errno is not None:
        return exc.errno in _OUT_OF_DESCRIPTORS
    # Several addresses failed in different ways: asyncio joins the texts and drops the numbers.
    return any(f"[Errno {number}]" in str(exc) for number in _OUT_OF_DESCRIPTORS)
