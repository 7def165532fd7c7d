"""Times as Kubernetes writes them."""

from __future__ import annotations

from datetime import UTC, datetime


def seconds_of(text: str) -> float:
    """Seconds since the epoch of an RFC 3339 time, such as ``2026-01-31T12:00:00Z``.

    Raises:
        ValueError: It is none.
    """
    return datetime.fromisoformat(text).timestamp()


def text_of(seconds: float, *, micro: bool = False) -> str:
    """The other way; ``micro`` writes microseconds, as leases do."""
    spec = "microseconds" if micro else "seconds"
    moment = datetime.fromtimestamp(seconds, UTC).isoformat(timespec=spec)
    return moment.replace("+00:00", "Z")
