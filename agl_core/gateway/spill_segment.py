"""How spilled events lie in a file: one line each, which says itself whether it is whole.

A line is ``<crc32, 8 hex digits> <length of the JSON in bytes> <JSON>`` and a line feed. JSON holds
no raw line feed, so that after a damaged line reading goes on with the next.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from agl_core.errors import AglError
from agl_core.records import EventDraft
from agl_core.wire import read_json, to_json

# Checksum, length and the blanks between; a longer head is no head.
_LONGEST_HEAD = 32


class Damaged(Exception):
    """A line is not what was written."""


def identity_of(attempt_id: str, data: Mapping[str, Any]) -> str:
    """What tells a call's event from every other of its rollout.

    A call that is run again writes one event per try; its ``retries`` grow with each.
    """
    return f"{attempt_id} {data.get('call_id')} {data.get('retries')}"


@frozen(kw_only=True)
class SpilledEvent:
    """An event on its way to the store."""

    rollout_id: str
    attempt_id: str
    timestamp: float
    draft: EventDraft

    @property
    def identity(self) -> str:
        """See ``identity_of``."""
        return identity_of(self.attempt_id, self.draft.data)


@frozen(kw_only=True)
class Line:
    """A line found in a file; ``event`` is None where it is damaged."""

    offset: int
    size: int
    event: SpilledEvent | None
    is_torn: bool = False
    """The file ends within it, as after a crash."""


def encode(event: SpilledEvent) -> bytes:
    """An event as a line."""
    body = to_json(
        {
            "rollout_id": event.rollout_id,
            "attempt_id": event.attempt_id,
            "timestamp": event.timestamp,
            "event_type": event.draft.event_type,
            "data": event.draft.data,
        }
    )
    return b"%08x %d %s\n" % (zlib.crc32(body), len(body), body)


def decode(line: bytes) -> SpilledEvent:
    """A line as an event.

    Raises:
        Damaged: Length, checksum or content are wrong.
    """
    head = line[:_LONGEST_HEAD].split(b" ", 2)
    if len(head) != 3 or not line.endswith(b"\n"):
        raise Damaged("a line without its head or end")
    body = line[len(head[0]) + len(head[1]) + 2 : -1]
    try:
        checksum, length = int(head[0], 16), int(head[1])
    except ValueError as exc:
        raise Damaged("a line with a wrong head") from exc
    if length != len(body) or checksum != zlib.crc32(body):
        raise Damaged("length or checksum do not fit")
    try:
        fields: dict[str, Any] = read_json(body)
        return SpilledEvent(
            rollout_id=fields["rollout_id"],
            attempt_id=fields["attempt_id"],
            timestamp=fields["timestamp"],
            draft=EventDraft(event_type=fields["event_type"], data=fields["data"]),
        )
    except (AglError, KeyError, TypeError, ValueError) as exc:
        raise Damaged(f"content that is no event: {exc}") from exc


def scan(path: Path) -> Iterator[Line]:
    """Every line of a file, damaged ones too."""
    offset = 0
    with path.open("rb") as file:
        for raw in file:
            try:
                event = decode(raw)
            except Damaged:
                yield Line(
                    offset=offset, size=len(raw), event=None, is_torn=not raw.endswith(b"\n")
                )
            else:
                yield Line(offset=offset, size=len(raw), event=event)
            offset += len(raw)


def write_all(descriptor: int, data: bytes) -> None:
    """Write and bring to the disk.

    Raises:
        OSError: It is not there, or not whole.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Bring a folder's list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
