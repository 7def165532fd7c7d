"""Kubernetes Jobs as rollouts: what the controller asks for, and what the cluster shows.

Two watches keep a copy of our Jobs and their pods; every report is computed from it, and from what
the rollout's record tells of pods that are gone. Nothing else is remembered, so a controller that
is started anew goes on where the last one was killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Literal

from attrs import frozen

from agl_core.clock import Clock
from agl_core.errors import Unavailable
from agl_core.interfaces import Finding, RunReport, Work
from agl_core.reports import LatestReports
from agl_core.work_list import WorkList
from agl_k8s.api import KubeApi
from agl_k8s.config import K8sConfig
from agl_k8s.creation import Creation
from agl_k8s.doctor import examine
from agl_k8s.images import Images
from agl_k8s.keeper import Keeper
from agl_k8s.lease import Leadership
from agl_k8s.logs import read_log
from agl_k8s.manifest import build_job
from agl_k8s.names import job_name, rollout_id_of, selector
from agl_k8s.reflector import Reflector
from agl_k8s.run import Run, StopReason

log = logging.getLogger(__name__)

# Some ends are told by time alone: a pod that does not start, one that does not go.
TICK_SECONDS = 1.0
UNSEEN_SECONDS = 30.0

ChangeType = Literal["ADDED", "MODIFIED", "DELETED"]


@frozen(kw_only=True)
class _Connection:
    """What exists while the runner is entered."""

    api: KubeApi
    images: Images
    jobs: Reflector
    pods: Reflector
    creation: Creation
    keeper: Keeper
    leadership: Leadership | None


class K8sRunner:
    """One Job per rollout.

    Entering it waits for the API server, and for the lease where another controller holds it.
    Leaving it leaves the Jobs running.
    """

    def __init__(self, config: K8sConfig, clock: Clock) -> None:
        self.max_active = config.max_active
        self._config = config
        self._clock = clock
        self._runs: dict[str, Run] = {}
        self._by_uid: dict[str, Run] = {}
        self._reports = LatestReports()
        self._work = WorkList(self._look_at, clock)
        self._connection: _Connection | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> K8sRunner:
        async with AsyncExitStack() as stack:
            api = await stack.enter_async_context(KubeApi(self._config, self._clock))
            leadership = await self._lead(api, stack) if self._config.lease else None
            labels = selector(self._config.instance)
            jobs = Reflector(
                api, "jobs", label_selector=labels, on_change=self._job_changed, clock=self._clock
            )
            pods = Reflector(
                api, "pods", label_selector=labels, on_change=self._pod_changed, clock=self._clock
            )
            images = Images(
                self._config.image_failures, self._config.image_retry_seconds, self._clock
            )
            self._connection = _Connection(
                api=api,
                images=images,
                jobs=jobs,
                pods=pods,
                creation=Creation(api, self._config, self._clock),
                keeper=Keeper(api, self._config, images, self._clock),
                leadership=leadership,
            )
            tasks = [asyncio.create_task(work) for work in (jobs.run(), pods.run(), self._tick())]
            stack.push_async_callback(_cancel, tasks)
            stack.push_async_callback(self._work.close)
            # Only what is known in full may be judged: a Job without its pods looks lost.
            await asyncio.gather(jobs.synced.wait(), pods.synced.wait())
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._reports.close()
        await self._stack.aclose()
        self._connection = None
        self._runs.clear()
        self._by_uid.clear()

    async def _lead(self, api: KubeApi, stack: AsyncExitStack) -> Leadership:
        leadership = Leadership(
            api,
            f"agl-lite-{self._config.instance}",
            f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}",
            seconds=self._config.lease_seconds,
            clock=self._clock,
        )
        stack.push_async_callback(leadership.release)
        await leadership.acquire()
        return leadership

    # --- what the controller asks for ------------------------------------------------------------

    async def start(self, work: Work) -> None:
        """Create a rollout's Job, or adopt the one that exists."""
        connection = self._leading()
        rollout_id = work.rollout.rollout_id
        run = self._runs.get(rollout_id)
        if run is None:
            manifest = build_job(self._config, work)
            active = sum(1 for other in self._runs.values() if not other.is_finished)
            if active >= self.max_active:
                raise Unavailable(f"{active} rollouts are active, as many as max_active allows")
            connection.images.check(manifest)
            job = await connection.creation.create(manifest)
            run = self._runs.get(rollout_id) or self._add(rollout_id, job)
        run.recall(work.rollout.attempts, self._clock.now())
        await connection.keeper.give_secret(run, work)
        self._work.look_at(run.uid)

    async def stop(self, rollout_id: str, reason: StopReason) -> None:
        """End what runs of a rollout."""
        self._leading()
        run = self._runs.get(rollout_id)
        if run is None or run.is_finished:
            return
        if reason == "cancelled":
            run.is_cancelled = True
        else:
            run.timed_out.update(run.open_pods()[-1:])
        self._work.look_at(run.uid)

    async def release(self, rollout_id: str) -> None:
        """Delete the Job of a rollout whose end is stored."""
        connection = self._leading()
        run = self._runs.get(rollout_id)
        if run is None:
            return
        if not run.is_finished:
            await self.stop(rollout_id, "cancelled")
            return
        if not run.is_job_gone:
            await connection.keeper.delete_job(run)
        self._forget(run)

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
        """What a container of an attempt's pod has printed, from the API server."""
        return read_log(
            KubeApi(self._config, self._clock),
            selector(self._config.instance),
            rollout_id,
            attempt_id,
            container=container,
            tail_lines=tail_lines,
            follow=follow,
            clock=self._clock,
        )

    def examine(self, work: Work, *, with_probe: bool) -> AsyncIterator[Finding]:
        """Look at the cluster, our rights, the Job's manifest, quotas, and a Job that tries it."""
        return examine(self._config, self._clock, work, with_probe=with_probe)

    async def until_ready(self) -> None:
        """Wait for the turn of the next Job: at a bounded rate, and after what a refusal asks."""
        await self._connected().creation.until_ready()

    async def until_lost(self) -> None:
        """Return when the lease is, or may soon be, another's."""
        leadership = self._connected().leadership
        if leadership is None:
            await asyncio.Event().wait()
        else:
            await leadership.lost.wait()

    # --- what the cluster shows ------------------------------------------------------------------

    def _job_changed(self, kind: ChangeType, job: dict[str, Any]) -> None:
        run = self._by_uid.get(job["metadata"]["uid"])
        is_gone = kind == "DELETED"
        if run is None:
            rollout_id = rollout_id_of(job)
            if is_gone or rollout_id is None or job["metadata"]["name"] != job_name(rollout_id):
                return  # gone before it was known, or made by others with our labels
            known = self._runs.get(rollout_id)
            if known is not None:
                # A name is free only when its Job is gone, so that went unseen.
                known.is_job_gone = True
                self._work.look_at(known.uid)
                return
            run = self._add(rollout_id, job)
        run.take_job(job, is_gone=is_gone)
        self._work.look_at(run.uid)

    def _pod_changed(self, kind: ChangeType, pod: dict[str, Any]) -> None:
        run = self._run_of(pod)
        if run is not None:
            run.take_pod(pod, is_gone=kind == "DELETED")
            self._work.look_at(run.uid)

    def _run_of(self, pod: dict[str, Any]) -> Run | None:
        # A pod counts by its owner: labels may be anybody's.
        owners = pod["metadata"].get("ownerReferences", ())
        uids = [owner["uid"] for owner in owners if owner.get("controller")]
        return self._by_uid.get(uids[0]) if uids else None

    def _add(self, rollout_id: str, job: dict[str, Any]) -> Run:
        run = Run(rollout_id=rollout_id, job=job, added_at=self._clock.monotonic())
        self._runs[rollout_id] = run
        self._by_uid[run.uid] = run
        for pod in self._connected().pods.objects.values():
            if self._run_of(pod) is run:
                run.take_pod(pod)
        return run

    def _forget(self, run: Run) -> None:
        """The controller is done with it; its Job may still be on its way out."""
        run.is_released = True
        self._connected().keeper.forget(run)
        del self._runs[run.rollout_id]
        self._reports.forget(run.rollout_id)
        self._work.look_at(run.uid)
        for job in self._connected().jobs.objects.values():
            if rollout_id_of(job) == run.rollout_id and job["metadata"]["uid"] not in self._by_uid:
                self._job_changed("ADDED", job)

    async def _look_at(self, job_uid: str) -> None:
        """Take the next step for a Job and tell of it."""
        run = self._by_uid.get(job_uid)
        connection = self._connected()
        if run is None or not (connection.jobs.synced.is_set() and connection.pods.synced.is_set()):
            return
        if self._is_unseen(run) and not await connection.keeper.exists(run):
            run.is_job_gone = True
        leads = connection.leadership is None or connection.leadership.is_held
        await connection.keeper.take_step(run, may_change=leads)
        if run.is_released:
            if run.is_job_gone and not run.live_pods():
                self._by_uid.pop(job_uid, None)
        elif (report := run.report()) != run.told:
            run.told = report
            self._reports.put(report)

    def _is_unseen(self, run: Run) -> bool:
        """A Job that was created and that no list or watch has shown since."""
        if run.is_job_gone or run.uid in self._connected().jobs.objects:
            return False
        return self._clock.monotonic() - run.added_at > UNSEEN_SECONDS

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(TICK_SECONDS)
            for run in self._by_uid.values():
                if run.is_waiting or self._is_unseen(run):
                    self._work.look_at(run.uid)

    # ---------------------------------------------------------------------------------------------

    def _connected(self) -> _Connection:
        assert self._connection is not None, "the runner is used inside 'async with'"
        return self._connection

    def _leading(self) -> _Connection:
        connection = self._connected()
        if connection.leadership is not None and not connection.leadership.is_held:
            raise Unavailable("another controller may hold the lease by now")
        return connection


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
