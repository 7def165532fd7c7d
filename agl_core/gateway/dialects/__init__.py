"""Dialects: the model APIs that agents speak, as pure functions over bytes.

A dialect reads a request, says what must be asked for so that the answer can be recorded for
training, patches the request, and gives a tee for the answer that keeps the tokens and hands on
what the agent would have got without us.
"""

from __future__ import annotations

from agl_core.gateway.dialects.base import (
    Answer,
    AnswerTee,
    Dialect,
    ParsedRequest,
    Reshaped,
    is_event_stream,
)
from agl_core.gateway.dialects.chat import ChatDialect
from agl_core.gateway.dialects.completions import CompletionsDialect
from agl_core.gateway.dialects.counting import CountTokensDialect
from agl_core.gateway.dialects.messages import MessagesDialect
from agl_core.gateway.dialects.other import OtherDialect
from agl_core.gateway.dialects.responses import ResponsesDialect
from agl_core.gateway.dialects.restore import restored

__all__ = [
    "Answer",
    "AnswerTee",
    "ChatDialect",
    "CompletionsDialect",
    "CountTokensDialect",
    "Dialect",
    "MessagesDialect",
    "OtherDialect",
    "ParsedRequest",
    "Reshaped",
    "ResponsesDialect",
    "chat_dialect",
    "dialect_for",
    "is_event_stream",
    "restored",
]

_CHAT = ChatDialect()
_COMPLETIONS = CompletionsDialect()
_OTHER = OtherDialect()
_BY_PATH: dict[str, Dialect] = {
    "chat/completions": _CHAT,
    "completions": _COMPLETIONS,
    "messages": MessagesDialect(),
    "messages/count_tokens": CountTokensDialect(),
}
_RESPONSES = {end: ResponsesDialect(cut_answers_end=end) for end in ("incomplete", "completed")}


def chat_dialect() -> ChatDialect:
    """Return the dialect that others are translated into."""
    return _CHAT


def dialect_for(method: str, path: str, cut_answers_end: str = "incomplete") -> Dialect:
    """Return the dialect of a path below ``v1``; only exact POST paths have one.

    Args:
        method: The HTTP method.
        path: Below ``v1``.
        cut_answers_end: How a Responses stream ends that hit its token limit.
    """
    if method != "POST":
        return _OTHER
    if path == "responses":
        return _RESPONSES[cut_answers_end]
    return _BY_PATH.get(path, _OTHER)
