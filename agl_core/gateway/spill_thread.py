"""The spill as the event loop uses it: its own thread, and one fsync for all who wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from agl_core.errors import StoreError
from agl_core.gateway.spill import Entry, SpillFile
from agl_core.gateway.spill_segment import SpilledEvent

T = TypeVar("T")
_Waiting = tuple[Sequence[SpilledEvent], "asyncio.Future[None]"]


class SpillThread:
    """Calls a ``SpillFile`` without ever holding up the event loop."""

    def __init__(self, file: SpillFile) -> None:
        self.file = file
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spill")
        self._waiting: list[_Waiting] = []
        self._writer: asyncio.Task[None] | None = None
        self._filled = asyncio.Event()

    async def open(self) -> None:
        """Claim the folder, if that has not been done.

        Raises:
            ConfigError: The folder cannot be used.
        """
        await self._call(self.file.open)
        self._note_fill()

    async def close(self) -> None:
        """Finish what is being written, and let go of the folder."""
        if self._writer is not None:
            await asyncio.wait({self._writer})
        await self._call(self.file.close)
        self._thread.shutdown(wait=False)

    async def append(self, events: Sequence[SpilledEvent]) -> None:
        """Keep events, in the order of the calls; a caller that is cancelled changes nothing.

        Raises:
            StoreError: They are not kept.
        """
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((events, written))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write(), name="spill")
        await asyncio.shield(written)

    async def _write(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            try:
                await self._call(self.file.append, [e for events, _ in group for e in events])
            except Exception as exc:
                if len(group) == 1:
                    _tell(group[0][1], exc)
                else:
                    # What does not fit together may fit in part, and one bad event is not all.
                    await self._write_each(group)
            else:
                for _, written in group:
                    _tell(written)
            self._note_fill()
        self._writer = None

    async def _write_each(self, group: Sequence[_Waiting]) -> None:
        for events, written in group:
            try:
                await self._call(self.file.append, events)
            except Exception as exc:
                _tell(written, exc)
            else:
                _tell(written)

    async def read(self, entry: Entry) -> SpilledEvent:
        """The event of an entry.

        Raises:
            Damaged: The disk does not give back what was written.
        """
        return await self._call(self.file.read, entry)

    async def done(self, entries: Sequence[Entry]) -> None:
        """Forget entries."""
        await self._call(self.file.done, entries)
        self._note_fill()

    async def until_filled(self) -> None:
        """Wait until something waits for its replay."""
        await self._filled.wait()

    def _note_fill(self) -> None:
        if self.file.rollouts():
            self._filled.set()
        else:
            self._filled.clear()

    async def _call(self, function: Callable[..., T], *arguments: object) -> T:
        loop = asyncio.get_running_loop()
        # A cancelled wait does not stop the thread, so nothing here may be half done by it.
        return await asyncio.shield(loop.run_in_executor(self._thread, function, *arguments))


def _tell(written: asyncio.Future[None], exc: Exception | None = None) -> None:
    if exc is None:
        written.set_result(None)
        return
    if not isinstance(exc, StoreError):
        exc = StoreError(f"the spill failed: {exc}")
    written.set_exception(exc)
    written.exception()  # whoever waited may have been cancelled
