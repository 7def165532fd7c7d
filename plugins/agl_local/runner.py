"""The local runner: rollouts as processes of this machine."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType

from agl_core.clock import Clock, poll
from agl_core.errors import AglError, ConfigError, Unavailable
from agl_core.interfaces import Finding, RunReport, Work
from agl_core.reports import LatestReports
from agl_local.config import LocalConfig
from agl_local.doctor import examine
from agl_local.environment import check_work
from agl_local.logs import read_log
from agl_local.run import Run, RunContext, remove_tree
from agl_local.state import RunFiles, RunState, SavedWork, StateDirectory, StopReason

log = logging.getLogger(__name__)

TAKE_OVER_SECONDS = 5.0


class LocalRunner:
    """Runs each attempt in a process group of its own.

    Everything it knows is on disk before it is done, so that another runner on the same
    ``state_dir`` goes on where this one was killed. Leaving the context leaves the agents running.
    """

    def __init__(self, config: LocalConfig, clock: Clock) -> None:
        self.max_active = config.max_active
        self._config = config
        self._clock = clock
        self._root = Path(config.state_dir).resolve()
        self._context = RunContext(
            config=config, clock=clock, node=socket.gethostname(), notify=self._notify
        )
        self._runs: dict[str, Run] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._doomed: set[str] = set()
        self._removals: set[asyncio.Task[None]] = set()
        self._reports = LatestReports()
        self._lock: int | None = None
        self._directory: StateDirectory | None = None

    async def __aenter__(self) -> LocalRunner:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        await self._take_lock()
        self._directory = StateDirectory(self._root)
        for files in self._directory.scan():
            self._recover(files)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for run in self._runs.values():
            run.close()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.gather(*self._removals, return_exceptions=True)
        self._runs.clear()
        self._tasks.clear()
        self._reports.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def start(self, work: Work) -> None:
        """Run a rollout, or renew the token of one that is known."""
        assert self._directory is not None, "the runner is used inside 'async with'"
        rollout_id = work.rollout.rollout_id
        known = self._runs.get(rollout_id)
        if known is not None:
            known.renew_token(work.token)
            return
        check_work(work.rollout, self._config.command)
        active = sum(1 for run in self._runs.values() if not run.is_finished)
        if active >= self.max_active:
            raise Unavailable(f"{active} rollouts are active, as many as max_active allows")
        saved = SavedWork(rollout=work.rollout, agent_url=work.agent_url.rstrip("/"))
        files = self._directory.files(rollout_id)
        # Nothing is awaited from the look-up above to here: of two calls one starts it.
        files.save_work(saved, work.token)
        self._add(Run(self._context, files, saved, [work.token], RunState()))

    async def stop(self, rollout_id: str, reason: StopReason) -> None:
        """End what runs of a rollout."""
        run = self._runs.get(rollout_id)
        if run is not None:
            run.stop(reason)

    async def release(self, rollout_id: str) -> None:
        """Forget a rollout; one that still runs is ended first and then forgotten."""
        run = self._runs.get(rollout_id)
        if run is None:
            return
        if not run.is_finished:
            self._doomed.add(rollout_id)
            run.stop("cancelled")
            return
        del self._runs[rollout_id]
        self._doomed.discard(rollout_id)
        self._reports.forget(rollout_id)
        assert self._directory is not None
        trash = run.take_away(self._directory.kept if self._config.keep else None)
        if trash is not None:
            removal = asyncio.create_task(asyncio.to_thread(remove_tree, trash))
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)
            await asyncio.shield(removal)

    async def list(self) -> Sequence[RunReport]:
        """Everything that exists and is not yet released."""
        return [run.report() for run in self._runs.values()]

    def watch(self) -> AsyncIterator[RunReport]:
        """Reports from this call on; of a rollout that changes fast, the latest."""
        return self._reports.watch()

    def logs(
        self,
        rollout_id: str,
        attempt_id: str,
        *,
        container: str | None = None,
        tail_lines: int | None = None,
        follow: bool = False,
    ) -> AsyncIterator[bytes]:
        """What an attempt has printed, from its file."""
        return read_log(
            self._root,
            rollout_id,
            attempt_id,
            container=container,
            tail_lines=tail_lines,
            follow=follow,
            clock=self._clock,
        )

    def examine(self, work: Work, *, with_probe: bool) -> AsyncIterator[Finding]:
        """Look at the state directory; processes of this machine need no probe."""
        return examine(self._root, self._config)

    async def until_ready(self) -> None:
        """Processes start as fast as they are asked for."""

    async def until_lost(self) -> None:
        """Nobody takes over: the lock on the directory is held until the end."""
        await asyncio.Event().wait()

    async def _take_lock(self) -> None:
        """One runner per directory: two would each start what the other runs."""
        descriptor = os.open(self._root / "runner.lock", os.O_RDWR | os.O_CREAT, 0o600)

        def is_taken() -> bool:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        # One that is being restarted needs a moment to go.
        if not await poll(is_taken, self._clock, seconds=TAKE_OVER_SECONDS, every=0.05):
            os.close(descriptor)
            raise ConfigError(
                f"another controller uses {str(self._root)!r}",
                hint="stop it, or give this one another plugins.local.state_dir",
            )
        self._lock = descriptor

    def _recover(self, files: RunFiles) -> None:
        try:
            work, tokens, state = files.load()
            run = Run(self._context, files, work, tokens or [""], state)
        except (OSError, AglError, ValueError):
            # Its directory stays, for a person to look at; the controller reports it as lost.
            log.exception("a rollout's files are damaged", extra={"path": str(files.directory)})
            return
        self._add(run)

    def _add(self, run: Run) -> None:
        self._runs[run.rollout_id] = run
        if run.is_finished:
            return
        task = asyncio.create_task(run.drive(), name=f"agl-local {run.rollout_id}")
        self._tasks[run.rollout_id] = task
        task.add_done_callback(lambda _: self._driven(run))

    def _driven(self, run: Run) -> None:
        self._tasks.pop(run.rollout_id, None)
        if run.rollout_id in self._doomed and run.is_finished:
            task = asyncio.create_task(self.release(run.rollout_id))
            self._tasks[run.rollout_id] = task
            task.add_done_callback(lambda _: self._tasks.pop(run.rollout_id, None))

    def _notify(self, run: Run) -> None:
        self._reports.put(run.report())
