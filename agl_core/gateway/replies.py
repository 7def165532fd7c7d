"""Errors of our own as the SDK of each dialect reads them, and which headers pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agl_core.errors import AglError, Unavailable
from agl_core.gateway.dialects.messages import error_of as messages_error
from agl_core.gateway.dialects.responses import error_of as responses_error
from agl_core.gateway.incoming import Header, Reply
from agl_core.wire import to_json

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# The agent's key is ours, not the model server's; the answer must come unpacked to be read.
_NOT_UPSTREAM = _HOP_BY_HOP | {
    b"accept-encoding",
    b"api-key",
    b"authorization",
    b"content-length",
    b"expect",
    b"host",
    b"x-api-key",
}
# Ours take the place of these.
_NOT_TO_AGENT = _HOP_BY_HOP | {b"content-length", b"date", b"server", b"x-request-id"}

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def headers_upstream(headers: Iterable[Header], credential: str | None) -> list[Header]:
    """The agent's headers as they go to a model server."""
    kept = [(name, value) for name, value in headers if name.lower() not in _NOT_UPSTREAM]
    if credential is not None:
        kept.append((b"authorization", b"Bearer " + credential.encode()))
    return kept


def headers_to_agent(headers: Iterable[Header], content_type: str | None = None) -> list[Header]:
    """A model server's headers as they go to the agent.

    Args:
        headers: As they came.
        content_type: Of what the agent gets, where that is another.
    """
    kept = [
        (name, value)
        for name, value in headers
        if name.lower() not in _NOT_TO_AGENT and not name.lower().startswith(b"x-agl-")
    ]
    if content_type is None:
        return kept
    kept = [(name, value) for name, value in kept if name.lower() != b"content-type"]
    return [*kept, (b"content-type", content_type.encode("latin-1"))]


def is_overload(status: int) -> bool:
    """Whether a status says that the server has too much to do for the moment."""
    return status in (429, 503, 529)


def with_retry_after(headers: list[Header]) -> list[Header]:
    """Headers that say when to come again: to some harnesses a 429 is the end without it."""
    if any(name.lower() == b"retry-after" for name, _ in headers):
        return headers
    return [*headers, (b"retry-after", b"2")]


def error_body(error: AglError, path: str) -> bytes:
    """An error in the shape that the SDK for this path parses."""
    if path.startswith("messages"):
        return to_json(messages_error(error))
    if path.startswith("responses"):
        return to_json(responses_error(error))
    kind = _ERROR_TYPES.get(error.status, "api_error")
    fields = {"message": str(error), "type": kind, "param": None, "code": error.code}
    return to_json({"error": fields})


def error_event(error: AglError, path: str) -> bytes:
    """The same as an event, for a stream that has begun."""
    name = b"event: error\n" if path.startswith(("messages", "responses")) else b""
    return name + b"data: " + error_body(error, path) + b"\n\n"


async def send_error(
    reply: Reply, error: AglError, path: str, extra: Sequence[Header] = ()
) -> None:
    """Answer with an error of ours."""
    headers: list[Header] = [(b"content-type", b"application/json"), *extra]
    if isinstance(error, Unavailable) or error.status == 503:
        seconds = max(1, round(getattr(error, "retry_after_seconds", 1.0)))
        headers.append((b"retry-after", str(seconds).encode()))
    if error.status in (408, 413):
        headers.append((b"connection", b"close"))
    await reply.whole(error.status, headers, error_body(error, path))
