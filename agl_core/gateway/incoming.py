"""The agent's side of a call: its body, whether it is still there, and what is sent to it.

Somebody must read ``receive()`` until the answer is done: the server's reader stops otherwise, and
the end of the connection would go unnoticed. So once the body is in, one task goes on reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from agl_core.errors import AglError, BadRequest, TooLarge
from agl_core.gateway.rounds import LONG_WORK_BYTES, Rounds

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]

# Of a refused body this much is read on, so that the client reads our answer and not a reset.
_DISCARD_SECONDS = 1.0


class ClientGone(Exception):
    """The agent closed its connection before its request was complete."""


class BodyTimeout(AglError):
    """The rest of a request body did not come."""

    default_code = "body_timeout"
    default_status = 408


class Incoming:
    """What comes from the agent."""

    def __init__(self, receive: Receive, headers: Sequence[Header]) -> None:
        self._receive = receive
        self._headers = headers
        self._reader: asyncio.Task[None] | None = None
        self._on_gone: Callable[[], object] | None = None
        self._body_ended = False
        self.is_gone = False

    async def body(self, limit_bytes: int, idle_seconds: float, rounds: Rounds) -> bytes:
        """The whole body; of a long one in a round that is free for what is done with it.

        Raises:
            TooLarge: It is over the limit; what still comes is thrown away.
            BodyTimeout: Nothing came for ``idle_seconds``.
            BadRequest: Its length is told in two ways.
            ClientGone: The connection ended first.
        """
        self._check_length(limit_bytes)
        parts: list[bytes] = []
        size = 0
        while True:
            try:
                async with asyncio.timeout(idle_seconds):
                    message = await self._receive()
            except TimeoutError as exc:
                raise BodyTimeout(
                    f"no more of the request body came within {idle_seconds:g} s"
                ) from exc
            if message["type"] == "http.disconnect":
                self.is_gone = True
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if not message.get("more_body", False):
                self._body_ended = True
            if size > limit_bytes:
                raise _too_large(limit_bytes)
            parts.append(part)
            if self._body_ended:
                if size >= LONG_WORK_BYTES:
                    await rounds.take()
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def _check_length(self, limit_bytes: int) -> None:
        lengths = [value for name, value in self._headers if name == b"content-length"]
        if lengths and any(name == b"transfer-encoding" for name, _ in self._headers):
            raise BadRequest(
                "the request has both Content-Length and Transfer-Encoding",
                hint="send one of them: two readers could disagree on where the body ends",
            )
        if lengths and lengths[0].isdigit() and int(lengths[0]) > limit_bytes:
            raise _too_large(limit_bytes)

    def watch(self, on_gone: Callable[[], object]) -> None:
        """Call ``on_gone`` as soon as the connection ends; reads on until ``close``."""
        self._on_gone = on_gone
        if self._reader is None:
            self._reader = asyncio.create_task(self._read_on())

    async def discard(self) -> None:
        """Throw away for a moment what still comes of a body that was refused."""
        if self._body_ended or self.is_gone:
            return
        try:
            async with asyncio.timeout(_DISCARD_SECONDS):
                while not self._body_ended and not self.is_gone:
                    self._note(await self._receive())
        except TimeoutError:
            pass
        if not self._body_ended and not self.is_gone:
            self.watch(lambda: None)

    async def _read_on(self) -> None:
        while not self.is_gone:
            self._note(await self._receive())
        if self._on_gone is not None:
            self._on_gone()

    def _note(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.disconnect":
            self.is_gone = True
        elif not message.get("more_body", False):
            self._body_ended = True

    def close(self) -> None:
        """The answer is done: stop reading. A disconnect after this means nothing."""
        self._on_gone = None
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None


class Reply:
    """What goes to the agent."""

    def __init__(self, send: Send, base_headers: Sequence[Header]) -> None:
        self._send = send
        self._base_headers = list(base_headers)
        self._labels: Sequence[Header] = ()
        self.has_begun = False

    def label(self, headers: Sequence[Header]) -> None:
        """Set the headers that tell of the call; those set before are replaced."""
        self._labels = headers

    def through(self, wrap: Callable[[Send], Send]) -> None:
        """Put something between this and the server."""
        self._send = wrap(self._send)

    async def begin(self, status: int, headers: Sequence[Header]) -> None:
        """Send the head."""
        self.has_begun = True
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, *self._base_headers, *self._labels],
            }
        )

    async def write(self, data: bytes) -> None:
        """Send a piece of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """Send the last piece. Leaving this out ends the answer uncleanly, as is meant then."""
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def whole(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        """Send an answer at once."""
        length = (b"content-length", str(len(body)).encode())
        await self.begin(status, [*headers, length])
        await self.end(body)


def _too_large(limit_bytes: int) -> TooLarge:
    return TooLarge(
        f"the request body is over the limit of {limit_bytes} bytes",
        hint="raise gateway.max_body_bytes, or send less",
    )
