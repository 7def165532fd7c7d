"""Why a call is ended from outside, and what its record and its agent are told of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from agl_core.errors import AglError, Unavailable, UpstreamTimeout

Killer = Literal["client_gone", "timeout", "paused", "cancelled", "shutdown"]

STATUS_OF_KILL: dict[Killer, str] = {
    "client_gone": "client_gone",
    "timeout": "timeout",
    "paused": "aborted",
    "cancelled": "aborted",
    "shutdown": "truncated",
}
KILL_ERRORS: dict[Killer, Callable[[], AglError]] = {
    "timeout": lambda: UpstreamTimeout(
        "the call took longer than gateway.total_seconds", code="total_timeout"
    ),
    "paused": lambda: Unavailable(
        "the call was aborted by a weight update", code="aborted", retry_after_seconds=1.0
    ),
    "cancelled": lambda: AglError("the rollout was cancelled", code="rollout_ended", status=403),
    "shutdown": lambda: Unavailable("the service is shutting down", code="shutting_down"),
}
