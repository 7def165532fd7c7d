"""The rules that every runner keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, cast

import attrs
import pytest

from agl_core.errors import NotFound, Unavailable
from agl_core.interfaces import Runner, RunReport, Work

Agent = Literal["succeeds", "fails", "hangs", "hangs_deaf", "hangs_politely", "talks", "is_missing"]
"""How an agent behaves: ``hangs_deaf`` ignores SIGTERM, ``hangs_politely`` exits 0 on it; ``talks``
prints the lines ``one``, ``two``, its ``OPENAI_API_KEY`` and ``started``, then hangs."""

OpenRunner = Callable[[], AbstractAsyncContextManager[Runner]]
# Only a fault takes as long: a cluster waits 10 and 20 seconds before it tries again.
LIMIT_SECONDS = 120.0
DEAF_CODE = 137


async def report_when(
    runner: Runner, rollout_id: str, holds: Callable[[RunReport], bool]
) -> RunReport:
    """Wait until the report of a rollout fulfils a condition."""
    async with asyncio.timeout(LIMIT_SECONDS):
        watch = runner.watch()
        for report in await runner.list():
            if report.rollout_id == rollout_id and holds(report):
                return report
        async for report in watch:
            if report.rollout_id == rollout_id and holds(report):
                return report
    raise AssertionError("the watch ended")


async def finished(runner: Runner, rollout_id: str) -> RunReport:
    """Wait for the outcome of a rollout."""
    return await report_when(runner, rollout_id, lambda report: report.is_finished)


def is_running(report: RunReport) -> bool:
    """Whether an attempt runs now."""
    return bool(report.attempts) and not report.attempts[-1].is_ended


class RunnerContract:
    """Subclass it, give the fixture ``open_runner`` and ``make_work``.

    Each call of ``open_runner`` gives a runner over the same machinery, as a controller that is
    started anew does; ``max_active`` is at least 3.
    """

    @pytest.fixture
    def open_runner(self) -> OpenRunner:
        """Opens a runner."""
        raise NotImplementedError("give a fixture 'open_runner'")

    def make_work(self, rollout_id: str, agent: Agent, **config: Any) -> Work:
        """Work whose agent behaves as told; ``config`` goes into the rollout's config."""
        raise NotImplementedError("give 'make_work'")

    async def is_started(self, work: Work) -> None:
        """Wait until the agent is past its start, so that it behaves as told when signalled."""
        raise NotImplementedError("give 'is_started'")

    async def test_success_is_reported_with_its_attempt(self, open_runner: OpenRunner) -> None:
        async with open_runner() as runner:
            await runner.start(self.make_work("r-1", "succeeds"))
            report = await finished(runner, "r-1")
        assert report.outcome == "succeeded"
        assert [a.phase for a in report.attempts] == ["succeeded"]
        assert report.succeeded_attempt_id == report.attempts[0].attempt_id
        assert report.attempts[0].exit_code == 0
        assert report.error is None
        started, ended = report.attempts[0].started_at, report.attempts[0].finished_at
        assert started is not None
        assert ended is not None
        assert started <= ended

    async def test_failure_is_the_agents_and_is_not_retried(self, open_runner: OpenRunner) -> None:
        async with open_runner() as runner:
            await runner.start(self.make_work("r-1", "fails"))
            report = await finished(runner, "r-1")
        assert report.outcome == "failed"
        assert [(a.phase, a.reason, a.exit_code) for a in report.attempts] == [
            ("failed", "agent", 3)
        ]
        assert report.error is not None
        assert report.error.code == "agent"
        assert report.succeeded_attempt_id is None

    async def test_c81_failure_makes_exactly_the_retries_asked_for(
        self, open_runner: OpenRunner
    ) -> None:
        async with open_runner() as runner:
            await runner.start(self.make_work("r-1", "fails", max_retries=2))
            report = await finished(runner, "r-1")
        assert [a.phase for a in report.attempts] == ["failed"] * 3
        assert len({a.attempt_id for a in report.attempts}) == 3

    async def test_what_cannot_start_fails_by_config_and_is_not_retried(
        self, open_runner: OpenRunner
    ) -> None:
        async with open_runner() as runner:
            await runner.start(self.make_work("r-1", "is_missing", max_retries=2))
            report = await finished(runner, "r-1")
        assert report.outcome == "failed"
        assert [a.reason for a in report.attempts] == ["config"]
        assert report.error is not None
        assert report.error.code == "config"
        assert report.error.message

    async def test_log_of_a_failed_attempt_is_evidence(self, open_runner: OpenRunner) -> None:
        async with open_runner() as runner:
            await runner.start(self.make_work("r-1", "fails"))
            report = await finished(runner, "r-1")
        drafts = report.evidence[report.attempts[0].attempt_id]
        (log,) = [draft for draft in drafts if draft.event_type == "log"]
        assert "about to fail" in log.data["text"]

    async def test_log_of_what_runs_is_read_without_its_token_by_any_runner(
        self, open_runner: OpenRunner
    ) -> None:
        async with open_runner() as runner:
            work = self.make_work("r-1", "talks")
            await runner.start(work)
            await self.is_started(work)
            report = await report_when(runner, "r-1", is_running)
            attempt_id = report.attempts[0].attempt_id
            # As a command does beside the controller: it enters nothing.
            other = cast("Runner", open_runner())
            text = b"".join([piece async for piece in other.logs("r-1", attempt_id)])
            assert text == b"one\ntwo\n[token]\nstarted\n"
            tail = other.logs("r-1", attempt_id, tail_lines=2)
            assert b"".join([piece async for piece in tail]) == b"[token]\nstarted\n"
            await runner.stop("r-1", "cancelled")
            await finished(runner, "r-1")

    async def test_followed_log_ends_with_the_attempt(self, open_runner: OpenRunner) -> None:
        async with open_runner() as runner, asyncio.timeout(LIMIT_SECONDS):
            work = self.make_work("r-1", "talks")
            await runner.start(work)
            await self.is_started(work)
            report = await report_when(runner, "r-1", is_running)
            pieces = runner.logs("r-1", report.attempts[0].attempt_id, follow=True)
            text = await anext(pieces)
            await runner.stop("r-1", "cancelled")
            async for piece in pieces:
                text += piece
            assert text.startswith(b"one\ntwo\n[token]\nstarted\n")
            await finished(runner, "r-1")

    async def test_log_of_an_unknown_attempt_is_not_found(self, open_runner: OpenRunner) -> None:
        async with open_runner() as runner:
            await runner.start(self.make_work("r-1", "succeeds"))
            for rollout_id, attempt_id in (("r-1", "nobody"), ("nobody", "../r-1"), ("r-1", "")):
                with pytest.raises(NotFound):
                    await anext(runner.logs(rollout_id, attempt_id))
            await finished(runner, "r-1")

    async def test_start_is_idempotent_also_at_once(self, open_runner: OpenRunner) -> None:
        async with open_runner() as runner:
            work = self.make_work("r-1", "hangs")
            await asyncio.gather(*(runner.start(work) for _ in range(5)))
            await report_when(runner, "r-1", is_running)
            await runner.start(work)
            (report,) = await runner.list()
            assert len(report.attempts) == 1
            await runner.stop("r-1", "cancelled")
            assert len((await finished(runner, "r-1")).attempts) == 1

    async def test_cancel_ends_it_without_a_retry(self, open_runner: OpenRunner) -> None:
        async with open_runner() as runner:
            work = self.make_work("r-1", "hangs", max_retries=2)
            await runner.start(work)
            await self.is_started(work)
            await runner.stop("r-1", "cancelled")
            report = await finished(runner, "r-1")
        assert report.outcome == "cancelled"
        assert [(a.phase, a.reason) for a in report.attempts] == [("cancelled", "cancelled")]

    async def test_time_out_ends_the_attempt_and_a_retry_follows(
        self, open_runner: OpenRunner
    ) -> None:
        async with open_runner() as runner:
            work = self.make_work("r-1", "hangs", max_retries=1)
            await runner.start(work)
            await self.is_started(work)
            await runner.stop("r-1", "timeout")
            report = await report_when(runner, "r-1", lambda r: len(r.attempts) == 2)
            assert (report.attempts[0].phase, report.attempts[0].reason) == ("failed", "timeout")
            await runner.stop("r-1", "timeout")
            report = await finished(runner, "r-1")
        assert report.outcome == "failed"
        assert [a.reason for a in report.attempts] == ["timeout", "timeout"]
        assert report.error is not None
        assert report.error.code == "timeout"

    async def test_exit_zero_after_our_own_signal_is_no_success(
        self, open_runner: OpenRunner
    ) -> None:
        async with open_runner() as runner:
            for rollout_id in ("r-1", "r-2"):
                work = self.make_work(rollout_id, "hangs_politely")
                await runner.start(work)
                await self.is_started(work)
            await runner.stop("r-1", "cancelled")
            await runner.stop("r-2", "timeout")
            assert (await finished(runner, "r-1")).outcome == "cancelled"
            report = await finished(runner, "r-2")
        assert report.outcome == "failed"
        assert report.attempts[0].reason == "timeout"

    async def test_deaf_agent_is_killed_after_the_grace(self, open_runner: OpenRunner) -> None:
        async with open_runner() as runner:
            work = self.make_work("r-1", "hangs_deaf")
            await runner.start(work)
            await self.is_started(work)
            await runner.stop("r-1", "cancelled")
            report = await finished(runner, "r-1")
        assert report.outcome == "cancelled"
        assert report.attempts[0].exit_code == DEAF_CODE

    async def test_success_before_the_cancel_wins(self, open_runner: OpenRunner) -> None:
        async with open_runner() as runner:
            await runner.start(self.make_work("r-1", "succeeds"))
            await finished(runner, "r-1")
            await runner.stop("r-1", "cancelled")
            (report,) = await runner.list()
        assert report.outcome == "succeeded"

    async def test_release_forgets_it(self, open_runner: OpenRunner) -> None:
        async with open_runner() as runner:
            await runner.start(self.make_work("r-1", "succeeds"))
            await runner.start(self.make_work("r-2", "succeeds"))
            await finished(runner, "r-1")
            await finished(runner, "r-2")
            await runner.release("r-1")
            await runner.release("r-1")
            assert [r.rollout_id for r in await runner.list()] == ["r-2"]
        async with open_runner() as runner:
            assert [r.rollout_id for r in await runner.list()] == ["r-2"]

    async def test_unknown_ids_are_no_error(self, open_runner: OpenRunner) -> None:
        async with open_runner() as runner:
            await runner.stop("nobody", "cancelled")
            await runner.stop("nobody", "timeout")
            await runner.release("nobody")
            assert list(await runner.list()) == []

    async def test_more_than_max_active_are_refused_for_the_moment(
        self, open_runner: OpenRunner
    ) -> None:
        async with open_runner() as runner:
            ids = [f"r-{number}" for number in range(runner.max_active)]
            for rollout_id in ids:
                await runner.start(self.make_work(rollout_id, "hangs"))
            with pytest.raises(Unavailable):
                await runner.start(self.make_work("r-more", "hangs"))
            for rollout_id in ids:
                await runner.stop(rollout_id, "cancelled")
            for rollout_id in ids:
                await finished(runner, rollout_id)
            await runner.start(self.make_work("r-more", "succeeds"))
            assert (await finished(runner, "r-more")).outcome == "succeeded"

    async def test_watch_tells_of_the_start_and_of_the_end(self, open_runner: OpenRunner) -> None:
        async with open_runner() as runner, asyncio.timeout(LIMIT_SECONDS):
            watch = runner.watch()
            work = self.make_work("r-1", "hangs")
            await runner.start(work)
            async for report in watch:  # one that queues it may say so before
                if report.attempts:
                    break
            assert is_running(report)
            await self.is_started(work)
            await runner.stop("r-1", "cancelled")
            async for report in watch:
                if report.is_finished:
                    break
            assert report.outcome == "cancelled"

    async def test_awkward_ids_are_told_apart(self, open_runner: OpenRunner) -> None:
        ids = ["x" * 80 + "a", "x" * 80 + "B_/", "ä b/../c"]
        async with open_runner() as runner:
            for rollout_id in ids:
                await runner.start(self.make_work(rollout_id, "succeeds"))
            for rollout_id in ids:
                assert (await finished(runner, rollout_id)).outcome == "succeeded"
            assert sorted(r.rollout_id for r in await runner.list()) == sorted(ids)

    async def test_restart_adopts_what_runs_and_what_has_ended(
        self, open_runner: OpenRunner
    ) -> None:
        async with open_runner() as runner:
            work = self.make_work("r-runs", "hangs")
            await runner.start(work)
            await runner.start(self.make_work("r-ended", "fails"))
            before = await report_when(runner, "r-runs", is_running)
            await self.is_started(work)
            ended = await finished(runner, "r-ended")
        async with open_runner() as runner:
            await runner.start(work)
            after = await report_when(runner, "r-runs", is_running)
            assert [a.attempt_id for a in after.attempts] == [a.attempt_id for a in before.attempts]
            again = await finished(runner, "r-ended")
            # More may be known by now of why it ended, but not something else.
            assert attrs.evolve(again, evidence={}) == attrs.evolve(ended, evidence={})
            assert again.evidence.keys() == ended.evidence.keys()
            await runner.stop("r-runs", "cancelled")
            assert (await finished(runner, "r-runs")).outcome == "cancelled"
