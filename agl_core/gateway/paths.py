"""Which paths the gateway proxies, and what of them goes upstream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

from attrs import frozen

from agl_core.errors import BadRequest

_MODEL_CALLS = ("chat/completions", "completions", "messages", "responses")


@frozen(kw_only=True)
class ProxyPath:
    """A path of the proxy: for a rollout's attempt, or with the rollout left to the token."""

    rollout_id: str | None
    attempt_id: str | None
    below: str
    """What follows ``v1``, percent-encoded as it came, without a slash in front."""


def proxy_path(scope: Mapping[str, Any]) -> ProxyPath | None:
    """Read a request's path; None where it is not the gateway's.

    The raw path is read and each id decoded once: an encoded slash belongs to its id.

    Raises:
        BadRequest: A dot segment, an empty segment, or an id that is not UTF-8: what such a path
            means differs from server to server.
    """
    raw: bytes = scope.get("raw_path") or str(scope["path"]).encode()
    if not raw.startswith(b"/"):  # absolute form, as proxies send it
        _, slashes, rest = raw.partition(b"://")
        raw = b"/" + rest.partition(b"/")[2] if slashes else b"/" + raw
    parts = raw.split(b"/")[1:]
    if parts[0] == b"v1" and len(parts) > 1:
        return ProxyPath(rollout_id=None, attempt_id=None, below=_below(parts[1:]))
    if len(parts) < 5 or parts[0] != b"rollout" or parts[2] != b"attempt" or parts[4] != b"v1":
        return None
    return ProxyPath(
        rollout_id=_decode(parts[1]), attempt_id=_decode(parts[3]), below=_below(parts[5:])
    )


def is_base_path(scope: Mapping[str, Any]) -> bool:
    """Whether a path is a base URL, or below an attempt's beside ``v1``: harnesses knock there."""
    parts = str(scope["path"]).split("/")[1:]
    return parts == [""] or _is_of_attempt(parts)


def path_without_v1(scope: Mapping[str, Any]) -> str | None:
    """Return the model API's path of a call whose base URL lacks the ``v1``; None for all else."""
    parts = str(scope["path"]).split("/")[1:]
    below = "/".join(parts[4:] if _is_of_attempt(parts) else parts)
    is_call = scope["method"] == "POST" and below.startswith(_MODEL_CALLS)
    return below if is_call else None


def _is_of_attempt(parts: list[str]) -> bool:
    return len(parts) >= 4 and parts[0] == "rollout" and parts[2] == "attempt"


def _below(parts: list[bytes]) -> str:
    if parts and parts[0] == b"v1":  # a base URL with /v1 given to an SDK that adds its own
        parts = parts[1:]
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1
        if unquote_to_bytes(part) in (b".", b"..") or (not part and not is_last):
            raise BadRequest("the path has a dot segment or an empty one", code="bad_path")
    try:
        return b"/".join(parts).decode("ascii")
    except UnicodeDecodeError as exc:
        raise BadRequest("the path is not percent-encoded", code="bad_path") from exc


def _decode(part: bytes) -> str:
    try:
        return unquote_to_bytes(part).decode("utf-8")
    except UnicodeDecodeError as exc:
        raise BadRequest("an id in the path is not UTF-8", code="bad_path") from exc
