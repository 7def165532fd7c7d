"""A model server's context length: clamping to it, and the error of a prompt that is too long.

Harnesses know a full context by vLLM's words alone ("This model's maximum context length is ...")
and then compact or end. So that error passes through, and limits of ours speak the same words.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Final

from agl_core.errors import AglError
from agl_core.gateway.dialects import ParsedRequest
from agl_core.wire import read_json

# In chat the second one wins where both are given; the last is that of Responses.
_OUTPUT_LIMITS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_TOO_LONG: Final = re.compile(r"maximum context length is \d+ tokens", re.IGNORECASE)


class ContextExceeded(AglError):
    """The conversation has no room left to go on."""

    default_code: ClassVar[str] = "context_length_exceeded"
    default_status: ClassVar[int] = 400


def clamp(parsed: ParsedRequest, max_model_len: int) -> dict[str, Any]:
    """Return the output limits of a request that are above the server's context, cut to it.

    vLLM refuses such a value, and cuts any other to what the prompt leaves by itself.
    """
    return {
        name: max_model_len
        for name in _OUTPUT_LIMITS
        if (value := _as_int(parsed.get(name))) is not None and value > max_model_len
    }


def _as_int(value: Any) -> int | None:
    """Read an integer as pydantic's lax mode, and so vLLM, does; None where that refuses it."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    # Ten digits are far beyond any context; int() itself has a limit.
    if isinstance(value, str) and re.fullmatch(r"\s*\+?\d{1,10}\s*", value, re.ASCII):
        return int(value)
    return None


def context_length_of(models_answer: Any, served_model: str) -> int | None:
    """Return a model's context length in tokens from vLLM's answer to ``GET /v1/models``.

    An adapter has none of its own: its base model's counts. None where the answer does not tell.
    """
    listed = models_answer.get("data") if isinstance(models_answer, dict) else None
    cards: dict[Any, dict[str, Any]] = {
        card["id"]: card
        for card in (listed if isinstance(listed, list) else ())
        if isinstance(card, dict) and isinstance(card.get("id"), str)
    }
    name: Any = served_model
    # An adapter's base is a model, so there is one step; a list that goes in circles gets no more.
    for _ in range(2):
        card = cards.get(name) if isinstance(name, str) else None
        if card is None:
            return None
        length = card.get("max_model_len")
        if isinstance(length, int) and not isinstance(length, bool) and length > 0:
            return length
        name = card.get("parent")
    return None


def is_context_error(status: int, body: bytes) -> bool:
    """Tell whether an answer is vLLM's refusal of a prompt that does not fit its context.

    A refused ``max_tokens`` is not: that says nothing about the prompt.
    """
    if status != 400:
        return False
    try:
        answer = read_json(body)
    except AglError:
        return False
    if not isinstance(answer, dict):
        return False
    error = answer.get("error")
    message = (error if isinstance(error, dict) else answer).get("message")
    # A validation error quotes the request, which may well speak of context lengths.
    return (
        isinstance(message, str)
        and _TOO_LONG.search(message) is not None
        and "validation error" not in message
    )


def context_message(limit: int, message: str) -> str:
    """Return vLLM's words for a full context; ``message`` goes on after "However, "."""
    return f"This model's maximum context length is {limit} tokens. However, {message}"


def context_error(limit: int, message: str) -> dict[str, Any]:
    """Return vLLM's error body for a full context, said of a limit of ours.

    Args:
        limit: In tokens.
        message: What is too much, as it goes on after "However, ".
    """
    return {
        "error": {
            "message": context_message(limit, message),
            "type": "BadRequestError",
            "param": "input_tokens",
            "code": 400,
        }
    }
