"""The parts of chat and completion answers that are read; all else is skipped unread."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

Shape = TypeVar("Shape")

# What msgspec raises on bytes that are no JSON, no UTF-8, or nested too deeply.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# Outside of strings (which the first branch swallows) these words are what Python's json writes for
# floats that JSON does not have.
_NONFINITE = re.compile(rb'("[^"\\]*(?:\\.[^"\\]*)*")|-?Infinity|NaN')


class ChunkChoice(msgspec.Struct):
    """One choice of a streamed chunk; chat has ``delta``, completions has ``text``."""

    index: int = 0
    delta: dict[str, Any] | None = None
    text: str | None = None
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: Any = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Chunk(msgspec.Struct):
    """One streamed chunk; chat has ``prompt_token_ids`` here, completions in the choice."""

    id: Any = None
    created: Any = None
    model: Any = None
    choices: list[ChunkChoice] | None = None
    usage: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = None
    system_fingerprint: Any = None
    error: Any = None


class TokenLogprob(msgspec.Struct, gc=False):
    """The chosen token's logprob in a chat answer."""

    logprob: float | None = None


class WholeLogprobs(msgspec.Struct):
    """Chosen tokens' logprobs: chat has ``content``, completions has ``token_logprobs``."""

    content: list[TokenLogprob] | None = None
    token_logprobs: list[float | None] | None = None


class WholeChoice(msgspec.Struct):
    """One choice of a whole answer."""

    index: int = 0
    logprobs: WholeLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Whole(msgspec.Struct):
    """A whole answer."""

    choices: list[WholeChoice] | None = None
    usage: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = None
    error: Any = None


def decode_lenient(decoder: msgspec.json.Decoder[Shape], data: bytes) -> tuple[Shape, bytes] | None:
    """Decode ``data``; return the value with the bytes it was read from, None where unreadable.

    Where ``data`` has NaN or an infinity those bytes have null in its place, which is JSON.
    """
    try:
        return decoder.decode(data), data
    except UNREADABLE:
        if b"NaN" not in data and b"Infinity" not in data:
            return None
    mended = _NONFINITE.sub(lambda match: match[1] or b"null", data)
    try:
        return decoder.decode(mended), mended
    except UNREADABLE:
        return None
