"""What the local runner keeps on disk, so that a controller started anew finds everything.

One directory per rollout::

    work.json        what is to be run; without it the directory counts as absent
    token            the rollout's tokens, the latest last
    state.json       attempts, requests to stop, the outcome
    <attempt id>/    lock, process, exit, output, input.json, work/ (where the agent runs)

Everything is readable by its owner alone and replaced as a whole, never written in place.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen

from agl_core.records import Attempt, Rollout, RolloutError
from agl_core.redaction import Redaction
from agl_core.wire import read_json, structure_answer, to_json

StopReason = Literal["cancelled", "timeout"]
Outcome = Literal["succeeded", "failed", "cancelled"]

OUTPUT = "output"
"""The file of an attempt with all that it has printed."""
_TRASH = ".trash-"


@frozen(kw_only=True)
class SavedWork:
    """What is to be run, without the token."""

    rollout: Rollout
    agent_url: str


@frozen(kw_only=True)
class RunState:
    """What has become of a rollout so far."""

    attempts: tuple[Attempt, ...] = ()
    stops: Mapping[str, StopReason] = field(factory=dict)
    """By attempt id: why it was told to end, noted before the signal is sent."""
    cancelled: bool = False
    """No further attempt is made."""
    outcome: Outcome | None = None
    succeeded_attempt_id: str | None = None
    error: RolloutError | None = None


class RunFiles:
    """The files of one rollout."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save_work(self, work: SavedWork, token: str) -> None:
        """Note a rollout before anything of it is started."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
        self.save_tokens([token])
        _replace(self.directory / "work.json", to_json(work))

    def save_tokens(self, tokens: list[str]) -> None:
        _replace(self.directory / "token", "\n".join(tokens).encode())

    def save_state(self, state: RunState) -> None:
        _replace(self.directory / "state.json", to_json(state))

    def load(self) -> tuple[SavedWork, list[str], RunState]:
        """Read everything back.

        Raises:
            OSError: A file is missing or unreadable.
            AglError: A file is damaged.
        """
        work = _read(self.directory / "work.json", SavedWork)
        tokens = (self.directory / "token").read_text().splitlines()
        path = self.directory / "state.json"
        state: RunState = _read(path, RunState) if path.exists() else RunState()
        return work, tokens, state

    def attempt(self, attempt_id: str) -> Path:
        return self.directory / attempt_id

    def create_attempt(self, attempt_id: str, rollout: Rollout) -> Path:
        """Make an attempt's directory, with an empty one for the agent to run in."""
        directory = self.attempt(attempt_id)
        (directory / "work").mkdir(mode=0o700, parents=True, exist_ok=True)
        if rollout.config.input_delivery == "file":
            _replace(directory / "input.json", to_json(rollout.input))
        return directory

    def drop_attempt(self, attempt_id: str) -> None:
        shutil.rmtree(self.attempt(attempt_id), ignore_errors=True)

    def read_tail(self, attempt_id: str, size_bytes: int, tokens: list[str]) -> dict[str, Any]:
        """The end of an attempt's output as the data of a ``log`` event, tokens blacked out."""
        redact = Redaction(tokens)
        try:
            with (self.attempt(attempt_id) / OUTPUT).open("rb") as output:
                total = output.seek(0, os.SEEK_END)
                output.seek(max(0, total - size_bytes - redact.longest))
                raw = output.read(size_bytes + redact.longest)
        except FileNotFoundError:
            total, raw = 0, b""
        text = redact.tail(raw, max(0, len(raw) - size_bytes))
        return {"stream": "output", "text": text, "truncated": total > size_bytes}

    def take_away(self, kept: Path | None) -> Path | None:
        """Make the rollout unknown in one step; returns what is still to be removed.

        With ``kept``, a folder, everything but the token moves there and nothing remains.
        """
        (self.directory / "work.json").unlink(missing_ok=True)
        (self.directory / "token").unlink(missing_ok=True)
        unique = uuid.uuid4().hex
        if kept is not None:
            kept.mkdir(mode=0o700, exist_ok=True)
            self.directory.rename(kept / f"{self.directory.name}-{unique[:8]}")
            return None
        trash = self.directory.with_name(f"{_TRASH}{unique}")
        self.directory.rename(trash)
        return trash


class StateDirectory:
    """All rollouts of a runner on disk."""

    def __init__(self, path: Path) -> None:
        self.kept = path / "kept"
        self._rollouts = path / "rollouts"
        self._rollouts.mkdir(mode=0o700, parents=True, exist_ok=True)

    def files(self, rollout_id: str) -> RunFiles:
        return RunFiles(self._rollouts / directory_name(rollout_id))

    def scan(self) -> Iterator[RunFiles]:
        """Every rollout that was noted; leftovers of others are removed."""
        for directory in sorted(self._rollouts.iterdir()):
            if (directory / "work.json").exists():
                yield RunFiles(directory)
            else:
                shutil.rmtree(directory, ignore_errors=True)


def directory_name(rollout_id: str) -> str:
    """A file name for any rollout id: readable at the front, distinct by its end."""
    slug = re.sub(r"[^A-Za-z0-9_-]+", "-", rollout_id)[:40].strip("-")
    return f"{slug or 'r'}-{hashlib.sha256(rollout_id.encode()).hexdigest()[:20]}"


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    temporary.replace(path)


def _read(path: Path, kind: type[Any]) -> Any:
    return structure_answer(read_json(path.read_bytes(), str(path)), kind)
