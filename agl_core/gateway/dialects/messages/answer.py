"""A chat answer as a message: content blocks, stop reason, usage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agl_core.gateway.dialects.messages.content import UNPARSED
from agl_core.gateway.dialects.translation import read_arguments, reasoning_of, stable_hex

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}


def message_id(upstream: Any) -> str:
    """Return the message's id, which depends on the chat answer's id alone."""
    return "msg_" + stable_hex(upstream)


def call_id(given: Any, upstream: Any, index: int) -> str:
    """Return a tool call's id: the server's, else one of ours, since clients need one."""
    return given if isinstance(given, str) and given else "toolu_" + stable_hex(upstream, index)


def signature_of(upstream: Any, index: int) -> str:
    """Return the signature of a thinking block.

    Some clients send thinking back only where it has a signature; its content means nothing here.
    """
    return stable_hex("thinking", upstream, index, length=32)


def thinking_block(text: str, signature: str) -> dict[str, Any]:
    """Return a thinking block."""
    return {"type": "thinking", "thinking": text, "signature": signature}


def text_block(text: str) -> dict[str, Any]:
    """Return a text block."""
    return {"type": "text", "text": text}


def tool_block(tool_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a tool_use block with the parsed arguments."""
    return {"type": "tool_use", "id": tool_id, "name": name, "input": input_of(arguments)}


def input_of(arguments: str) -> dict[str, Any]:
    """Return arguments as an object, for only that is allowed in a message.

    A call that was cut short must not be run as if it had no arguments: what is no object stands
    raw in one, in the form in which Claude Code itself sends back what it could not parse.
    """
    if not arguments.strip():
        return {}
    try:
        value = read_arguments(arguments)
    except ValueError:
        value = None
    if isinstance(value, dict):
        return value
    return {UNPARSED: {"raw": arguments, "len": len(arguments)}}


def stop_of(finish_reason: Any, stop_reason: Any, *, has_calls: bool) -> tuple[str, str | None]:
    """Return a message's stop reason and, where a stop string ended it, that string."""
    if finish_reason == "stop" and has_calls:
        # A server that was told which tool to call says ``stop``; agents go by the stop reason.
        return "tool_use", None
    if finish_reason == "stop" and isinstance(stop_reason, str):
        return "stop_sequence", stop_reason
    return _STOP_REASONS.get(str(finish_reason), "end_turn"), None


def usage_of(usage: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the token counts.

    Tokens that were read from the cache, or written to it, are not among the ``input_tokens``. A
    server that counts neither is not said to have counted 0.
    """
    usage = usage or {}
    prompt = _count(usage.get("prompt_tokens"))
    counts = {"input_tokens": prompt, "output_tokens": _count(usage.get("completion_tokens"))}
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict):
        read = _count(details.get("cached_tokens"))
        created = _count(details.get("created_cache_tokens"))
        counts["input_tokens"] = max(0, prompt - read - created)
        counts["cache_creation_input_tokens"] = created
        counts["cache_read_input_tokens"] = read
    return counts


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


def blank_message(upstream: Any, model: Any) -> dict[str, Any]:
    """Return a message without content, as a stream begins with it."""
    return {
        "id": message_id(upstream),
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": model,
        "stop_reason": None,
        "stop_sequence": None,
    }


def message_of(chat: Mapping[str, Any], model: str | None) -> dict[str, Any]:
    """Return a whole chat answer as a message; ``model`` is the name that the agent asked for."""
    upstream = chat.get("id")
    choice = chat["choices"][0]
    said = choice.get("message") or {}
    content: list[dict[str, Any]] = []
    reasoning, text = reasoning_of(said), said.get("content")
    if reasoning:
        content.append(thinking_block(reasoning, signature_of(upstream, 0)))
    if isinstance(text, str) and text:
        content.append(text_block(text))
    calls = said.get("tool_calls") or []
    for call in calls:
        function = call.get("function") or {}
        tool_id = call_id(call.get("id"), upstream, len(content))
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        content.append(tool_block(tool_id, name, arguments))
    message = blank_message(upstream, model or chat.get("model"))
    message["content"] = content
    message["stop_reason"], message["stop_sequence"] = stop_of(
        choice.get("finish_reason"), choice.get("stop_reason"), has_calls=bool(calls)
    )
    message["usage"] = usage_of(chat.get("usage"))
    return message
