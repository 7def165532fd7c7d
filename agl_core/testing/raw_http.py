"""A loopback HTTP/1.1 server that does exactly what a script tells it, byte by byte if need be.

ASGI servers are too polite for tests of a proxy: here a script decides where an answer is cut into
pieces, where it breaks off, and learns at once when the client has gone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self

from attrs import frozen

from agl_core.clock import SystemClock
from agl_core.testing.servers import bind_loopback

Header = tuple[str, str]

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 429: "Too Many Requests"}


@frozen(kw_only=True)
class SeenRequest:
    """A request as it came off the socket."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    """Names in lower case."""
    body: bytes

    def header(self, name: str) -> str | None:
        """The first value of a header, or None."""
        return next((value for key, value in self.headers if key == name.lower()), None)

    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)


class Exchange:
    """One request, and the means to answer it.

    Attributes:
        request: What came.
        gone: Set when the client's side of the connection has ended.
    """

    def __init__(self, request: SeenRequest, connection: _Connection) -> None:
        self.request = request
        self.gone = connection.gone
        self._connection = connection
        self._is_chunked = False

    def raw(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._connection.write(data)

    def begin(
        self, status: int = 200, headers: Sequence[Header] = (), *, chunked: bool = True
    ) -> None:
        """Send the head; ``chunked`` says how the body will be framed."""
        self._is_chunked = chunked
        lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Status')}"]
        lines += [f"{name}: {value}" for name, value in headers]
        if chunked:
            lines.append("transfer-encoding: chunked")
        self.raw("\r\n".join([*lines, "\r\n"]).encode("latin-1"))

    def write(self, data: bytes) -> None:
        """Send a piece of the body, as one chunk where it is chunked."""
        self.raw(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    async def flush(self) -> None:
        """Wait until the kernel took what was written, and let everybody else run once."""
        await self._connection.drained.wait()
        await SystemClock().sleep(0)

    def end(self) -> None:
        """End a chunked body."""
        if self._is_chunked:
            self.raw(b"0\r\n\r\n")

    def whole(self, status: int, body: bytes, headers: Sequence[Header] = ()) -> None:
        """Send an answer at once."""
        self.begin(status, [*headers, ("content-length", str(len(body)))], chunked=False)
        self.raw(body)

    def whole_json(self, status: int, value: Any, headers: Sequence[Header] = ()) -> None:
        """Send a JSON answer at once."""
        body = json.dumps(value, ensure_ascii=False).encode()
        self.whole(status, body, [("content-type", "application/json"), *headers])

    def cut(self) -> None:
        """Close the connection after what was sent, with no proper end of the answer."""
        self._connection.close()


Script = Callable[[Exchange], Awaitable[None]]


class RawServer:
    """Serves a script on a free port of 127.0.0.1. An async context manager.

    Args:
        script: Called for each request. None: the test takes requests itself (``take``).

    Attributes:
        requests: Every request so far, in the order of arrival.
        url: Base URL, while it serves.
    """

    def __init__(self, script: Script | None = None) -> None:
        self.script = script
        self.requests: list[SeenRequest] = []
        self.url = ""
        self._waiting: asyncio.Queue[Exchange] = asyncio.Queue()
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._failures: list[BaseException] = []

    @property
    def endpoint(self) -> str:
        """The base URL as a model server is registered with."""
        return f"{self.url}/v1"

    @property
    def open_connections(self) -> int:
        """Connections that have not ended."""
        return len(self._connections)

    async def take(self) -> Exchange:
        """The next request that nobody has taken; it is up to the caller to answer it."""
        return await self._waiting.get()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        sock = bind_loopback()
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self._server = await loop.create_server(lambda: _Connection(self), sock=sock)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in list(self._connections):
            connection.abort()
        if error is None and self._failures:
            raise self._failures[0]

    def refuse(self) -> None:
        """Stop listening: from now on connections are refused; open ones are cut."""
        assert self._server is not None
        self._server.close()
        for connection in list(self._connections):
            connection.abort()

    def _attach(self, connection: _Connection) -> None:
        self._connections.add(connection)

    def _detach(self, connection: _Connection) -> None:
        self._connections.discard(connection)

    def _serve(self, exchange: Exchange, connection: _Connection) -> None:
        self.requests.append(exchange.request)
        if self.script is None:
            self._waiting.put_nowait(exchange)
        else:
            self._begin(self.script, exchange)

    def _begin(self, script: Script, exchange: Exchange) -> None:
        task = asyncio.ensure_future(self._run(script, exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, script: Script, exchange: Exchange) -> None:
        try:
            await script(exchange)
        except Exception as exc:  # told to the test when the server is left
            self._failures.append(exc)
            exchange.cut()


class _Connection(asyncio.Protocol):
    """Reads requests one after the other; a client that pipelines is served in order of arrival."""

    def __init__(self, server: RawServer) -> None:
        self.gone = asyncio.Event()
        self.drained = asyncio.Event()
        self.drained.set()
        self._server = server
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._server._attach(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
        self.drained.set()
        self._server._detach(self)

    def eof_received(self) -> None:
        self.gone.set()

    def pause_writing(self) -> None:
        self.drained.clear()

    def resume_writing(self) -> None:
        self.drained.set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (request := self._next_request()) is not None:
            self._server._serve(Exchange(request, self), self)

    def _next_request(self) -> SeenRequest | None:
        head, separator, rest = bytes(self._buffer).partition(b"\r\n\r\n")
        if not separator:
            return None
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = tuple(
            (name.lower(), value.strip()) for name, _, value in (x.partition(":") for x in lines)
        )
        length = int(dict(headers).get("content-length", "0"))
        if len(rest) < length:
            return None
        del self._buffer[: len(head) + 4 + length]
        method, target, _ = first.split(" ")
        return SeenRequest(method=method, target=target, headers=headers, body=rest[:length])
