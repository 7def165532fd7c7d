"""The steps of one rollout on the cluster: keep what a pod leaves behind, then end or delete."""

from __future__ import annotations

import logging
from typing import Any, Literal

from agl_core.clock import Clock
from agl_core.interfaces import Work
from agl_k8s.api import KubeApi
from agl_k8s.config import K8sConfig
from agl_k8s.errors import KubeError, kind_of
from agl_k8s.evidence import collect
from agl_k8s.images import Images
from agl_k8s.manifest import build_secret
from agl_k8s.run import Run
from agl_k8s.times import seconds_of
from agl_k8s.verdict import attempt_of, why_no_pod

log = logging.getLogger(__name__)

# How long a pod may outlive its grace before it is taken from the API by force.
FORCE_AFTER_SECONDS = 15.0
# One list of events answers for all Jobs that have no pod.
EVENTS_SECONDS = 10.0


class Keeper:
    """Takes the next step of a run, whatever was done before; each step may be taken twice."""

    def __init__(self, api: KubeApi, config: K8sConfig, images: Images, clock: Clock) -> None:
        self._api = api
        self._images = images
        self._config = config
        self._clock = clock
        self._tokens: dict[str, list[str]] = {}
        self._secrets: dict[str, dict[str, Any]] = {}
        self._refusals: dict[str, list[dict[str, Any]]] = {}
        self._refusals_read = float("-inf")
        self._podless_since: dict[str, float] = {}

    async def give_secret(self, run: Run, work: Work) -> None:
        """Create what the Job's pods wait for; where that fails it is tried again until it is."""
        tokens = self._tokens.setdefault(run.uid, [])
        if work.token not in tokens:
            tokens.append(work.token)
        if not run.is_job_over:
            self._secrets[run.uid] = build_secret(run.job, work)
            try:
                await self._make_secret(run)
            except KubeError as exc:
                extra = {"rollout_id": run.rollout_id, "problem": exc.message}
                log.warning("a Secret could not be created yet", extra=extra)

    async def _make_secret(self, run: Run) -> None:
        # Taken out first: two tasks may come by at once.
        secret = self._secrets.pop(run.uid)
        try:
            await self._api.create("secrets", secret)
        except KubeError as exc:
            if kind_of(exc) != "exists":
                self._secrets.setdefault(run.uid, secret)
                raise

    async def exists(self, run: Run) -> bool:
        """Whether the API server knows the run's Job."""
        try:
            job = await self._api.get("jobs", run.name)
        except KubeError as exc:
            if kind_of(exc) != "not_found":
                raise
            return False
        return bool(job["metadata"]["uid"] == run.uid)

    async def take_step(self, run: Run, *, may_change: bool) -> None:
        """Judge what has ended, and delete what is to go where that is allowed now."""
        now = self._clock.now()
        if run.is_released:
            if may_change:
                await self._force(run, now)
            return
        if may_change and run.uid in self._secrets and not run.is_job_over:
            await self._make_secret(run)
        await self._end_attempts(run, now)
        if run.pods or run.is_finished:
            self._podless_since.pop(run.uid, None)
        else:
            await self._judge_podless(run, now)
        run.decide(self._config)
        if may_change:
            await self._delete_what_is_to_go(run, now)

    async def _end_attempts(self, run: Run, now: float) -> None:
        for uid in run.open_pods():
            ending = run.judge(uid, self._config, now)
            if ending is None:
                if attempt_of(run.pods[uid]) is not None:
                    self._images.pulled(run.pods[uid])
                continue
            if ending.missing_image is not None:
                self._images.failed(ending.missing_image, ending.message)
            if ending.phase == "failed":
                # Before the end is known to anybody: afterwards the pod may be deleted.
                await self._collect(run, uid)
            run.endings[uid] = ending

    async def _collect(self, run: Run, uid: str) -> None:
        if uid not in run.evidence:
            run.evidence[uid] = await collect(
                self._api,
                run.pods[uid],
                tail_bytes=self._config.log_tail_bytes,
                secrets=self._tokens.get(run.uid, ()),
            )

    async def _judge_podless(self, run: Run, now: float) -> None:
        """A Job that has no pod: refused ones are in no status, only in events."""
        if run.is_suspended or run.is_cancelled or run.is_job_over:
            self._podless_since.pop(run.uid, None)
            return
        since = self._podless_since.setdefault(run.uid, now)
        if now - since <= self._config.start_grace_seconds:
            return
        refused = why_no_pod((await self._read_refusals()).get(run.uid, ()))
        if refused is not None and refused.is_quota:
            self._podless_since[run.uid] = now  # waiting for quota is waiting in a queue
            log.info(
                "a rollout waits for quota",
                extra={"rollout_id": run.rollout_id, "problem": refused.message},
            )
        elif refused is not None:
            run.fail("config", f"no pod can be created: {refused.message}")
        elif now - since > self._config.pending_seconds:
            run.fail("infra", f"no pod was created in {self._config.pending_seconds:g} seconds")

    async def _read_refusals(self) -> dict[str, list[dict[str, Any]]]:
        if self._clock.monotonic() - self._refusals_read > EVENTS_SECONDS:
            self._refusals_read = self._clock.monotonic()
            listing = await self._api.list("events", field_selector="reason=FailedCreate")
            by_uid: dict[str, list[dict[str, Any]]] = {}
            for event in listing.items:
                by_uid.setdefault(event.get("involvedObject", {}).get("uid", ""), []).append(event)
            self._refusals = by_uid
        return self._refusals

    # --- deleting ----------------------------------------------------------------------------

    async def _delete_what_is_to_go(self, run: Run, now: float) -> None:
        if run.is_finished:
            return
        if run.is_cancelled and not run.is_job_gone:
            if "deletionTimestamp" not in run.job["metadata"]:
                await self._delete(run, "Foreground")
            await self._force(run, now)
        elif run.is_job_gone:
            # Nobody replaces its pods, and nobody else ends those that were orphaned.
            for uid in run.live_pods():
                await self._delete_pod(run, uid)
            await self._force(run, now)
        for uid in run.timed_out:
            if uid not in run.endings and uid not in run.gone:
                await self._collect(run, uid)
                await self._delete_pod(run, uid)

    async def delete_job(self, run: Run) -> None:
        """Delete the Job of a run whose end is stored; what still runs of it gets its grace."""
        is_quiet = not run.given_up and not any(u in run.open_pods() for u in run.live_pods())
        await self._delete(run, "Background" if is_quiet else "Foreground")
        for uid in run.given_up - run.gone:
            # Without its Job a pod can be taken away though no node answers for it.
            await self._delete_pod(run, uid, by_force=True)

    def forget(self, run: Run) -> None:
        """Nothing is kept of a run that is released."""
        self._tokens.pop(run.uid, None)
        self._secrets.pop(run.uid, None)
        self._podless_since.pop(run.uid, None)

    async def _delete(self, run: Run, propagation: Literal["Background", "Foreground"]) -> None:
        try:
            await self._api.delete("jobs", run.name, propagation=propagation, uid=run.uid)
        except KubeError as exc:
            if kind_of(exc) != "conflict":
                raise
            run.is_job_gone = True  # another one has its name

    async def _delete_pod(self, run: Run, uid: str, *, by_force: bool = False) -> None:
        metadata = run.pods[uid]["metadata"]
        if by_force:
            await self._api.delete("pods", metadata["name"], uid=uid, grace_seconds=0)
        elif "deletionTimestamp" not in metadata:
            await self._api.delete("pods", metadata["name"], uid=uid)

    async def _force(self, run: Run, now: float) -> None:
        """Take away pods that have outlived their grace: their node does not answer."""
        for uid in run.live_pods():
            due = run.pods[uid]["metadata"].get("deletionTimestamp")
            if due is not None and now - seconds_of(due) > FORCE_AFTER_SECONDS:
                await self._delete_pod(run, uid, by_force=True)
