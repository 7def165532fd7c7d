"""Starting rollouts: who waits, who gets a place, and what becomes of a start that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from agl_core.clock import Clock
from agl_core.controller.launch_queue import LaunchQueue
from agl_core.controller.service import ControllerClient
from agl_core.controller.workers import complain
from agl_core.errors import ApiError, Invalid, Unavailable
from agl_core.interfaces import Runner, Work
from agl_core.records import Rollout, RolloutError
from agl_core.settings import ControllerSettings
from agl_core.work_list import backoff


class Starts:
    """Rollouts between the queue and their first report.

    Args:
        client: Reaches the service.
        runner: Takes them.
        settings: Where agents reach the service.
        clock: Waits.
        look_at: Has a rollout's worker take its next step.
        count_running: How many rollouts the runner is busy with.
    """

    def __init__(
        self,
        client: ControllerClient,
        runner: Runner,
        settings: ControllerSettings,
        clock: Clock,
        *,
        look_at: Callable[[str], None],
        count_running: Callable[[], int],
    ) -> None:
        self._client = client
        self._runner = runner
        self._settings = settings
        self._clock = clock
        self._look_at = look_at
        self._count_running = count_running
        self._queue = LaunchQueue()
        self._accepted: set[str] = set()
        self._faults: dict[str, int] = {}
        self._put_off_ids: set[str] = set()
        self._requeues: set[asyncio.Task[None]] = set()
        self._places = asyncio.Event()
        self._is_leaving = False

    def __contains__(self, rollout_id: object) -> bool:
        """Whether a rollout has been given a place and no report of it has come yet."""
        return rollout_id in self._accepted

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(self._accepted)

    def offer(self, rollout: Rollout) -> None:
        """Let a rollout wait for a place, unless its last start was put off."""
        if rollout.rollout_id not in self._put_off_ids:
            self._queue.add(rollout)
            self._places.set()

    def withdraw(self, rollout_id: str) -> None:
        """It need not be started any more."""
        self._queue.discard(rollout_id)

    def settle(self, *rollout_ids: str) -> None:
        """These have a report, or are over: what was kept for their start is not needed."""
        for rollout_id in rollout_ids:
            self._accepted.discard(rollout_id)
            self._faults.pop(rollout_id, None)
            self._queue.discard(rollout_id)
        self._places.set()

    def free_place(self, *rollout_ids: str) -> None:
        """These did not start, or need not: others get their places."""
        self._accepted.difference_update(rollout_ids)
        self._places.set()

    def leave(self) -> None:
        """Start nothing any more."""
        self._is_leaving = True

    async def close(self) -> None:
        """Drop what waits for another try."""
        tasks = list(self._requeues)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def fill_places(self) -> None:
        """Give free places to those that wait, for ever; to be run once all of them are known."""
        while True:
            await self._places.wait()
            self._places.clear()
            while self._has_place():
                await self._runner.until_ready()
                rollout_id = self._queue.pop() if self._has_place() else None
                if rollout_id is None:
                    break
                self._accepted.add(rollout_id)
                self._look_at(rollout_id)

    def _has_place(self) -> bool:
        is_free = self._count_running() + len(self._accepted) < self._runner.max_active
        return is_free and len(self._queue) > 0 and not self._is_leaving

    async def start(self, rollout: Rollout) -> None:
        """Start first; the PATCH follows from the runner's report.

        Raises:
            ApiError: The service did not answer as it should: the step is taken again.
        """
        rollout_id = rollout.rollout_id
        if self._is_leaving or rollout.status != "queuing":
            # The agent was faster than the report, or a user has begun to run it.
            self.free_place(rollout_id)
            return
        try:
            await self.remind(rollout)
        except Unavailable as exc:
            complain("the runner cannot take a rollout now", exc, rollout_id)
            self._put_off(rollout_id, exc.retry_after_seconds)
        except Invalid as exc:
            error = RolloutError(code="config", message=str(exc))
            await self._client.patch(rollout_id, status="failed", error=error)
            self.free_place(rollout_id)
        except ApiError:
            raise
        except Exception as exc:
            complain("a rollout could not be started", exc, rollout_id)
            self._put_off(rollout_id, 0.0)

    async def remind(self, rollout: Rollout) -> None:
        """Hand a rollout to the runner, which may have it already.

        Raises:
            Invalid: It can never run as it is asked for.
            Unavailable: Not now.
            ApiError: The service did not answer as it should.
        """
        work = Work(
            rollout=rollout,
            agent_url=(self._settings.agent_url or self._settings.url).rstrip("/"),
            token=(await self._client.mint_token(rollout.rollout_id)).token,
            job_defaults=await self._read_job_defaults(rollout),
        )
        await self._runner.start(work)

    def _put_off(self, rollout_id: str, seconds: float) -> None:
        """Try again later, each time later, so that the others get their turn."""
        faults = self._faults[rollout_id] = self._faults.get(rollout_id, 0) + 1
        self.free_place(rollout_id)

        async def later() -> None:
            await self._clock.sleep(max(seconds, backoff(faults)))
            self._put_off_ids.discard(rollout_id)
            self._look_at(rollout_id)

        self._put_off_ids.add(rollout_id)
        task = asyncio.create_task(later())
        self._requeues.add(task)
        task.add_done_callback(self._requeues.discard)

    async def _read_job_defaults(self, rollout: Rollout) -> Mapping[str, Any]:
        name = rollout.resources_id
        if name is None:
            return {}
        try:
            bundle = await self._client.resources(name)
        except ApiError as exc:
            if exc.status != 404:
                raise
            raise Invalid(f"resources {name!r} do not exist") from exc
        defaults = bundle.data.get("job_defaults", {})
        if not isinstance(defaults, Mapping):
            raise Invalid(f"'job_defaults' of resources {name!r} is no object")
        return defaults
