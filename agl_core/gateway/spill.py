"""Events on disk that the store would not take: appended, read back, done with.

Everything here blocks; ``spill_thread.py`` calls it from a thread of its own.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from attrs import define, field, frozen

from agl_core.errors import ConfigError, StoreError
from agl_core.gateway.spill_folder import DONE, LINES, claim, next_number, numbers, path_of
from agl_core.gateway.spill_segment import (
    SpilledEvent,
    decode,
    encode,
    scan,
    sync_folder,
    write_all,
)

log = logging.getLogger(__name__)

_SEGMENT_BYTES = 16 * 2**20
# A note is an offset with leading zeros and a line feed; one that is cut off is not read.
_NOTE_DIGITS = 16


@frozen(kw_only=True, eq=False)
class Entry:
    """One spilled event that waits for its replay; its content stays on disk."""

    number: int
    """Counts up in the order of spilling."""
    rollout_id: str
    identity: str
    segment: _Segment = field(repr=False)
    offset: int
    size: int


@define(eq=False)
class _Segment:
    number: int
    lines: Path
    notes: Path
    size_bytes: int = 0
    waiting: int = 0
    """Entries that are not done."""


class SpillFile:
    """Segments of lines below a folder that this object alone writes to.

    Args:
        folder: As configured; services may share it.
        max_bytes: Of all segments together.
        keeps: Whether what a former service left is of use. A store that keeps nothing across a
            restart does not know its rollouts, and must not mistake new ones for them.
        segment_bytes: A segment past this is followed by another. One is removed when all of its
            entries are done.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        keeps: bool = True,
        segment_bytes: int = _SEGMENT_BYTES,
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._keeps = keeps
        self._segment_bytes = segment_bytes
        self._place: Path | None = None
        self._lock = -1
        self._segments: list[_Segment] = []
        self._writing: _Segment | None = None
        self._descriptor = -1
        self._next_entry = 1
        self._entries: dict[str, dict[int, Entry]] = {}
        # Held for a moment around the index only, never while the disk works.
        self._index = threading.Lock()
        self.damaged = 0
        """Entries that could not be read back."""

    # --- what there is; may be asked from any thread

    def holds(self, rollout_id: str) -> bool:
        """Whether anything of a rollout waits for its replay."""
        return rollout_id in self._entries

    def rollouts(self) -> list[str]:
        """The rollouts with waiting entries, the one that waits longest first."""
        with self._index:
            return list(self._entries)

    def entries(self, rollout_id: str) -> list[Entry]:
        """What waits of a rollout, oldest first."""
        with self._index:
            return list(self._entries.get(rollout_id, {}).values())

    def __len__(self) -> int:
        with self._index:
            return sum(map(len, self._entries.values()))

    @property
    def size_bytes(self) -> int:
        """Of all segments together."""
        with self._index:
            return sum(segment.size_bytes for segment in self._segments)

    # --- life

    @property
    def is_open(self) -> bool:
        return self._place is not None

    def open(self) -> None:
        """Claim a folder and read what waits there.

        Raises:
            ConfigError: The folder cannot be used.
        """
        if self._place is not None:
            return
        self._place, self._lock = claim(self._folder, "durable" if self._keeps else "memory")
        for path in self._place.glob(f"*{DONE}"):
            if not path.with_suffix(LINES).exists():
                path.unlink()
        for number in numbers(self._place):
            segment = self._segment(number)
            self._segments.append(segment)
            if self._keeps:
                self._read(segment)
            self._remove_if_done(segment)
        if len(self):
            log.warning(
                "events of an earlier service wait for their replay",
                extra={"events": len(self), "folder": str(self._place)},
            )

    def close(self) -> None:
        """Let go of the folder; what waits in it stays, if it is of use to a later service."""
        if self._place is None:
            return
        self._seal()
        if not self._keeps:
            for segment in list(self._segments):
                segment.waiting = 0
                self._remove_if_done(segment)
        os.close(self._lock)
        self._place, self._lock = None, -1
        with self._index:
            self._segments.clear()
            self._entries.clear()

    def _segment(self, number: int) -> _Segment:
        assert self._place is not None
        return _Segment(
            number, path_of(self._place, number, LINES), path_of(self._place, number, DONE)
        )

    def _read(self, segment: _Segment) -> None:
        done = _read_notes(segment.notes)
        for line in scan(segment.lines):
            segment.size_bytes += line.size
            if line.offset in done:
                continue
            if line.event is not None:
                self._enter(segment, line.event, line.offset, line.size)
                continue
            where = {"file": str(segment.lines), "offset": line.offset, "bytes": line.size}
            if line.is_torn:
                # A crash within a write: nobody was told yet that this event is safe.
                log.warning("left out a spilled event that was cut off", extra=where)
            else:
                self.damaged += 1
                log.error("a spilled event is damaged and lost", extra=where)

    def _enter(self, segment: _Segment, event: SpilledEvent, offset: int, size: int) -> None:
        entry = Entry(
            number=self._next_entry,
            rollout_id=event.rollout_id,
            identity=event.identity,
            segment=segment,
            offset=offset,
            size=size,
        )
        with self._index:
            self._next_entry += 1
            segment.waiting += 1
            self._entries.setdefault(event.rollout_id, {})[entry.number] = entry

    # --- writing

    def append(self, events: Sequence[SpilledEvent]) -> None:
        """Keep events, all or none; they are on the disk when this returns.

        Raises:
            StoreError: There is no room, or the disk fails.
        """
        try:
            lines = [encode(event) for event in events]
        except Exception as exc:
            raise StoreError(f"an event cannot be written as JSON: {exc}") from exc
        size = sum(map(len, lines))
        used = self.size_bytes
        if used + size > self._max_bytes:
            raise StoreError(
                f"the spill is full: {used} bytes of at most {self._max_bytes}",
                hint="bring the store back, or raise capture.spill_max_bytes",
                details={"size_bytes": used, "max_bytes": self._max_bytes},
            )
        try:
            segment = self._writable()
            write_all(self._descriptor, b"".join(lines))
        except ConfigError as exc:
            raise StoreError(exc.message, hint=exc.hint) from exc
        except OSError as exc:
            self._give_up_writing()
            raise StoreError(f"the spill failed: {exc.strerror or exc}") from exc
        for event, line in zip(events, lines, strict=True):
            self._enter(segment, event, segment.size_bytes, len(line))
            segment.size_bytes += len(line)

    def _writable(self) -> _Segment:
        if self._place is None:
            self.open()
        if self._writing is not None and self._writing.size_bytes >= self._segment_bytes:
            self._seal()
        if self._writing is None:
            assert self._place is not None
            segment = self._segment(next_number(self._place))
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(segment.lines, flags, 0o600)
            sync_folder(self._place)
            self._writing = segment
            with self._index:
                self._segments.append(segment)
        return self._writing

    def _give_up_writing(self) -> None:
        """What a failed write left is cut off, and nothing is put behind it any more."""
        if self._writing is None:
            return
        try:
            os.ftruncate(self._descriptor, self._writing.size_bytes)
        except OSError:
            # A whole line may stay behind: after a restart it is an event too many, of a call
            # whose agent was told that it failed.
            log.exception("the spill could not be cut", extra={"file": str(self._writing.lines)})
        self._seal()

    def _seal(self) -> None:
        segment, self._writing = self._writing, None
        if segment is not None:
            os.close(self._descriptor)
            self._descriptor = -1
            self._remove_if_done(segment)

    # --- reading back

    def read(self, entry: Entry) -> SpilledEvent:
        """The event of an entry.

        Raises:
            Damaged: The disk does not give back what was written.
            StoreError: It gives back nothing now.
        """
        try:
            with entry.segment.lines.open("rb") as file:
                file.seek(entry.offset)
                return decode(file.read(entry.size))
        except OSError as exc:
            raise StoreError(f"the spill cannot be read: {exc.strerror or exc}") from exc

    def done(self, entries: Sequence[Entry]) -> None:
        """Forget entries: the store has them, or they are lost for good."""
        notes: dict[_Segment, list[int]] = {}
        with self._index:
            for entry in entries:
                of_rollout = self._entries.get(entry.rollout_id, {})
                if of_rollout.pop(entry.number, None) is None:
                    continue
                if not of_rollout:
                    del self._entries[entry.rollout_id]
                entry.segment.waiting -= 1
                notes.setdefault(entry.segment, []).append(entry.offset)
        for segment, offsets in notes.items():
            if segment.waiting == 0:
                if segment is self._writing:
                    self._seal()
                else:
                    self._remove_if_done(segment)
            else:
                _write_notes(segment.notes, offsets)

    def _remove_if_done(self, segment: _Segment) -> None:
        if segment.waiting:
            return
        with self._index:
            if segment in self._segments:
                self._segments.remove(segment)
        try:
            segment.lines.unlink(missing_ok=True)
            segment.notes.unlink(missing_ok=True)
        except OSError:
            log.exception("a spilled file stays behind", extra={"file": str(segment.lines)})


def _read_notes(path: Path) -> set[int]:
    if not path.exists():
        return set()
    lines = path.read_bytes().split(b"\n")[:-1]
    return {int(line) for line in lines if len(line) == _NOTE_DIGITS and line.isdigit()}


def _write_notes(path: Path, offsets: Sequence[int]) -> None:
    """Not brought to the disk at once: a replay looks in the store for what it finds."""
    text = b"".join(b"%0*d\n" % (_NOTE_DIGITS, offset) for offset in offsets)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, text)
        finally:
            os.close(descriptor)
    except OSError:
        log.exception("the spill could not be marked", extra={"file": str(path)})
