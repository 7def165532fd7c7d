"""Server-sent events as bytes: whole events out of any split of the stream, nothing lost.

The format is that of the WHATWG HTML standard, section 9.2 "Server-sent events": lines end in CRLF,
LF or CR, a blank line ends an event, a line that starts with a colon is a comment.
"""

from __future__ import annotations

import re

# A CR is a line end of its own only when the byte after it is known not to be an LF.
_LINE_END = rb"(?:\r\n|\n|\r(?=[^\n]))"
_EVENT_END = re.compile(_LINE_END + _LINE_END)
_LINE = re.compile(rb"([^\r\n]*)(\r\n|\n|\r|\Z)")
_LONGEST_END = 4


class EventSplitter:
    """Cuts a stream of bytes into events, each with the blank line that ends it.

    Joined, the events and ``rest`` are exactly the bytes that were fed, and where the cuts fall
    does not depend on how the bytes were split over the calls.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0
        self._has_cr = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that ``data`` completes."""
        if not self._has_cr and b"\r" in data:
            self._has_cr = True
        if not self._buffer and not self._has_cr and data.find(b"\n\n") == len(data) - 2 >= 0:
            return [data]
        buffer = self._buffer
        buffer += data
        events: list[bytes] = []
        start, search = 0, self._searched
        while (end := self._event_end(search)) >= 0:
            events.append(bytes(buffer[start:end]))
            start = search = end
        del buffer[:start]
        self._searched = max(0, len(buffer) - (_LONGEST_END - 1))
        return events

    def _event_end(self, search: int) -> int:
        if self._has_cr:
            match = _EVENT_END.search(self._buffer, search)
            return match.end() if match else -1
        # Without a CR the search is a plain find, which costs next to nothing on long events.
        at = self._buffer.find(b"\n\n", search)
        return at + 2 if at >= 0 else -1

    @property
    def rest(self) -> bytes:
        """The bytes after the last whole event."""
        return bytes(self._buffer)

    def take_rest(self) -> bytes:
        """Return the bytes after the last whole event and forget them."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        self._searched = 0
        return rest


def whole_events(data: bytes) -> bytes:
    """Return the bytes up to the end of the last whole event."""
    return b"".join(EventSplitter().feed(data))


def ends_event(data: bytes) -> bool:
    """Tell whether bytes end with a blank line, so that a new event can follow."""
    return data.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))


def _is_plain(event: bytes) -> bool:
    """Tell whether the event is one ``data`` line with LF ends, as nearly all are."""
    return (
        event.startswith(b"data:")
        and event.find(b"\n") == len(event) - 2
        and event.endswith(b"\n\n")
        and b"\r" not in event
    )


def data_of(event: bytes) -> bytes | None:
    """Return the event's data, its lines joined by LF; None where it has none (a comment)."""
    if _is_plain(event):
        return event[6:-2] if event.startswith(b"data: ") else event[5:-2]
    parts = [
        _value(line)
        for line, _end in _LINE.findall(event)
        if line == b"data" or line[:5] == b"data:"
    ]
    return b"\n".join(parts) if parts else None


def _value(line: bytes) -> bytes:
    value = line[5:]
    return value[1:] if value.startswith(b" ") else value


def with_data(event: bytes, data: bytes) -> bytes:
    """Return the event with its data replaced by one line; all else in it stays."""
    if _is_plain(event):
        return (b"data: " if event.startswith(b"data: ") else b"data:") + data + b"\n\n"
    out: list[bytes] = []
    replaced = False
    for line, end in _LINE.findall(event):
        if line == b"data" or line[:5] == b"data:":
            if not replaced:
                out += (b"data: " if line[5:6] == b" " else b"data:", data, end)
                replaced = True
        else:
            out += (line, end)
    return b"".join(out)
