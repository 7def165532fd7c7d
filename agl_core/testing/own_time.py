"""Time as a thread spends it itself, so that limits hold on machines that are busy otherwise."""

from __future__ import annotations

import time
from pathlib import Path

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


def own_seconds() -> float:
    """Seconds that go on while this thread works or waits, but not while it lacks a processor.

    Only differences mean something. What a thread waits for counts, be it a lock, a socket or a
    sleep: what other programs take from it does not. Where the system does not tell (Linux does,
    see its documentation, ``scheduler/sched-stats``), every second counts.
    """
    return time.perf_counter() - _seconds_without_processor()


def _seconds_without_processor() -> float:
    try:
        return int(_SCHEDSTAT.read_text("ascii").split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
