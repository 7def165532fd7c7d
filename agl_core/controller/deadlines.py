"""Time-outs of attempts: running time, with the pauses of the policies taken off."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

from attrs import frozen

from agl_core.clock import Clock
from agl_core.controller.service import ControllerClient
from agl_core.controller.waiting import first_of
from agl_core.controller.workers import complain
from agl_core.interfaces import Runner, RunReport
from agl_core.records import Attempt
from agl_core.work_list import backoff

log = logging.getLogger(__name__)

# An attempt may be over its time but for a pause that goes on: how often that is looked into.
CHECK_SECONDS = 0.25


@frozen(kw_only=True)
class _Deadline:
    attempt_id: str
    limit_seconds: float
    started: float  # by the monotonic clock
    paused_before: Mapping[str, float]  # by policy, when the attempt started

    def end(self, paused: Mapping[str, float]) -> float:
        # Which policies an agent calls is not known: the longest pause counts.
        pauses = (seconds - self.paused_before.get(name, 0.0) for name, seconds in paused.items())
        return self.started + self.limit_seconds + max([0.0, *pauses])


class Deadlines:
    """Stops attempts that have run for too long.

    Durations are measured by the monotonic clock from the moment an attempt is first seen; the
    wall clock only says how long one that is older than this controller has run already.
    """

    def __init__(self, client: ControllerClient, runner: Runner, clock: Clock) -> None:
        self._client = client
        self._runner = runner
        self._clock = clock
        self._adopted: frozenset[str] = frozenset()
        self._by_rollout: dict[str, _Deadline] = {}
        self._paused: Mapping[str, float] = {}
        self._changed = asyncio.Event()

    def adopt(self, attempt_ids: Iterable[str]) -> None:
        """Attempts that an earlier controller has started."""
        self._adopted = frozenset(attempt_ids)

    async def watch(self, report: RunReport, limit_seconds: float | None) -> None:
        """Watch the attempt of a rollout that runs now, if it has a limit.

        Raises:
            ApiError: The service does not say what has been paused so far.
        """
        attempt = _running(report)
        if limit_seconds is None or attempt is None:
            self.forget(report.rollout_id)
            return
        known = self._by_rollout.get(report.rollout_id)
        if known is not None and known.attempt_id == attempt.attempt_id:
            return
        started = self._clock.monotonic()
        paused_before: Mapping[str, float] = {}
        if attempt.attempt_id in self._adopted:
            # What was paused before it started is not known: all pauses count in its favour.
            now = self._clock.now()
            started -= max(0.0, now - (attempt.started_at or now))
        else:
            paused_before = await self._read_pauses()
        self._by_rollout[report.rollout_id] = _Deadline(
            attempt_id=attempt.attempt_id,
            limit_seconds=limit_seconds,
            started=started,
            paused_before=paused_before,
        )
        self._changed.set()

    def forget(self, rollout_id: str) -> None:
        """Watch a rollout no longer."""
        self._by_rollout.pop(rollout_id, None)

    async def enforce(self, reports: Mapping[str, RunReport]) -> None:
        """Stop what runs out of time, for ever. ``reports`` is read as it is at each moment."""
        faults = 0
        while True:
            await self._until_due()
            try:
                # Without the service it is not known what was paused, so nothing is ended.
                self._paused = await self._read_pauses()
                for rollout_id in self._due():
                    await self._stop(rollout_id, reports.get(rollout_id))
            except Exception as exc:
                faults += 1
                complain("time-outs cannot be enforced", exc)
                await self._clock.sleep(backoff(faults))
            else:
                faults = 0
                await self._clock.sleep(CHECK_SECONDS)

    async def _until_due(self) -> None:
        while not self._due():
            ends = [deadline.end(self._paused) for deadline in self._by_rollout.values()]
            self._changed.clear()
            if ends:
                seconds = max(0.0, min(ends) - self._clock.monotonic())
                await first_of(self._changed.wait(), self._clock.sleep(seconds))
            else:
                await self._changed.wait()

    def _due(self) -> list[str]:
        now = self._clock.monotonic()
        return [name for name, d in self._by_rollout.items() if now >= d.end(self._paused)]

    async def _stop(self, rollout_id: str, report: RunReport | None) -> None:
        deadline = self._by_rollout[rollout_id]
        attempt = _running(report) if report is not None else None
        # A retry that has begun meanwhile is not to be hit.
        if attempt is not None and attempt.attempt_id == deadline.attempt_id:
            extra = {"rollout_id": rollout_id, "attempt_id": deadline.attempt_id}
            log.info("an attempt ran out of time", extra=extra)
            await self._runner.stop(rollout_id, "timeout")
        self.forget(rollout_id)

    async def _read_pauses(self) -> Mapping[str, float]:
        state = await self._client.gateway_state()
        return {name: policy.paused_seconds for name, policy in state.policies.items()}


def _running(report: RunReport) -> Attempt | None:
    last = report.attempts[-1] if report.attempts else None
    return last if last is not None and not last.is_ended else None
