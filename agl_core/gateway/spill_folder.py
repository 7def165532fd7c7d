"""Which folder a service spills to: one writer each, and what a dead writer left is taken over."""

from __future__ import annotations

import fcntl
import logging
import os
import re
from pathlib import Path

from agl_core.errors import ConfigError

log = logging.getLogger(__name__)

LINES = ".spill"
DONE = ".done"
_NAME = re.compile(r"(\d{8})(\.spill|\.done)")
_LOCK = "lock"
# Services that share a folder; more than that is a mistake in some loop.
_MOST_SERVICES = 256


def claim(folder: Path, kind: str) -> tuple[Path, int]:
    """Lock the first free numbered folder below ``folder`` and return it and its lock.

    Several services may share ``folder`` (tests, two ports of one machine): each gets its own.
    What lies in a folder that nobody holds any more is moved into the one that is returned.

    Args:
        folder: As configured.
        kind: Services of another kind keep away from each other's records.

    Raises:
        ConfigError: The folder cannot be made, or not be written to.
    """
    own: tuple[Path, int] | None = None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(_MOST_SERVICES):
            place = folder / f"{kind}-{number}"
            if own is not None and not place.exists():
                break
            place.mkdir(mode=0o700, exist_ok=True)
            lock = _lock(place)
            if lock is None:
                continue
            if own is None:
                own = (place, lock)
            else:
                _take_over(place, own[0])
                os.close(lock)
    except OSError as exc:
        if own is not None:
            os.close(own[1])
        raise ConfigError(
            f"capture.spill_dir {str(folder)!r} cannot be used: {exc.strerror or exc}",
            hint="name a folder on a local disk that this user may write to",
        ) from exc
    if own is None:
        raise ConfigError(
            f"capture.spill_dir {str(folder)!r} is used by {_MOST_SERVICES} services already",
            hint="give each service a folder of its own",
        )
    return own


def _lock(place: Path) -> int | None:
    descriptor = os.open(place / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def numbers(place: Path) -> list[int]:
    """The segments of a folder, oldest first."""
    return sorted(number for number, suffix in _files(place) if suffix == LINES)


def next_number(place: Path) -> int:
    """A number that no file of the folder has."""
    return max((number for number, _ in _files(place)), default=0) + 1


def path_of(place: Path, number: int, suffix: str) -> Path:
    """Where a segment's lines lie, or the notes of which of them are done."""
    return place / f"{number:08d}{suffix}"


def _files(place: Path) -> list[tuple[int, str]]:
    found = (_NAME.fullmatch(path.name) for path in place.iterdir())
    return [(int(match[1]), match[2]) for match in found if match is not None]


def _take_over(place: Path, own: Path) -> None:
    for number in numbers(place):
        new = next_number(own)
        # First the notes: notes without lines are thrown away, lines without notes told twice.
        for suffix in (DONE, LINES):
            path = path_of(place, number, suffix)
            if path.exists():
                path.rename(path_of(own, new, suffix))
        log.warning(
            "took over what another service spilled", extra={"from": str(place), "to": str(own)}
        )
