"""The reconcile loop: makes the store, reached over HTTP, and a runner agree.

Two feeds, the changes of the store and those of the runner, say which rollouts to look at. For
each of them one worker at a time compares both sides and takes the next step, so that a step that
failed, for whatever reason, is simply taken again. Nothing is kept here that cannot be read anew:
a controller may be killed at any point.

One controller serves a service (or one at a time, where a leader is elected). What it started is
told apart from rollouts that users run by their own means by ``Attempt.node``: runners set it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import attrs

from agl_core.clock import Clock
from agl_core.controller.deadlines import Deadlines
from agl_core.controller.evidence import Evidence
from agl_core.controller.service import ControllerClient
from agl_core.controller.starts import Starts
from agl_core.controller.waiting import first_of
from agl_core.controller.workers import Workers, complain
from agl_core.errors import ApiError, TakenOver
from agl_core.interfaces import Runner, RunReport
from agl_core.records import Attempt, Rollout, RolloutError, Status, Tombstone
from agl_core.settings import ControllerSettings
from agl_core.work_list import backoff

log = logging.getLogger(__name__)

PAGE_SIZE = 200
LEAVING_SECONDS = 30.0
# The feed alone notices that the service is back, so it does not wait as long as the workers may.
FOLLOW_FAULTS = 4
_LIVE: tuple[Status, ...] = ("queuing", "running")


class Controller:
    """Starts what waits, reports what runs, and ends what should not run.

    Args:
        client: Reaches the service.
        runner: Entered already, and left after ``run`` has returned.
        settings: Times, and where agents reach the service.
        clock: Waits and tells the time.
    """

    def __init__(
        self, client: ControllerClient, runner: Runner, settings: ControllerSettings, clock: Clock
    ) -> None:
        self._client = client
        self._runner = runner
        self._settings = settings
        self._clock = clock
        self._reports: dict[str, RunReport] = {}
        self._workers = Workers(self._reconcile, clock)
        self._starts = Starts(
            client,
            runner,
            settings,
            clock,
            look_at=self._workers.look_at,
            count_running=self._count_running,
        )
        self._deadlines = Deadlines(client, runner, clock)
        self._evidence = Evidence(client)
        self._adopted: set[str] = set()
        self._runner_listed = asyncio.Event()
        self._store_listed = asyncio.Event()
        self._reported = asyncio.Event()
        self._is_leaving = False

    async def run(self, stop: asyncio.Event) -> None:
        """Work until ``stop`` is set; call it once.

        Agents go on afterwards, unless ``stop_agents`` says that they end first.

        Raises:
            TakenOver: Another controller has taken over: this one has stopped at once.
        """
        loops = [
            asyncio.create_task(work)
            for work in (
                self._follow_runner(),
                self._follow_store(),
                self._resync(),
                self._start_what_waits(),
                self._deadlines.enforce(self._reports),
            )
        ]
        stopping = asyncio.create_task(stop.wait())
        losing = asyncio.create_task(self._runner.until_lost())
        try:
            await asyncio.wait([stopping, losing, *loops], return_when=asyncio.FIRST_COMPLETED)
            if stopping.done() and not losing.done() and self._settings.stop_agents:
                await first_of(self._stop_agents(), losing)
            if losing.done() and not stopping.done():
                losing.result()
                raise TakenOver("another controller has taken over, or may do so at any moment")
        finally:
            tasks = [stopping, losing, *loops]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._starts.close()
            await self._workers.close()
        for task in loops:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    # --- what happens on either side ---------------------------------------------------------

    async def _follow_store(self) -> None:
        """Look at each rollout that changes. It begins with those that are not over."""
        await self._runner_listed.wait()
        cursor: str | None = None
        is_first = True
        faults = 0
        while True:
            try:
                page = await self._client.rollouts(
                    status=_LIVE if is_first else None,
                    changed_after=cursor,
                    limit=PAGE_SIZE,
                    wait=None if is_first else self._settings.poll_seconds,
                )
                cursor = page.cursor
                for item in page.items:
                    self._take_change(item)
            except Exception as exc:
                faults += 1
                complain("the store cannot be followed", exc)
                if isinstance(exc, ApiError) and exc.status == 410:
                    # Another life of the store: what it does not know any more is ended.
                    cursor, is_first, faults = None, True, 1
                    self._workers.recover()
                    self._workers.look_at(*self._reports, *self._starts.ids)
                await self._clock.sleep(backoff(min(faults, FOLLOW_FAULTS)))
                continue
            if faults:
                faults = 0
                self._workers.recover()
            if is_first and len(page.items) < PAGE_SIZE:
                is_first = False
                self._store_listed.set()

    def _take_change(self, item: Rollout | Tombstone) -> None:
        rollout_id = item.rollout_id
        is_ours = rollout_id in self._reports or rollout_id in self._starts
        if isinstance(item, Rollout) and item.status == "queuing" and not is_ours:
            self._starts.offer(item)
            return
        self._starts.withdraw(rollout_id)
        if is_ours or (isinstance(item, Rollout) and _was_started_by_a_runner(item)):
            self._workers.look_at(rollout_id)

    async def _follow_runner(self) -> None:
        """Take the runner's reports. Losing sight of it ends nothing."""
        faults = 0
        while True:
            try:
                watch = self._runner.watch()
                reports = await self._runner.list()
                if not self._runner_listed.is_set():
                    self._deadlines.adopt(a.attempt_id for r in reports for a in r.attempts)
                    self._adopted = {report.rollout_id for report in reports}
                self._take_list(reports)
                self._runner_listed.set()
                async for report in watch:
                    faults = 0
                    self._take_report(report)
            except Exception as exc:
                complain("the runner cannot be watched", exc)
            faults += 1
            await self._clock.sleep(backoff(faults))

    def _take_report(self, report: RunReport) -> None:
        rollout_id = report.rollout_id
        self._reports[rollout_id] = report
        self._starts.settle(rollout_id)
        self._workers.look_at(rollout_id)
        self._reported.set()

    def _take_list(self, reports: Sequence[RunReport]) -> None:
        """What the runner has, all of it: what is missing is gone."""
        listed = {report.rollout_id for report in reports}
        for report in reports:
            self._take_report(report)
        for rollout_id in [i for i in self._reports if i not in listed]:
            self._forget(rollout_id)
            self._workers.look_at(rollout_id)

    async def _resync(self) -> None:
        """Compare everything with everything, whatever the feeds said."""
        while True:
            await self._clock.sleep(self._settings.resync_seconds)
            try:
                # Those that were accepted before the list and are not in it did not start.
                accepted = {i for i in self._starts.ids if i not in self._workers}
                self._take_list(await self._runner.list())
                self._starts.free_place(*accepted)
                await self._list_store()
            except Exception as exc:
                complain("the comparison of everything failed", exc)

    async def _list_store(self) -> None:
        cursor: str | None = None
        while True:
            page = await self._client.rollouts(status=_LIVE, changed_after=cursor, limit=PAGE_SIZE)
            for item in page.items:
                self._take_change(item)
            if len(page.items) < PAGE_SIZE:
                return
            cursor = page.cursor

    async def _start_what_waits(self) -> None:
        await self._store_listed.wait()
        await self._starts.fill_places()

    # --- the steps of one rollout ------------------------------------------------------------

    async def _reconcile(self, rollout_id: str) -> None:
        """Take the next step for a rollout. Only its worker calls this."""
        try:
            rollout = await self._client.rollout(rollout_id)
        except ApiError as exc:
            if exc.status != 404:
                raise
            await self._let_go(rollout_id)
            return
        report = self._reports.get(rollout_id)
        if rollout.is_terminal:
            await self._let_go(rollout_id)
        elif report is not None and report.is_finished:
            await self._report_end(rollout, report)
        elif report is not None:
            await self._report_progress(rollout, report)
        elif rollout_id in self._starts:
            await self._starts.start(rollout)
        elif rollout.status == "queuing":
            self._take_change(rollout)
        else:
            await self._give_up_lost(rollout)

    async def _let_go(self, rollout_id: str) -> None:
        """The service is done with a rollout: so is the runner."""
        self._starts.withdraw(rollout_id)
        report = self._reports.get(rollout_id)
        if report is not None and not report.is_finished:
            await self._runner.stop(rollout_id, "cancelled")
            return
        # Also where there is no report: the start may have been accepted just before.
        await self._runner.release(rollout_id)
        self._forget(rollout_id)

    async def _report_end(self, rollout: Rollout, report: RunReport) -> None:
        """Tell the service how it ended, then let the runner forget it."""
        if report.evidence:
            rollout = await self._report_attempts(rollout, report)
            await self._evidence.keep(report)
        after = await self._client.patch(
            rollout.rollout_id,
            status=report.outcome,
            attempts=_news(rollout, report),
            succeeded_attempt_id=report.succeeded_attempt_id,
            error=report.error,
        )
        log.info("rollout ended", extra={"rollout_id": rollout.rollout_id, "status": after.status})
        await self._let_go(rollout.rollout_id)

    async def _report_progress(self, rollout: Rollout, report: RunReport) -> None:
        if rollout.cancel_requested or self._is_leaving:
            await self._runner.stop(rollout.rollout_id, "cancelled")
        if rollout.rollout_id in self._adopted:
            if _may_be_incomplete(rollout, report):
                await self._starts.remind(rollout)
            self._adopted.discard(rollout.rollout_id)
        if not report.attempts:
            return  # it waits for a place in the cluster: no attempt has begun
        rollout = await self._report_attempts(rollout, report)
        await self._evidence.keep(report)
        limit = rollout.config.timeout_seconds or self._settings.timeout_seconds
        await self._deadlines.watch(report, limit)

    async def _report_attempts(self, rollout: Rollout, report: RunReport) -> Rollout:
        """Tell the service of attempts; it takes events of those alone that it knows."""
        news = _news(rollout, report)
        if not news and rollout.status == "running":
            return rollout
        return await self._client.patch(rollout.rollout_id, status="running", attempts=news)

    async def _give_up_lost(self, rollout: Rollout) -> None:
        """A running rollout that the runner does not know: ours is lost, a user's is let be."""
        if not _was_started_by_a_runner(rollout):
            return
        listed = {report.rollout_id: report for report in await self._runner.list()}
        if rollout.rollout_id in listed:
            self._take_report(listed[rollout.rollout_id])
            return
        lost = tuple(
            attrs.evolve(attempt, phase="failed", reason="infra", finished_at=self._clock.now())
            for attempt in rollout.attempts
            if not attempt.is_ended
        )
        log.warning("a rollout is lost", extra={"rollout_id": rollout.rollout_id})
        await self._client.patch(
            rollout.rollout_id,
            status="failed",
            attempts=lost,
            error=RolloutError(code="infra", message="lost: the runner no longer knows it"),
        )

    def _forget(self, rollout_id: str) -> None:
        self._reports.pop(rollout_id, None)
        self._adopted.discard(rollout_id)
        self._evidence.forget(rollout_id)
        self._deadlines.forget(rollout_id)
        self._starts.settle(rollout_id)

    def _count_running(self) -> int:
        return sum(1 for report in self._reports.values() if not report.is_finished)

    # --- the end -----------------------------------------------------------------------------

    async def _stop_agents(self) -> None:
        """End what runs, however long that takes, and report it as far as the service is there."""
        self._is_leaving = True
        self._starts.leave()
        for report in await self._runner.list():
            await self._runner.stop(report.rollout_id, "cancelled")
        while any(not report.is_finished for report in self._reports.values()):
            self._reported.clear()
            await self._reported.wait()
        await first_of(self._until_agreed(), self._clock.sleep(LEAVING_SECONDS))

    async def _until_agreed(self) -> None:
        while self._reports or len(self._workers):
            self._workers.idle.clear()
            await self._workers.idle.wait()


def _was_started_by_a_runner(rollout: Rollout) -> bool:
    """Whether a rollout that runs is one that a controller had started.

    Runners name the node of their attempts; those that the gateway makes of a user's own calls
    have none.
    """
    if rollout.status != "running" or not rollout.attempts:
        return False
    return rollout.attempts[-1].node is not None


def _may_be_incomplete(rollout: Rollout, report: RunReport) -> bool:
    """Whether a runner that was found at work may not have all that it needs to go on.

    A controller that was killed while it started a rollout may have left it halfway; attempts that
    the runner has lost sight of must go on to count.
    """
    known = {attempt.attempt_id for attempt in report.attempts}
    told = {a.attempt_id for a in rollout.attempts if a.node is not None}
    return not report.attempts or not told <= known


def _news(rollout: Rollout, report: RunReport) -> tuple[Attempt, ...]:
    """The attempts that the store does not know so yet. An end that it knows stands."""
    return tuple(
        attempt
        for attempt in report.attempts
        if _is_news(attempt, rollout.attempt(attempt.attempt_id))
    )


def _is_news(attempt: Attempt, known: Attempt | None) -> bool:
    if known is None:
        return True
    if known.is_ended and known.phase != attempt.phase:
        return False
    told = attrs.asdict(attempt)
    return any(value not in (None, getattr(known, name)) for name, value in told.items())
