"""Reading what the chat and completions APIs have in common in a request."""

from __future__ import annotations

from typing import Any

import attrs

from agl_core.gateway.dialects.base import ParsedRequest, as_flag


def describe_common(request: ParsedRequest) -> ParsedRequest:
    """Fill in the fields that mean the same in both APIs."""
    model = request.get("model")
    options = request.get("stream_options")
    return attrs.evolve(
        request,
        stream=as_flag(request.get("stream")) is True,
        model=model if isinstance(model, str) else None,
        wants_token_ids=as_flag(request.get("return_token_ids")) is True,
        wants_usage=isinstance(options, dict) and as_flag(options.get("include_usage")) is True,
        echo=as_flag(request.get("echo")) is not False,
    )


def usage_changes(request: ParsedRequest) -> dict[str, Any]:
    """Ask a stream for its usage, keeping the agent's other stream options."""
    if request.fields is None or not request.stream:
        return {}
    options = request.get("stream_options")
    if options is None:
        return {"stream_options": {"include_usage": True}}
    if isinstance(options, dict) and as_flag(options.get("include_usage")) is False:
        return {"stream_options": {**options, "include_usage": True}}
    return {}


def count(value: Any) -> int:
    """Return a positive integer, 1 where it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1
