"""ASGI applications on real loopback sockets, for as long as a test lasts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

STOP_SECONDS = 5.0


def bind_loopback() -> socket.socket:
    """A socket on a free port of 127.0.0.1, listening already: who connects early waits."""
    # With the protocol named, asyncio turns Nagle's delays off on what it accepts.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    sock.listen(2048)
    sock.setblocking(False)
    return sock


@asynccontextmanager
async def serve_asgi(app: Any, *, backlog: int = 2048) -> AsyncIterator[str]:
    """Serve ``app`` with Hypercorn on a free port.

    Args:
        app: Any ASGI application.
        backlog: Connections that the kernel keeps waiting.

    Yields:
        The base URL, without a slash at the end.
    """
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    sock = bind_loopback()
    port = sock.getsockname()[1]
    config = Config()
    config.bind = [f"fd://{sock.detach()}"]
    config.backlog = backlog
    config.accesslog = None
    config.loglevel = "WARNING"
    config.graceful_timeout = 1.0
    config.keep_alive_timeout = 15.0
    config.include_server_header = False
    closing = asyncio.Event()
    serving = asyncio.create_task(serve(app, config, shutdown_trigger=closing.wait))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        closing.set()
        # Hypercorn may wait for idle connections for ever (Python 3.12 without uvloop).
        done, _ = await asyncio.wait({serving}, timeout=STOP_SECONDS)
        if not done:
            serving.cancel()
            await asyncio.wait({serving}, timeout=STOP_SECONDS)
        if serving.done() and not serving.cancelled() and serving.exception() is not None:
            raise serving.exception()  # type: ignore[misc]
