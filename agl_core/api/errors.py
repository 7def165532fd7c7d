"""Errors as RFC 9457 problem documents."""

from __future__ import annotations

import logging
import math
from http import HTTPStatus
from typing import Any

from quart import Quart, Response, request
from werkzeug.exceptions import HTTPException

from agl_core.api.front import request_id_of
from agl_core.errors import AglError, BadToken, Forbidden, Unavailable
from agl_core.wire import to_json

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"

_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "too_large",
    415: "unsupported_media_type",
    431: "too_large",
}
_DETAILS = {
    404: ("there is nothing at this path", "/openapi.json lists what there is"),
    405: ("the path does not take this method", "the Allow header lists those it takes"),
    408: ("the body took too long to arrive", None),
    413: ("the body is larger than server.max_body_bytes", None),
}


def problem_document(exc: AglError) -> dict[str, Any]:
    """The document for an error."""
    document: dict[str, Any] = {
        "type": "about:blank",
        "title": _title(exc.status),
        "status": exc.status,
        "detail": exc.message,
        "code": exc.code,
    }
    if exc.hint is not None:
        document["hint"] = exc.hint
    if exc.details:
        document["details"] = exc.details
    return document


def problem(exc: AglError) -> Response:
    """The answer for an error, with the headers that its status asks for."""
    answer = Response(to_json(problem_document(exc)), exc.status, content_type=MEDIA_TYPE)
    if exc.status == 401:
        answer.headers["WWW-Authenticate"] = "Bearer"
    if isinstance(exc, Unavailable):
        answer.headers["Retry-After"] = str(max(1, math.ceil(exc.retry_after_seconds)))
    elif exc.status == 503:
        answer.headers["Retry-After"] = "1"
    return answer


def register_error_handlers(app: Quart) -> None:
    """Make every error of the application a problem document."""
    app.register_error_handler(AglError, _on_agl_error)
    app.register_error_handler(HTTPException, _on_http_exception)
    app.register_error_handler(Exception, _on_unexpected)


async def _on_agl_error(exc: Exception) -> Response:
    assert isinstance(exc, AglError)
    if isinstance(exc, BadToken | Forbidden):
        log.warning(
            "refused %s %s: %s",
            request.method,
            request.path,
            exc.message,
            extra={"code": exc.code, "request_id": request_id_of(request.scope)},
        )
    elif exc.status >= 500:
        log.error(
            "%s %s failed: %s",
            request.method,
            request.path,
            exc,
            extra={"code": exc.code, "request_id": request_id_of(request.scope)},
        )
    return problem(exc)


async def _on_http_exception(exc: Exception) -> Response:
    """What Quart and Werkzeug raise: unknown paths, wrong methods, bodies over the limit."""
    assert isinstance(exc, HTTPException)
    status = exc.code or 500
    detail, hint = _DETAILS.get(status, (exc.description or _title(status), None))
    answer = problem(
        AglError(detail, hint=hint, code=_CODES.get(status, "bad_request"), status=status)
    )
    for name, value in exc.get_headers():
        if name.lower() not in ("content-type", "content-length"):
            answer.headers[name] = value  # Allow of a 405, Location of a redirect
    return answer


async def _on_unexpected(exc: Exception) -> Response:
    request_id = request_id_of(request.scope)
    log.error(
        "%s %s failed unexpectedly",
        request.method,
        request.path,
        exc_info=exc,
        extra={"request_id": request_id},
    )
    return problem(
        AglError(
            "the service made a mistake",
            hint=f"its log says more under request id {request_id}",
        )
    )


def _title(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"
