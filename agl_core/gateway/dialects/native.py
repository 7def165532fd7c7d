"""Answers in Messages or Responses from a server that speaks them itself: passed on as they come.

Their streams say in each event's data what ``type`` of event it is, and have one that ends them.
Sources: the streaming pages of Anthropic's and OpenAI's API references; vLLM 0.32 does the same.
"""

from __future__ import annotations

from typing import Any

import msgspec

from agl_core.gateway.dialects.base import NULL, Answer
from agl_core.gateway.dialects.other import OtherTee
from agl_core.gateway.dialects.shapes import UNREADABLE, decode_lenient
from agl_core.gateway.dialects.sse import EventSplitter, data_of

_LAST = frozenset(
    {
        "error",
        "message_stop",
        "response.completed",
        "response.failed",
        "response.incomplete",
    }
)


class _Event(msgspec.Struct):
    """What is read of an event's data."""

    type: str | None = None
    response: msgspec.Raw = NULL
    message: Any = None
    usage: Any = None
    error: Any = None


_event_decoder = msgspec.json.Decoder(_Event)


class NativeTee(OtherTee):
    """Passes an answer on; of a stream it reads how it ends, and holds back the end.

    A Responses stream tells the whole response in its last event, which is what is recorded of it;
    of a Messages stream it is the usage.
    """

    def __init__(self, status: int, content_type: str) -> None:
        super().__init__(status, content_type)
        self._splitter = EventSplitter()
        self._held: list[bytes] = []
        self._has_last = False
        self._has_output = False
        self._response: Any = None
        self._usage: dict[str, Any] = {}
        self._error: Any = None

    def feed(self, data: bytes) -> bytes:
        """Return the events that can be sent now: all before the one that ends the stream."""
        out: list[bytes] = []
        for event in self._splitter.feed(data):
            if not self._has_last:
                self._read(event)
            (self._held if self._has_last else out).append(event)
        return b"".join(out)

    def finish(self) -> bytes:
        """Return the end that was held back, and what came after it."""
        super().finish()
        out = self.held + self._splitter.take_rest()
        self._held.clear()
        return out

    def _read(self, event: bytes) -> None:
        data = data_of(event)
        read = decode_lenient(_event_decoder, data) if data else None
        if read is None or read[0].type is None:
            return
        told = read[0]
        name = told.type or ""
        self._has_last = name in _LAST
        if name == "error":
            self._error = told.error if told.error is not None else _decoded(read[1])
        elif name == "message_delta":
            self._add_usage(told.usage)
        elif name == "message_start" and isinstance(told.message, dict):
            self._add_usage(told.message.get("usage"))
        elif self._has_last:
            self._response = _decoded(told.response)
            if isinstance(self._response, dict):
                self._add_usage(self._response.get("usage"))
                self._error = self._response.get("error")
        self._has_output = self._has_output or name.endswith("delta")

    def _add_usage(self, usage: Any) -> None:
        if isinstance(usage, dict):
            self._usage.update(usage)

    @property
    def held(self) -> bytes:
        """What is held back: the event that ends the stream, and what follows it."""
        return b"".join(self._held)

    @property
    def complete(self) -> bool:
        """Whether the stream's last event was seen; of what is no such stream, its end."""
        return self._has_last or (self._ended and (not self.is_stream or self._status >= 400))

    @property
    def ends_mid_event(self) -> bool:
        """Never: only whole events are passed on."""
        return False

    @property
    def first_token_seen(self) -> bool:
        """Whether a piece of the answer has come by."""
        return self._has_output or super().first_token_seen

    def result(self) -> Answer:
        """Return what was seen so far."""
        if not self.is_stream:
            return super().result()
        return Answer(response=self._response, usage=self._usage or None, error=self._error)


def _decoded(raw: bytes | msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except UNREADABLE:
        return None
