"""In front of Quart: request ids, and paths whose ids may hold a slash."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

from agl_core.interfaces import AsgiApp

READ_ON_BYTES = 2**20
READ_ON_SECONDS = 1.0
SLASH = "\ue000"
"""Stands for an encoded slash until a path is split; no id has it, since it is not printable."""

_REQUEST_ID_KEY = "agl_request_id"
_PRINTABLE = re.compile(rb"[!-~](?:[ -~]{0,126}[!-~])?")


def request_id_of(scope: Any) -> str:
    """The request's id: the one it came with where that is usable, else a new one.

    It is kept in ``scope``, so that whoever asks again gets the same.
    """
    known = scope.get(_REQUEST_ID_KEY)
    if known is None:
        sent = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        usable = _PRINTABLE.fullmatch(sent) is not None
        known = sent.decode() if usable else f"req-{secrets.token_hex(12)}"
        scope[_REQUEST_ID_KEY] = known
    return str(known)


class RequestFront:
    """An ASGI application around Quart's.

    Every answer, whoever makes it, gets ``X-Request-Id``. Paths are decoded part by part, so that
    an id with an encoded slash stays one part.
    """

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Serve one connection scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = dict(scope)
        request_id = request_id_of(scope).encode()

        body = _Arrival(receive)

        async def send_with_id(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                if message["status"] >= 400 and message["status"] != 408:
                    await body.read_on()
                headers = [
                    (name, value)
                    for name, value in message.get("headers", ())
                    if name.lower() != b"x-request-id"
                ]
                message = {**message, "headers": [*headers, (b"x-request-id", request_id)]}
            await send(message)

        path = _decoded_path(scope)
        if path is None:
            body.skip()
            await _refuse_path(send_with_id)
            return
        scope["path"] = path
        await self._app(scope, body.receive, send_with_id)


class _Arrival:
    """Follows a request's body while somebody else reads it.

    A server closes the connection right after an answer that came before the end of the body, and
    a client that still writes then sees a reset in place of the answer. So a refusal waits for a
    little more of the body first.
    """

    def __init__(self, receive: Any) -> None:
        self._receive = receive
        self._is_over = asyncio.Event()
        self._spare_bytes: int | None = None

    async def receive(self) -> Any:
        message = await self._receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            self._is_over.set()
        elif self._spare_bytes is not None:
            self._spare_bytes -= len(message.get("body", b""))
            if self._spare_bytes <= 0:
                self._is_over.set()
        return message

    def skip(self) -> None:
        """Nobody reads it: do not wait for it."""
        self._is_over.set()

    async def read_on(self) -> None:
        """Let the reader go on, for at most ``READ_ON_BYTES`` and ``READ_ON_SECONDS``."""
        self._spare_bytes = READ_ON_BYTES
        try:
            async with asyncio.timeout(READ_ON_SECONDS):
                await self._is_over.wait()
        except TimeoutError:
            pass


def _decoded_path(scope: Mapping[str, Any]) -> str | None:
    """The path with each part decoded once; None where it is not UTF-8."""
    raw: bytes = scope.get("raw_path") or b""
    if b"%" not in raw or not raw.startswith(b"/"):
        return str(scope["path"])
    try:
        parts = [unquote_to_bytes(part).decode().replace("/", SLASH) for part in raw.split(b"/")]
    except UnicodeDecodeError:
        return None
    return "/".join(parts)


async def _refuse_path(send: Any) -> None:
    body = (
        b'{"type":"about:blank","title":"Bad Request","status":400,'
        b'"detail":"the path is not UTF-8","code":"bad_request"}'
    )
    headers = [
        (b"content-type", b"application/problem+json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
