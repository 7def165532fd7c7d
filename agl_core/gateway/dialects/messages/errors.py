"""Errors in the shape of the Messages API: ``{"type": "error", "error": {"type", "message"}}``.

The types are those of https://docs.anthropic.com/en/api/errors. SDKs choose their exception by the
HTTP status; harnesses also read the message, which is therefore passed on unchanged: Claude Code
makes room when it reads vLLM's "maximum context length".
"""

from __future__ import annotations

from typing import Any

import msgspec

from agl_core.errors import AglError
from agl_core.gateway.dialects.shapes import UNREADABLE

_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# Of a body that is no JSON, such as a proxy's page, this many characters are passed on.
_LONGEST_TEXT = 2000


def error_type(status: int) -> str:
    """Return the API's error type for an HTTP status."""
    default = "invalid_request_error" if 400 <= status < 500 else "api_error"
    return _TYPES.get(status, default)


def error_object(kind: str, message: str) -> dict[str, Any]:
    """Return an error answer."""
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_of(error: AglError) -> dict[str, Any]:
    """Return an error of ours as this API's answer; SDKs read ``error.details``."""
    answer = error_object(error_type(error.status), str(error))
    answer["error"]["code"] = error.code
    if error.details:
        answer["error"]["details"] = error.details
    return answer


def error_from_chat(status: int, body: bytes) -> dict[str, Any]:
    """Return a chat server's error body as this API's answer."""
    try:
        read = msgspec.json.decode(body)
    except UNREADABLE:
        text = body.decode("utf-8", "replace").strip()[:_LONGEST_TEXT]
        return error_object(error_type(status), text or f"the model server answered {status}")
    if (
        isinstance(read, dict)
        and read.get("type") == "error"
        and isinstance(read.get("error"), dict)
    ):
        return read
    error = read.get("error", read) if isinstance(read, dict) else read
    return error_object(error_type(_status_of(error, status)), message_of(error))


def error_from_stream(error: Any) -> dict[str, Any]:
    """Return an error that came inside a chat stream; its ``code`` is the status it stands for."""
    return error_object(error_type(_status_of(error, 500)), message_of(error))


def message_of(error: Any) -> str:
    """Return the text of a chat error, or all of it where it has no text of its own."""
    if isinstance(error, str):
        return error
    if isinstance(error, dict):
        for name in ("message", "detail"):
            if isinstance(error.get(name), str):
                return str(error[name])
    return msgspec.json.encode(error).decode()


def _status_of(error: Any, status: int) -> int:
    """Return the status that an error names itself; a success status says nothing of an error."""
    code = error.get("code") if isinstance(error, dict) else None
    if status < 400 or status == 500:
        is_status = isinstance(code, int) and not isinstance(code, bool) and 400 <= code < 600
        return code if is_status and isinstance(code, int) else 500
    return status
