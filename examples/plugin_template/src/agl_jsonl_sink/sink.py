"""The object that does the work."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import BinaryIO, Self

from agl_core.errors import PluginError
from agl_core.records import Event
from agl_core.wire import to_json


class JsonlSink:
    """Adds lines to a file; it is opened before the first request and closed after the last."""

    def __init__(self, path: str, types: frozenset[str] = frozenset()) -> None:
        self._path = Path(path)
        self._types = types
        self._file: BinaryIO | None = None

    async def __aenter__(self) -> Self:
        try:
            self._file = await asyncio.to_thread(self._path.open, "ab")
        except OSError as exc:
            raise PluginError(
                f"jsonl-sink cannot write {self._path}: {exc.strerror}",
                hint="set plugins.jsonl-sink.path",
            ) from exc
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._file is not None:
            await asyncio.to_thread(self._file.close)
            self._file = None

    async def receive(self, event: Event) -> None:
        if self._types and event.event_type not in self._types:
            return
        # In a thread: a slow disk must not stop the event loop, and with it every stream.
        await asyncio.to_thread(self._write, to_json(event) + b"\n")

    def _write(self, line: bytes) -> None:
        assert self._file is not None, "events come only while the sink is open"
        self._file.write(line)
        self._file.flush()
