"""Running the service: sockets, signals, and an end that loses nothing.

First SIGTERM or SIGINT: new requests get 503, long-polls answer at once, calls get their grace, and
what is left ends with an error event. The second ends the process at once.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from agl_core.api.front import request_id_of
from agl_core.app import Service
from agl_core.errors import AglError, ConfigError
from agl_core.interfaces import AsgiApp, AsgiServer
from agl_core.settings import ServerSettings, Settings

log = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 1.0
_SECOND_SIGNAL_STATUS = 130
_CLOSING_BODY = (
    b'{"type":"about:blank","title":"Service Unavailable","status":503,'
    b'"detail":"the service is shutting down","code":"shutting_down",'
    b'"error":{"message":"the service is shutting down","type":"overloaded_error",'
    b'"code":"shutting_down"}}'
)


class ListenError(AglError):
    """The address cannot be listened on."""

    default_code = "cannot_listen"


def bind(settings: Settings) -> socket.socket:
    """Bind and listen where the settings say, with an error that says what to do.

    Raises:
        ListenError: The port is taken, or the host is none of this machine.
        ConfigError: It would be open to the network without keys.
    """
    server = settings.server
    try:
        found = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (socket.gaierror, OverflowError, UnicodeError) as exc:
        raise ListenError(f"server.host {server.host!r} is no address: {exc}") from exc
    family, kind, protocol, _, address = found[0]
    auth = settings.auth
    has_keys = any((auth.algorithm_key, auth.controller_key, auth.viewer_key))
    if not has_keys and not server.insecure and not _is_loopback(str(address[0])):
        raise ConfigError(
            f"server.host {server.host!r} is open to the network, but no key is set",
            hint="set auth.algorithm_key, or start with --insecure",
        )
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(server.backlog)
    except OSError as exc:
        sock.close()
        raise ListenError(*_cannot_listen(server.host, server.port, exc)) from exc
    sock.setblocking(False)
    return sock


def check_certificates(server: ServerSettings) -> None:
    """See that the files for TLS can be used, before anything is opened.

    Raises:
        ConfigError: One is missing, unreadable or does not fit the others.
    """
    if server.certificate is None:
        for name in ("private_key", "client_ca"):
            if getattr(server, name) is not None:
                raise ConfigError(f"server.{name} needs server.certificate: without it no TLS")
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(server.certificate, server.private_key)
    except (OSError, ValueError) as exc:
        key = f" with server.private_key {server.private_key!r}" if server.private_key else ""
        raise ConfigError(
            f"server.certificate {server.certificate!r}{key} cannot be used: {exc}"
        ) from exc
    if server.client_ca is not None:
        try:
            context.load_verify_locations(server.client_ca)
        except (OSError, ValueError) as exc:
            raise ConfigError(
                f"server.client_ca {server.client_ca!r} cannot be used: {exc}"
            ) from exc


def _cannot_listen(host: str, port: int, exc: OSError) -> tuple[str]:
    ways_out = {
        errno.EADDRINUSE: "it is taken; stop what listens there, or choose another server.port "
        "(0 takes any that is free)",
        errno.EACCES: "it takes more rights; choose a port above 1023",
        errno.EADDRNOTAVAIL: "the host is no address of this machine",
    }
    why = ways_out.get(exc.errno or 0, exc.strerror or str(exc))
    return (f"cannot listen on {host}:{port}: {why}",)


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def url_of(sock: socket.socket, settings: Settings) -> str:
    """The URL of a bound socket as this machine reaches it."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    scheme = "https" if settings.server.certificate else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class Drain:
    """The outermost application: knows every request that is open, and how to end them."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closing = False
        self._is_cancelling = False
        self._emptied: asyncio.Future[None] | None = None

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Serve one connection scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._is_closing:
            await _refuse(scope, send)
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            # Returning without an end is how an answer is broken off.
            if not self._is_cancelling:
                raise
            task.uncancel()
        finally:
            self._tasks.discard(task)
            if not self._tasks and self._emptied is not None and not self._emptied.done():
                self._emptied.set_result(None)

    def close(self) -> None:
        """Refuse new requests."""
        self._is_closing = True

    async def wait_until_empty(self, seconds: float) -> bool:
        """Wait until no request is open; returns whether it came to that."""
        if not self._tasks:
            return True
        self._emptied = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                await self._emptied
        except TimeoutError:
            return False
        return True

    def cancel(self) -> int:
        """Break off what is still open; returns how many requests that were."""
        self._is_cancelling = True
        for task in self._tasks:
            task.cancel()
        return len(self._tasks)


async def _refuse(scope: dict[str, Any], send: Any) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(_CLOSING_BODY)).encode()),
        (b"connection", b"close"),
        (b"retry-after", b"5"),
        (b"x-request-id", request_id_of(scope).encode()),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": _CLOSING_BODY, "more_body": False})


async def serve(
    service: Service,
    server: AsgiServer,
    sock: socket.socket,
    *,
    on_ready: Callable[[], Awaitable[None]] | None = None,
    before_drain: Callable[[], Awaitable[None]] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Run the service until a signal (or ``stop``) ends it.

    Args:
        service: From ``create_app``.
        server: What speaks HTTP.
        sock: Bound and listening; it is closed at the end.
        on_ready: Awaited when requests are served.
        before_drain: Awaited first at the end: whoever needs the service to end himself.
        stop: Ends the service like a signal would; None: signals alone do.
    """
    stop = stop or asyncio.Event()
    closing = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, stop)
    try:
        async with service:
            drain = Drain(service.app)
            serving = asyncio.ensure_future(
                server.serve(drain, [sock], service.settings.server, closing)
            )
            stopped = asyncio.ensure_future(stop.wait())
            try:
                if on_ready is not None:
                    await on_ready()
                await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if not serving.done():
                    await _end(service, drain, before_drain)
            finally:
                stopped.cancel()
                closing.set()
                await serving
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _end(
    service: Service, drain: Drain, before_drain: Callable[[], Awaitable[None]] | None
) -> None:
    log.info("shutting down")
    if before_drain is not None:
        await before_drain()
    drain.close()
    service.gateway.close_admission()
    service.feed.close()
    if await drain.wait_until_empty(service.settings.server.grace_seconds):
        return
    ended = service.gateway.end_all()
    log.warning("the grace is over, calls are broken off", extra={"calls": ended})
    if not await drain.wait_until_empty(_LAST_WORDS_SECONDS):
        log.warning("requests are cancelled", extra={"requests": drain.cancel()})
        await drain.wait_until_empty(_LAST_WORDS_SECONDS)


def _on_signal(stop: asyncio.Event) -> None:
    if stop.is_set():
        os._exit(_SECOND_SIGNAL_STATUS)
    stop.set()
