"""Timers of a call: none of them costs anything per chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class TotalTimer:
    """Ends a call that takes too long; time in which its policy is paused does not count."""

    def __init__(
        self, seconds: float | None, paused: Callable[[], float], on_end: Callable[[], object]
    ) -> None:
        self._paused = paused
        self._paused_before = paused()
        self._on_end = on_end
        self._handle = (
            None if seconds is None else asyncio.get_running_loop().call_later(seconds, self._look)
        )

    def _look(self) -> None:
        paused = self._paused()
        grown = paused - self._paused_before
        if grown > 0.001:
            self._paused_before = paused
            self._handle = asyncio.get_running_loop().call_later(grown, self._look)
            return
        self._on_end()

    def cancel(self) -> None:
        """The call has ended."""
        if self._handle is not None:
            self._handle.cancel()


class Heartbeat:
    """Calls ``beat`` when nothing was written for a while; costs nothing per chunk."""

    def __init__(
        self, seconds: float | None, last_write: Callable[[], float], beat: Callable[[], None]
    ) -> None:
        self._seconds = seconds
        self._last_write = last_write
        self._beat = beat
        self._loop = asyncio.get_running_loop()
        self._handle = None if seconds is None else self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        assert self._seconds is not None
        quiet = self._loop.time() - self._last_write()
        if quiet + 0.001 >= self._seconds:
            self._beat()
            quiet = 0.0
        self._handle = self._loop.call_later(self._seconds - quiet, self._look)

    def cancel(self) -> None:
        """The stream is over."""
        if self._handle is not None:
            self._handle.cancel()
