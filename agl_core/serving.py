"""Hypercorn as the built-in ASGI server, with the settings that its own loader would not check."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from agl_core.hookspecs import hookimpl
from agl_core.interfaces import AsgiApp, AsgiServer
from agl_core.settings import ServerSettings

if TYPE_CHECKING:
    from hypercorn.config import Config

# Hypercorn waits for connections that idle, for ever on some versions of Python.
_STOP_SECONDS = 4.0


class HypercornServer:
    """Runs the application under Hypercorn, on the running event loop."""

    async def serve(
        self,
        app: AsgiApp,
        sockets: Sequence[socket.socket],
        settings: ServerSettings,
        closing: asyncio.Event,
    ) -> None:
        """Serve until ``closing`` is set (see ``interfaces.AsgiServer``)."""
        from hypercorn.asyncio import serve

        config = _hypercorn_config(settings)
        # Given as numbers: with two socket objects for one, each would close it.
        config.bind = [f"fd://{sock.detach()}" for sock in sockets]
        serving = asyncio.ensure_future(
            serve(cast(Any, app), config, shutdown_trigger=closing.wait, mode="asgi")
        )
        closed = asyncio.ensure_future(closing.wait())
        try:
            await asyncio.wait({serving, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                await asyncio.wait({serving}, timeout=_STOP_SECONDS)
        finally:
            closed.cancel()
            if not serving.done():
                serving.cancel()
                await asyncio.wait({serving}, timeout=1.0)
        if serving.done() and not serving.cancelled():
            serving.result()


def _hypercorn_config(settings: ServerSettings) -> Config:
    from hypercorn.config import Config

    class TlsConfig(Config):
        """Keeps the TLS context, and asks for client certificates where they are wanted."""

        def create_ssl_context(self) -> ssl.SSLContext | None:
            context = super().create_ssl_context()
            if context is not None and settings.client_ca is not None:
                context.verify_mode = ssl.CERT_REQUIRED
            return context

    config = TlsConfig()
    config.accesslog = None  # the gateway logs calls itself, with the ids
    config.errorlog = None
    config.backlog = settings.backlog
    config.keep_alive_timeout = settings.keep_alive_seconds
    config.read_timeout = None  # it would run while an answer streams
    config.graceful_timeout = 1.0  # the application has drained by then
    config.include_server_header = False
    # A stream that breaks off cannot be told from one that ends on HTTP/2.
    config.alpn_protocols = ["http/1.1"]
    config.h11_max_incomplete_size = 64 * 1024
    config.certfile = settings.certificate
    config.keyfile = settings.private_key
    config.ca_certs = settings.client_ca
    return config


class HypercornPlugin:
    """Offers Hypercorn under the name that ``server.use`` has by default."""

    @hookimpl
    def provide_asgi_server(self) -> AsgiServer:
        return HypercornServer()
