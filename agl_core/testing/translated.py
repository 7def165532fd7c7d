"""What tests of translated dialects share: chat streams as they are asked for, events as read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agl_core.gateway.dialects import ChatDialect
from agl_core.gateway.dialects.sse import EventSplitter, data_of
from agl_core.gateway.dialects.translation import TranslatedTee, Translation

STREAM_TYPE = "text/event-stream; charset=utf-8"
JSON_TYPE = "application/json"

_CHAT = ChatDialect()


def open_captured(
    translation: Translation, content_type: str = STREAM_TYPE, status: int = 200
) -> TranslatedTee:
    """Return the tee of a translated call that is recorded for training."""
    request = translation.request
    adjusted = _CHAT.reshape(request, _CHAT.capture_changes(request)).adjusted
    return translation.open_answer(adjusted, status, content_type)


def with_usage(stream: bytes, usage: Mapping[str, Any]) -> bytes:
    """Return a recorded chat stream as vLLM sends it with ``continuous_usage_stats``.

    Of the chunks only the first gets its count, that of the prompt, and one with the total comes
    before ``[DONE]``.
    """
    out: list[bytes] = []
    for event in EventSplitter().feed(stream):
        data = data_of(event)
        if data == b"[DONE]":
            chunk = {"id": json.loads(data_of(out[0]) or b"{}")["id"], "object": "chat.completion"}
            out.append(_line({**chunk, "choices": [], "usage": dict(usage)}))
        elif data is not None and not out:
            prompt = usage["prompt_tokens"]
            first = {"prompt_tokens": prompt, "total_tokens": prompt, "completion_tokens": 0}
            event = _line({**json.loads(data), "usage": first})
        out.append(event)
    return b"".join(out)


def read_events(stream: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and the data of each event; the stream must be whole events."""
    splitter = EventSplitter()
    events: list[tuple[str, dict[str, Any]]] = []
    for event in splitter.feed(stream):
        head, _, _ = event.partition(b"\n")
        name = head.removeprefix(b"event: ").decode() if head.startswith(b"event: ") else ""
        events.append((name, json.loads(data_of(event) or b"null")))
    if splitter.rest:
        raise AssertionError(f"the stream ends inside an event: {splitter.rest!r}")
    return events


def _line(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"
