"""What the API server refuses, and what its refusals mean for a caller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from agl_core.errors import AglError, BadJson
from agl_core.wire import read_json

Kind = Literal[
    "exists",
    "being_deleted",
    "conflict",
    "not_found",
    "invalid",
    "quota",
    "forbidden",
    "namespace_terminating",
    "unauthorized",
    "busy",
    "unreachable",
    "expired",
]

IDLE = "Idle"
"""The reason where nothing was heard for longer than a limit allows."""

LONGEST_TEXT = 300

_BY_STATUS: dict[int, Kind] = {
    0: "unreachable",
    400: "invalid",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "invalid",
    406: "invalid",
    409: "conflict",
    410: "expired",
    413: "invalid",
    415: "invalid",
    422: "invalid",
}


class KubeError(AglError):
    """The API server refused, or did not answer in a way that can be understood.

    Attributes:
        status: The HTTP status; 0 where no answer came, so that a change may or may not be made.
        reason: The server's word, such as ``AlreadyExists``, or why there is no answer.
        retry_after_seconds: When the server wants to be asked again, or None.
    """

    default_code = "cluster_error"

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        *,
        retry_after_seconds: float | None = None,
        causes: Iterable[str] = (),
    ) -> None:
        super().__init__(message, details={"reason": reason, "causes": list(causes)})
        self.status = status
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


def kind_of(error: KubeError) -> Kind:
    """What an error means; ``busy`` for all that may pass by itself."""
    if error.reason in ("Expired", "Gone"):
        return "expired"
    if error.status == 409 and error.reason == "AlreadyExists":
        return "being_deleted" if "object is being deleted" in error.message else "exists"
    if error.status == 403:
        # The reason of each is Forbidden: only the text tells them apart.
        if "exceeded quota:" in error.message:
            return "quota"
        if "NamespaceTerminating" in error.details["causes"]:
            return "namespace_terminating"
    return _BY_STATUS.get(error.status, "busy")


def error_of_answer(what: str, status: int, headers: Mapping[str, str], body: bytes) -> KubeError:
    """The error that an answer is, whoever wrote it: the API server or a proxy before it.

    Args:
        what: The call, such as ``GET jobs``; for bodies that do not say it themselves.
        status: The HTTP status.
        headers: Of the answer.
        body: A ``Status`` object, or any text.
    """
    try:
        found = read_json(body)
    except BadJson:
        found = None
    if isinstance(found, dict) and found.get("kind") == "Status":
        error = error_of_status(found, status)
    else:
        text = " ".join(body[: 4 * LONGEST_TEXT].decode(errors="replace").split())
        message = f"{what}: the API server answered {status}: {text[:LONGEST_TEXT] or 'no text'}"
        error = KubeError(status, f"Http{status}", message)
    if error.retry_after_seconds is None:
        error.retry_after_seconds = _seconds_of(headers.get("Retry-After"))
    return error


def error_of_status(status: Mapping[str, Any], http_status: int) -> KubeError:
    """The error of a ``Status`` object; its own code counts, as in a stream that began with 200."""
    details = status.get("details")
    details = details if isinstance(details, dict) else {}
    code = status.get("code")
    causes = details.get("causes")
    return KubeError(
        code if isinstance(code, int) and code else http_status,
        str(status.get("reason") or f"Http{http_status}"),
        str(status.get("message") or f"the API server answered {http_status} without a message"),
        retry_after_seconds=_seconds_of(details.get("retryAfterSeconds")),
        causes=[str(c.get("reason")) for c in causes or () if isinstance(c, dict)],
    )


def no_answer(what: str, reason: str, message: str) -> KubeError:
    """An error for a call whose outcome is unknown."""
    return KubeError(0, reason, f"{what}: {message}")


def _seconds_of(value: Any) -> float | None:
    """A number of seconds; dates, which the API server never sends, count as nothing."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        return None
    return seconds if 0 < seconds < float("inf") else None
