"""What is no known dialect: passed on byte for byte, read only where it is plain JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import msgspec

from agl_core.gateway.dialects.base import (
    Answer,
    AnswerTee,
    Dialect,
    ParsedRequest,
    as_flag,
    is_event_stream,
)
from agl_core.gateway.dialects.shapes import UNREADABLE
from agl_core.gateway.dialects.sse import ends_event


class OtherTee(AnswerTee):
    """Passes an answer on and keeps what is cheap to know of it."""

    def __init__(self, status: int, content_type: str) -> None:
        self.is_stream = is_event_stream(content_type)
        self._status = status
        self._body: bytes | None = None
        self._ended = False
        self._seen = False
        self._tail = b""

    def feed(self, data: bytes) -> bytes:
        """Return the bytes as they came."""
        self._seen = self._seen or bool(data)
        self._tail = (self._tail + data[-4:])[-4:]
        return data

    def finish(self) -> bytes:
        """Return nothing: nothing was held."""
        self._ended = True
        return b""

    def whole(self, body: bytes) -> bytes:
        """Return the body as it came."""
        self._body = body
        self._ended = True
        self._seen = bool(body)
        return body

    @property
    def held(self) -> bytes:
        """Nothing: the end of an unknown stream cannot be told from its middle."""
        return b""

    @property
    def complete(self) -> bool:
        """Whether the transport ended it; no more is known of an unknown answer."""
        return self._ended

    @property
    def aborted(self) -> bool:
        """Not known here."""
        return False

    @property
    def ends_mid_event(self) -> bool:
        """Whether the bytes so far stop inside an event."""
        return self.is_stream and bool(self._tail) and not ends_event(self._tail)

    @property
    def first_token_seen(self) -> bool:
        """Whether any byte of the body has come."""
        return self._seen

    def result(self) -> Answer:
        """Return the body where it is JSON, with usage and error where they are as usual."""
        if self._body is None:
            return Answer()
        try:
            response = msgspec.json.decode(self._body)
        except UNREADABLE:
            return Answer()
        if not isinstance(response, dict):
            return Answer(response=response)
        usage = response.get("usage")
        error = response.get("error")
        if error is None and self._status >= 400:
            error = response
        return Answer(
            response=response, usage=usage if isinstance(usage, dict) else None, error=error
        )


class OtherDialect(Dialect):
    """A path that the gateway does not understand."""

    api = "other"

    def _describe(self, request: ParsedRequest) -> ParsedRequest:
        model = request.get("model")
        return attrs.evolve(
            request,
            stream=as_flag(request.get("stream")) is True,
            model=model if isinstance(model, str) else None,
        )

    def capture_changes(self, request: ParsedRequest) -> dict[str, Any]:
        """Return nothing: what an unknown API would do with more fields is not known."""
        return {}

    def open_answer(
        self, request: ParsedRequest, adjusted: Mapping[str, Any], status: int, content_type: str
    ) -> OtherTee:
        """Return a tee that changes nothing."""
        return OtherTee(status, content_type)
