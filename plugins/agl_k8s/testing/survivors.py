"""Processes that have left the session of their container, and must die with it all the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
PASSES = 5


def kill_survivors(log: Path, home: Path) -> None:
    """Kill what a container that has ended left behind, wherever it went.

    A real container is a name space of process numbers: nothing outlives its first process. Here
    its processes are known by what only they have: its log as their output, or its home. One that
    gave up both stays. Where there is no ``/proc``, only the session of the container is killed.

    Args:
        log: The file that the container writes to.
        home: ``HOME`` of the container, which no other has.
    """
    for _ in range(PASSES):  # one that is killed may just have started another
        found = [*_belonging(log, home)]
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return


def _belonging(log: Path, home: Path) -> Iterator[int]:
    if not PROC.is_dir():
        return
    marker = b"HOME=" + os.fsencode(home)
    for entry in PROC.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        # Others' processes may not be looked into, and any may end while it is.
        with suppress(OSError):
            outputs = (entry / "fd" / "1", entry / "fd" / "2")
            variables = (entry / "environ").read_bytes().split(b"\0")
            if marker in variables or log in [o.readlink() for o in outputs if o.is_symlink()]:
                yield int(entry.name)
