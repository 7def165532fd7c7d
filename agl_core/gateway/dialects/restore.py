"""Tool arguments in chat requests, put back as the model wrote them.

Some clients (AI SDK, OpenCode, Qwen Code, pydantic-ai) read the arguments of a call and write them
again. Templates may pass the new spacing or order on, and the prompt then no longer begins with
what was sampled. Where the JSON is the same, the model's own text takes its place.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import msgspec

from agl_core.gateway.dialects.base import ParsedRequest, RawFields
from agl_core.gateway.dialects.shapes import UNREADABLE
from agl_core.gateway.dialects.translation import read_arguments, same_json

_messages_decoder = msgspec.json.Decoder(list[RawFields])
_fields_decoder = msgspec.json.Decoder(RawFields)


def restored(
    parsed: ParsedRequest, generated: Mapping[str, str]
) -> tuple[ParsedRequest, list[str]] | None:
    """Return a chat request with its arguments put back, and the ids of the calls concerned.

    All else keeps its bytes. None where there is nothing to put back.

    Args:
        parsed: The request as the agent sent it.
        generated: The arguments of tool calls exactly as the model wrote them, by call id.
    """
    messages = None if parsed.fields is None else parsed.fields.get("messages")
    if not generated or messages is None or b'"tool_calls"' not in parsed.body:
        return None
    assert parsed.fields is not None
    try:
        patched, ids = _patched(messages, generated)
    except UNREADABLE:
        return None  # the server says what is wrong with it
    if not ids:
        return None
    fields = {**parsed.fields, "messages": patched}
    return attrs.evolve(parsed, fields=fields, body=msgspec.json.encode(fields)), ids


def _patched(messages: msgspec.Raw, generated: Mapping[str, str]) -> tuple[msgspec.Raw, list[str]]:
    ids: list[str] = []
    listed = _messages_decoder.decode(messages)
    for message in listed:
        raw = message.get("tool_calls")
        if raw is None or bytes(raw) == b"null":
            continue
        calls = _messages_decoder.decode(raw)
        found = [call_id for call in calls if (call_id := _restore(call, generated)) is not None]
        if found:
            message["tool_calls"] = msgspec.Raw(msgspec.json.encode(calls))
            ids += found
    return msgspec.Raw(msgspec.json.encode(listed)), ids


def _restore(call: RawFields, generated: Mapping[str, str]) -> str | None:
    """Put the arguments of one call back; returns its id where that changed them."""
    if "id" not in call or "function" not in call:
        return None
    call_id = msgspec.json.decode(call["id"])
    written = generated.get(call_id) if isinstance(call_id, str) else None
    if written is None:
        return None
    function = _fields_decoder.decode(call["function"])
    sent = msgspec.json.decode(function["arguments"]) if "arguments" in function else None
    if not isinstance(sent, str) or sent == written or not _is_same(sent, written):
        return None
    function["arguments"] = msgspec.Raw(msgspec.json.encode(written))
    call["function"] = msgspec.Raw(msgspec.json.encode(function))
    return str(call_id)


def _is_same(sent: str, written: str) -> bool:
    """Tell whether both are the same JSON; text that is none was changed on purpose."""
    try:
        return same_json(read_arguments(sent), read_arguments(written))
    except ValueError:
        return False
