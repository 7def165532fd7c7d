"""One rollout on this machine, from its first attempt to its outcome."""

from __future__ import annotations

import asyncio
import errno
import logging
import shutil
import signal
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from agl_core.clock import Clock
from agl_core.interfaces import RunReport
from agl_core.records import Attempt, EventDraft, Reason, RolloutError
from agl_local.config import LocalConfig
from agl_local.environment import CannotStart, build_environment, resolve_command
from agl_local.process import Process, adopt, has_begun, kill_survivors, launch, read_exit_code
from agl_local.state import Outcome, RunFiles, RunState, SavedWork, StopReason

log = logging.getLogger(__name__)

LONGEST_RETRY_SECONDS = 30.0

# What trying again cannot mend; other errors of a launch (no memory, no process left) pass.
_HOPELESS = frozenset(
    {
        errno.ENOENT,
        errno.EACCES,
        errno.EPERM,
        errno.ENOTDIR,
        errno.ENOEXEC,
        errno.E2BIG,
        errno.ELOOP,
        errno.ENAMETOOLONG,
    }
)


@attrs.frozen(kw_only=True)
class RunContext:
    """What all runs of a runner share."""

    config: LocalConfig
    clock: Clock
    node: str
    notify: Callable[[Run], None]


class Run:
    """Makes the attempts of a rollout, one after the other, and notes each step before it."""

    def __init__(
        self,
        context: RunContext,
        files: RunFiles,
        work: SavedWork,
        tokens: list[str],
        state: RunState,
    ) -> None:
        self._context = context
        self._files = files
        self._work = work
        self._tokens = tokens
        self._state = state
        self._evidence: dict[str, tuple[EventDraft, ...]] = {}
        self._wake = asyncio.Event()
        self._process: Process | None = None
        self._is_closing = False
        for attempt in state.attempts:
            if attempt.phase == "failed":
                self._keep_evidence(attempt.attempt_id)

    @property
    def rollout_id(self) -> str:
        return self._work.rollout.rollout_id

    @property
    def is_finished(self) -> bool:
        return self._state.outcome is not None

    def report(self) -> RunReport:
        """What is known now."""
        return RunReport(
            rollout_id=self.rollout_id,
            attempts=self._state.attempts,
            is_finished=self.is_finished,
            outcome=self._state.outcome,
            succeeded_attempt_id=self._state.succeeded_attempt_id,
            error=self._state.error,
            evidence=dict(self._evidence),
        )

    def renew_token(self, token: str) -> None:
        """The next attempt gets this one; the older ones are still blacked out in logs."""
        if token != self._tokens[-1]:
            self._tokens.append(token)
            self._files.save_tokens(self._tokens)

    def stop(self, reason: StopReason) -> None:
        """Ask for the end. An attempt that has ended by itself keeps its own end."""
        if self.is_finished:
            return
        stops = dict(self._state.stops)
        current = self._current()
        runs = current is not None and not self._has_ended(current.attempt_id)
        if current is not None and runs and stops.get(current.attempt_id) != "cancelled":
            stops[current.attempt_id] = reason
        is_cancelled = self._state.cancelled or reason == "cancelled"
        self._save(stops=stops, cancelled=is_cancelled)
        self._wake.set()

    def close(self) -> None:
        """Leave what runs to the next controller."""
        self._is_closing = True
        self._wake.set()

    async def drive(self) -> None:
        """Make attempts until none follows, or the runner closes."""
        faults = 0
        while not self.is_finished and not self._is_closing:
            try:
                await self._step()
                faults = 0
            except Exception:
                # A full disk, most likely. What runs goes on and is found again by its files.
                log.exception("a rollout is stuck", extra={"rollout_id": self.rollout_id})
                self._leave()
                faults += 1
                await self._wait(lambda: False, _backoff(1.0, faults))
        self._leave()

    async def _step(self) -> None:
        current = self._current()
        if current is None:
            if self._state.cancelled:
                self._finish("cancelled")
                return
            await self._begin()
            return
        if self._process is None:
            directory = self._files.attempt(current.attempt_id)
            self._process = await adopt(directory, self._context.clock)
            if self._process is None:
                await self._end_unseen(current.attempt_id)
                return
            self._process.watch(self._wake.set)
        self._context.notify(self)
        await self._await_end(self._process, current.attempt_id)
        if self._is_closing:
            return
        process, self._process = self._process, None
        code = await process.finish(self._context.clock)
        await self._end(current.attempt_id, code)

    async def _begin(self) -> None:
        """Note the next attempt, so that no launch is ever unknown, and launch it."""
        attempt = Attempt(
            attempt_id=uuid.uuid4().hex,
            node=self._context.node,
            started_at=self._context.clock.now(),
        )
        self._save(attempts=(*self._state.attempts, attempt))
        await self._start_process(attempt.attempt_id)

    async def _start_process(self, attempt_id: str) -> None:
        try:
            process = await asyncio.to_thread(self._launch, attempt_id)
        except (CannotStart, ValueError) as exc:
            await self._end(attempt_id, None, fault=("config", f"cannot start: {exc}"))
        except OSError as exc:
            reason: Reason = "config" if exc.errno in _HOPELESS else "infra"
            await self._end(attempt_id, None, fault=(reason, f"cannot start: {exc}"))
        else:
            self._process = process
            process.watch(self._wake.set)

    def _launch(self, attempt_id: str) -> Process:
        rollout = self._work.rollout
        directory = self._files.create_attempt(attempt_id, rollout)
        work_dir = self._context.config.work_dir
        cwd = Path(work_dir).resolve() if work_dir else directory / "work"
        environment = build_environment(
            rollout,
            attempt_id,
            agent_url=self._work.agent_url,
            token=self._tokens[-1],
            allowed=self._context.config.env_allow,
            input_file=directory / "input.json",
        )
        command = rollout.config.command or self._context.config.command or ()
        resolved = resolve_command([*command, *rollout.config.args], environment, cwd)
        return launch(directory, resolved, environment=environment, cwd=cwd)

    async def _await_end(self, process: Process, attempt_id: str) -> None:
        await self._wait(lambda: process.is_ended or attempt_id in self._state.stops)
        if process.is_ended or self._is_closing:
            return
        process.signal(signal.SIGTERM)
        await self._wait(lambda: process.is_ended, self._context.config.grace_seconds)
        if process.is_ended or self._is_closing:
            return
        process.signal(signal.SIGKILL)
        await self._wait(lambda: process.is_ended)

    async def _end_unseen(self, attempt_id: str) -> None:
        """An attempt that ended, or never began, while no controller watched."""
        directory = self._files.attempt(attempt_id)
        if not has_begun(directory):
            if attempt_id in self._state.stops:
                await self._end(attempt_id, None)
                return
            # Its id may have been reported, so it stays the same attempt.
            self._files.drop_attempt(attempt_id)
            await self._start_process(attempt_id)
            return
        await asyncio.to_thread(kill_survivors, directory, f"AGL_ATTEMPT_ID={attempt_id}")
        await self._end(attempt_id, read_exit_code(directory))

    async def _end(
        self, attempt_id: str, code: int | None, fault: tuple[Reason, str] | None = None
    ) -> None:
        asked = self._state.stops.get(attempt_id)
        changes: dict[str, Any] = {"exit_code": code, "finished_at": self._context.clock.now()}
        if asked is not None:
            changes["phase"] = "cancelled" if asked == "cancelled" else "failed"
            changes["reason"] = asked
        elif code == 0:
            changes["phase"] = "succeeded"
        else:
            reason = fault[0] if fault else "infra" if code is None else "agent"
            changes.update(phase="failed", reason=reason)
        attempts = tuple(
            attrs.evolve(attempt, **changes) if attempt.attempt_id == attempt_id else attempt
            for attempt in self._state.attempts
        )
        if changes["phase"] == "failed":
            self._keep_evidence(attempt_id)
        ended = next(a for a in attempts if a.attempt_id == attempt_id)
        if ended.phase == "succeeded":
            self._finish("succeeded", attempts=attempts, succeeded_attempt_id=attempt_id)
        elif self._state.cancelled:
            self._finish("cancelled", attempts=attempts)
        elif not self._may_retry(ended, attempts):
            message = fault[1] if fault else _sentence(ended)
            error = RolloutError(code=ended.reason or "infra", message=message)
            self._finish("failed", attempts=attempts, error=error)
        else:
            self._save(attempts=attempts)
            self._context.notify(self)
            seconds = _backoff(self._context.config.retry_seconds, len(attempts))
            await self._wait(lambda: self._state.cancelled, seconds)

    def _may_retry(self, ended: Attempt, attempts: tuple[Attempt, ...]) -> bool:
        if ended.reason == "config":
            return False
        failed = [a for a in attempts if a.phase == "failed"]
        by_infra = sum(1 for a in failed if a.reason == "infra")
        if ended.reason == "infra":
            return by_infra <= self._context.config.infra_retries
        return len(failed) - by_infra <= self._work.rollout.config.max_retries

    def _finish(self, outcome: Outcome, **changes: Any) -> None:
        self._save(outcome=outcome, **changes)
        self._context.notify(self)

    def _keep_evidence(self, attempt_id: str) -> None:
        size = self._context.config.log_tail_bytes
        data: Mapping[str, Any] = self._files.read_tail(attempt_id, size, self._tokens)
        if data["text"]:
            self._evidence[attempt_id] = (EventDraft(event_type="log", data=data),)

    def _current(self) -> Attempt | None:
        last = self._state.attempts[-1] if self._state.attempts else None
        return last if last is not None and not last.is_ended else None

    def _has_ended(self, attempt_id: str) -> bool:
        if self._process is not None and self._process.is_ended:
            return True
        return read_exit_code(self._files.attempt(attempt_id)) is not None

    def _save(self, **changes: Any) -> None:
        state = attrs.evolve(self._state, **changes)
        self._files.save_state(state)
        self._state = state

    def _leave(self) -> None:
        if self._process is not None:
            self._process.leave()
            self._process = None

    async def _wait(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        """Until ``condition`` holds, the runner closes, or ``seconds`` have passed."""
        timer: asyncio.Task[None] | None = None
        if seconds is not None:
            timer = asyncio.create_task(self._context.clock.sleep(seconds))
            timer.add_done_callback(lambda _: self._wake.set())
        try:
            while not condition() and not self._is_closing and not (timer and timer.done()):
                await self._wake.wait()
                self._wake.clear()
        finally:
            if timer is not None:
                timer.cancel()

    def take_away(self, kept: Path | None) -> Path | None:
        """Make the rollout unknown on disk; returns what is still to be removed."""
        return self._files.take_away(kept)


def _backoff(first_seconds: float, count: int) -> float:
    return min(LONGEST_RETRY_SECONDS, first_seconds * 2.0 ** min(count - 1, 10))


def _sentence(attempt: Attempt) -> str:
    if attempt.reason == "timeout":
        return "the agent ran longer than allowed"
    if attempt.exit_code is None:
        return "the agent ended unseen and left no exit code"
    if attempt.exit_code > 128:
        return f"the agent exited with code {attempt.exit_code} (signal {attempt.exit_code - 128})"
    return f"the agent exited with code {attempt.exit_code}"


def remove_tree(path: Path) -> None:
    """Remove what ``take_away`` left. Blocks: call it in a thread."""
    shutil.rmtree(path, ignore_errors=True)
