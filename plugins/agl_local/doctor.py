"""What ``agl doctor`` finds on this machine."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

from agl_core.interfaces import Finding
from agl_local.config import LocalConfig

FREE_BYTES = 1 << 30


async def examine(root: Path, config: LocalConfig) -> AsyncIterator[Finding]:
    """See ``Runner.examine``; ``root`` is the state directory."""
    yield await asyncio.to_thread(_look_at_directory, root)
    if config.command and shutil.which(config.command[0]) is None:
        yield Finding(
            subject="command",
            status="failed",
            message=f"{config.command[0]!r} is no program that this machine finds",
            hint="correct plugins.local.command",
        )


def _look_at_directory(root: Path) -> Finding:
    subject, name = "state directory", str(root)
    trial = root / f".trial-{uuid.uuid4().hex}"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        trial.write_bytes(b"")
        trial.unlink()
        free = shutil.disk_usage(root).free
    except OSError as exc:
        hint = "set plugins.local.state_dir to a directory that can be written to"
        return Finding(subject=subject, status="failed", message=f"{name}: {exc}", hint=hint)
    if free < FREE_BYTES:
        message = f"{name} has only {free >> 20} MiB of disk left"
        return Finding(subject=subject, status="warning", message=message, hint="free some")
    is_used = _is_used(root / "runner.lock")
    told = "a controller works on it" if is_used else "no controller works on it now"
    return Finding(subject=subject, status="ok", message=f"{name} can be written to; {told}")


def _is_used(lock: Path) -> bool:
    if not lock.exists():
        return False
    descriptor = os.open(lock, os.O_RDWR)
    try:
        # Shared: a controller that starts at this very moment tries for some seconds.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
