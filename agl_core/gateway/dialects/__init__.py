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
from agl_core.gateway.dialects.other import OtherDialect

__all__ = [
    "Answer",
    "AnswerTee",
    "ChatDialect",
    "CompletionsDialect",
    "Dialect",
    "OtherDialect",
    "ParsedRequest",
    "Reshaped",
    "dialect_for",
    "is_event_stream",
]

_CHAT = ChatDialect()
_COMPLETIONS = CompletionsDialect()
_OTHER = OtherDialect()
_BY_PATH: dict[str, Dialect] = {"chat/completions": _CHAT, "completions": _COMPLETIONS}


def dialect_for(method: str, path: str) -> Dialect:
    """Return the dialect of a path below ``v1``; only exact POST paths have one."""
    return _BY_PATH.get(path, _OTHER) if method == "POST" else _OTHER
