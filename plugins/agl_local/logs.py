"""What attempts have printed: read from their files as long as these are kept."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

from agl_core.clock import Clock
from agl_core.errors import Invalid, NotFound
from agl_core.redaction import RedactedStream
from agl_local.process import has_begun, is_locked
from agl_local.state import OUTPUT, directory_name

POLL_SECONDS = 0.2
PIECE_BYTES = 65_536


async def read_log(
    root: Path,
    rollout_id: str,
    attempt_id: str,
    *,
    container: str | None,
    tail_lines: int | None,
    follow: bool,
    clock: Clock,
) -> AsyncIterator[bytes]:
    """See ``Runner.logs``; ``root`` is the runner's ``state_dir``."""
    if container is not None:
        raise Invalid(
            f"a local attempt has no container {container!r}", hint="leave --container out"
        )
    directory = _find(root, rollout_id, attempt_id)
    if directory is None:
        raise NotFound(
            f"attempt {attempt_id!r} of rollout {rollout_id!r} has no output under {str(root)!r}",
            hint="run this on the controller's machine, from the directory it was started in; "
            "files of rollouts that are over are kept only with plugins.local.keep = true",
        )
    redacted = RedactedStream()
    with (directory / OUTPUT).open("rb") as output:
        output.seek(await asyncio.to_thread(_start_of_tail, output, tail_lines))
        while True:
            # Looked at first: what is written before the end is read after it.
            has_ended = not follow or (has_begun(directory) and not is_locked(directory))
            while piece := await asyncio.to_thread(output.read, PIECE_BYTES):
                if shown := redacted.feed(piece):
                    yield shown
            if has_ended or not directory.exists():
                break
            await clock.sleep(POLL_SECONDS)
    if shown := redacted.finish():
        yield shown


def _find(root: Path, rollout_id: str, attempt_id: str) -> Path | None:
    """The directory of an attempt, also of one that is kept after its end."""
    if Path(attempt_id).name != attempt_id or attempt_id in ("", ".", ".."):
        return None
    name = directory_name(rollout_id)
    kept = sorted((root / "kept").glob(f"{name}-*"), key=lambda path: path.stat().st_mtime)
    for directory in (root / "rollouts" / name, *reversed(kept)):
        if (directory / attempt_id / OUTPUT).exists():
            return directory / attempt_id
    return None


def _start_of_tail(output: IO[bytes], lines: int | None) -> int:
    """Where the last lines begin. The end of the last line is none of theirs."""
    if lines is None:
        return 0
    position = output.seek(0, os.SEEK_END)
    if lines == 0:
        return position
    found = -1  # the last line's own end does not begin another
    is_first = True
    while position > 0:
        size = min(PIECE_BYTES, position)
        position -= size
        output.seek(position)
        block = output.read(size)
        if is_first and not block.endswith(b"\n"):
            found = 0
        is_first = False
        end = len(block)
        while (at := block.rfind(b"\n", 0, end)) >= 0:
            found += 1
            if found == lines:
                return position + at + 1
            end = at
    return 0
