"""What a failed pod leaves behind, kept as events before it is deleted.

A ``log`` event has the end of a container's log; a ``cluster`` event has what the cluster said of
the pod, and exists only where it said something. Tokens are blacked out in both.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from agl_core.errors import AglError
from agl_core.records import EventDraft
from agl_core.redaction import Redaction, end_of_first_word
from agl_k8s.api import NO_LOG
from agl_k8s.pod_view import AGENT
from agl_k8s.verdict import event_time

log = logging.getLogger(__name__)

# The kubelet keeps this much of a log in a container's status (FallbackToLogsOnError).
STATUS_TAIL_BYTES = 2048
STATUS_TAIL_LINES = 80

MAX_EVENTS = 20
MAX_MESSAGE_CHARACTERS = 1000

# Ends that others bring about: a sidecar has them whenever its pod ends.
_SIGNALLED = frozenset({0, 137, 143})


class Listing(Protocol):
    """An answer to a list."""

    @property
    def items(self) -> Sequence[Mapping[str, Any]]: ...


class EvidenceApi(Protocol):
    """What is asked of the API server."""

    async def log_tail(
        self, pod: str, container: str, /, *, lines: int, size_bytes: int
    ) -> bytes | None:
        """The end of a log, at most ``size_bytes``; None: there is none."""
        ...

    async def list(self, resource: Any, /, *, field_selector: str | None = None) -> Listing:
        """All objects that match."""
        ...


async def collect(
    api: EvidenceApi, pod: Mapping[str, Any], *, tail_bytes: int, secrets: Sequence[str]
) -> tuple[EventDraft, ...]:
    """What is to be kept of a pod that failed; what cannot be read is noted, never raised.

    Args:
        api: Of its cluster.
        pod: Its latest state; it need not exist any more.
        tail_bytes: How much of each log, in bytes of UTF-8 before decoding.
        secrets: Tokens to black out; others of the service are known by their form.
    """
    redact = Redaction(secrets)
    drafts = [
        EventDraft(event_type="log", data=data)
        for status in _worth_reading(pod)
        if (data := await _read_log(api, pod, status, tail_bytes, redact)) is not None
    ]
    told = await _read_cluster(api, pod, redact)
    if told is not None:
        drafts.append(EventDraft(event_type="cluster", data=told))
    return tuple(drafts)


def _worth_reading(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Statuses of containers that have run and may say why: the agent's first."""
    status = pod.get("status") or {}
    chosen = []
    for container in (
        *(status.get("containerStatuses") or ()),
        *(status.get("initContainerStatuses") or ()),
    ):
        ended = _ended(container)
        has_run = ended is not None or "running" in (container.get("state") or {})
        has_failed = ended is not None and ended.get("exitCode") not in _SIGNALLED
        if has_failed or (has_run and container["name"] == AGENT):
            chosen.append(container)
    return sorted(chosen, key=lambda container: container["name"] != AGENT)


async def _read_log(
    api: EvidenceApi,
    pod: Mapping[str, Any],
    status: Mapping[str, Any],
    tail_bytes: int,
    redact: Redaction,
) -> dict[str, Any] | None:
    size = tail_bytes + redact.longest
    lines = max(STATUS_TAIL_LINES, tail_bytes // 16)
    data: dict[str, Any] = {"container": status["name"], "text": "", "truncated": False}
    raw: bytes | None = None
    try:
        raw = await api.log_tail(
            pod["metadata"]["name"], status["name"], lines=lines, size_bytes=size
        )
    except Exception as exc:
        data["problem"] = redact.text(f"the log could not be read: {exc}")
        _complain("a log could not be read", pod, exc)
    if raw is not None and raw.startswith(NO_LOG):
        raw = None
    if raw:
        start = max(0, len(raw) - tail_bytes)
        is_whole = start == 0 and raw.count(b"\n") < lines
        return data | {"text": redact.tail(raw, start), "truncated": not is_whole}
    kept = ((_ended(status) or {}).get("message") or "").encode(errors="replace")
    if kept:
        return data | _read_status_tail(kept, tail_bytes, redact)
    if raw is None and "problem" not in data:
        data["problem"] = "the cluster no longer has the log"
    return data if "problem" in data else None


def _read_status_tail(kept: bytes, tail_bytes: int, redact: Redaction) -> dict[str, Any]:
    """The end of the log as the container's status has it, which outlives the pod."""
    # Characters are never cut there, so a full tail may be a few bytes short.
    is_cut = len(kept) > STATUS_TAIL_BYTES - 4 or kept.count(b"\n") >= STATUS_TAIL_LINES - 1
    start = max(0, len(kept) - tail_bytes)
    if is_cut:
        # Nothing shows whether the first word is the rest of a token.
        start = max(start, end_of_first_word(kept))
    return {"text": redact.tail(kept, start), "truncated": is_cut or start > 0}


async def _read_cluster(
    api: EvidenceApi, pod: Mapping[str, Any], redact: Redaction
) -> dict[str, Any] | None:
    """What the cluster says of a pod: its warnings, and why it ended the pod."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    said: dict[str, Any] = {}
    try:
        selector = f"involvedObject.uid={metadata['uid']}"
        listing = await api.list("events", field_selector=selector)
        said["events"] = _warnings(listing.items, redact)
    except Exception as exc:
        said["problem"] = redact.text(f"the pod's events could not be read: {exc}")
        _complain("a pod's events could not be read", pod, exc)
    said["reason"] = status.get("reason")
    said["message"] = redact.text(status.get("message") or "")
    said["conditions"] = [
        _facts(condition, ("type", "reason", "message"), redact)
        for condition in status.get("conditions") or ()
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True"
    ]
    said = {name: value for name, value in said.items() if value}
    if not said:
        return None
    node = (pod.get("spec") or {}).get("nodeName")
    return {"pod": metadata["name"], "node": node} | said


def _warnings(events: Iterable[Mapping[str, Any]], redact: Redaction) -> list[dict[str, Any]]:
    """The latest ones, in the order of time."""
    warnings = [event for event in events if event.get("type") == "Warning"]
    return [
        _facts(event, ("reason", "message"), redact)
        | {
            "count": (event.get("series") or {}).get("count") or event.get("count") or 1,
            "last_seen": event_time(event),
        }
        for event in sorted(warnings, key=event_time)[-MAX_EVENTS:]
    ]


def _facts(source: Mapping[str, Any], names: Iterable[str], redact: Redaction) -> dict[str, Any]:
    texts = {name: redact.text(str(source.get(name) or "")) for name in names}
    return {name: text[:MAX_MESSAGE_CHARACTERS] for name, text in texts.items()}


def _ended(status: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for name in ("state", "lastState"):
        ended: Mapping[str, Any] | None = (status.get(name) or {}).get("terminated")
        if ended is not None:
            return ended
    return None


def _complain(text: str, pod: Mapping[str, Any], exc: Exception) -> None:
    extra = {"pod": pod["metadata"]["name"], "problem": str(exc)}
    log.warning(text, extra=extra, exc_info=None if isinstance(exc, AglError) else exc)
