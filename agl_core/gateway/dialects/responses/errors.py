"""Errors as the Responses API has them: whole bodies, and events inside a stream."""

from __future__ import annotations

from typing import Any

import msgspec

from agl_core.errors import AglError
from agl_core.gateway.dialects.shapes import UNREADABLE


def error_of(error: AglError) -> dict[str, Any]:
    """Return the body for a request that could not be translated."""
    return {
        "error": {
            "message": str(error),
            "type": "invalid_request_error" if error.status < 500 else "server_error",
            "param": error.details.get("param"),
            "code": error.code,
        }
    }


def read_error(status: int, body: bytes) -> dict[str, Any]:
    """Return an upstream error's body; a message stays word for word, clients act on its text.

    Both APIs have one form of error, so that most bodies stay as they are.
    """
    try:
        value = msgspec.json.decode(body)
    except UNREADABLE:
        value = body.decode("utf-8", "replace").strip()
    if isinstance(value, dict) and isinstance(value.get("error"), dict):
        return value
    return {"error": {**_described(value, status), "param": None, "code": status}}


def _described(value: Any, status: int) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    if isinstance(value, dict):
        kind = value["type"] if isinstance(value.get("type"), str) else kind
        for name in ("message", "error", "detail"):
            if isinstance(value.get(name), str):
                return {"message": value[name], "type": kind}
    if isinstance(value, str) and value:
        return {"message": value, "type": kind}
    text = msgspec.json.encode(value).decode() if value else f"the model server answered {status}"
    return {"message": text, "type": kind}


def error_event(error: Any) -> dict[str, Any]:
    """Return the data of the ``error`` event, but for its type and number.

    The API's types have code and message at the top; the official packages raise on an ``error``
    object.
    """
    told = error if isinstance(error, dict) else {"message": str(error)}
    message = str(told.get("message") or "the model server failed")
    code = _code(told)
    return {
        "code": code,
        "message": message,
        "param": told.get("param"),
        "error": {
            "type": told.get("type") or code,
            "code": code,
            "message": message,
            "param": told.get("param"),
        },
    }


def _code(error: dict[str, Any]) -> str:
    code = error.get("code")
    if isinstance(code, str):
        return code
    if code == 429:
        return "rate_limit_exceeded"
    is_ours = isinstance(code, int) and 400 <= code < 500
    return "invalid_request_error" if is_ours else "server_error"
