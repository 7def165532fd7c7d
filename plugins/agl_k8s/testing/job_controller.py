"""The Job controller of the fake cluster, and what else stops with the controller manager."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from attrs import define, field

from agl_core.clock import Clock
from agl_k8s.testing.background import Background
from agl_k8s.testing.job_rules import TRACKING, job_uid_of, judge_failure, make_pod
from agl_k8s.testing.kinds import ApiStatus, Object, Objects
from agl_k8s.testing.objects import ChangeType, Key, ObjectStore
from agl_k8s.testing.pod_admission import admit_pod
from agl_k8s.testing.reporting import is_met, is_over, post_event, set_condition

COMPONENT = "job-controller"
BACKOFF_SECONDS = 10.0
LONGEST_BACKOFF_SECONDS = 600.0
CREATE_RETRY_SECONDS = 1.0

_DONE = {
    "CompletionsReached": "Reached expected number of succeeded pods",
    "BackoffLimitExceeded": "Job has reached the specified backoff limit",
    "DeadlineExceeded": "Job was active longer than specified deadline",
}


class Controller(Protocol):
    """Another part of the controller manager."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


@define
class _Memory:
    """What the controller knows of a Job besides what the Job says."""

    started_at: float | None = None
    next_pod_at: float = 0.0
    failures: int = 0
    refusals: int = 0
    uncounted: set[str] = field(factory=set)
    """Pods that it deleted to suspend the Job, which are no failures."""


class JobController:
    """Makes the pods of Jobs, counts them, and says how Jobs end.

    Args:
        store: What it follows.
        clock: Times all delays.
        background: Where it runs.
        backoff_scale: What the waits before a new pod and before another try are multiplied by.
        deadline_scale: The same for ``activeDeadlineSeconds``.
        delay_seconds: From the end of a pod until the Job shows it.
        companions: What stops and starts with it.
    """

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        background: Background,
        *,
        backoff_scale: float = 1.0,
        deadline_scale: float = 1.0,
        delay_seconds: float = 0.0,
        companions: Sequence[Controller] = (),
    ) -> None:
        self._store = store
        self._clock = clock
        self._background = background
        self._backoff_scale = backoff_scale
        self._deadline_scale = deadline_scale
        self._delay_seconds = delay_seconds
        self._companions = companions
        self._memories: dict[str, _Memory] = {}
        self._due: dict[Key, None] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._unsubscribe: Callable[[], None] | None = None

    def start(self) -> None:
        """Run; what happened meanwhile is dealt with first."""
        if self._task is not None:
            return
        for companion in self._companions:
            companion.start()
        self._unsubscribe = self._store.subscribe(self._hear)
        self._task = self._background.spawn(self._run())
        for resource in ("jobs", "pods"):
            for item in self._store.list(resource):
                self._hear("ADDED", resource, item)

    def stop(self) -> None:
        """Make and count nothing, as while the controller manager is down."""
        if self._task is None:
            return
        for companion in self._companions:
            companion.stop()
        if self._unsubscribe is not None:
            self._unsubscribe()
        self._task.cancel()
        self._task = None
        self._memories.clear()  # a new process knows what objects say, no more
        self._due.clear()

    # ---------------------------------------------------------------------------------------------

    def _hear(self, type_: ChangeType, resource: str, item: Object) -> None:
        metadata = item["metadata"]
        if resource == "jobs":
            if type_ == "DELETED":
                self._memories.pop(metadata["uid"], None)
                for pod in self._pods_of(item):
                    self._let_go(pod)
            else:
                self._mark((resource, metadata["namespace"], metadata["name"]))
        elif resource == "pods":
            owner = job_uid_of(item)
            key = self._store.key_of_uid(owner) if owner is not None else None
            if key is not None:
                self._mark_later(key, self._delay_seconds if is_over(item) else 0.0)
            elif type_ != "DELETED":
                self._let_go(item)

    def _mark(self, key: Key) -> None:
        self._due[key] = None
        self._wake.set()

    def _mark_later(self, key: Key, seconds: float) -> None:
        if seconds <= 0:
            self._mark(key)
            return

        async def mark() -> None:
            await self._clock.sleep(seconds)
            self._mark(key)

        self._background.spawn(mark())

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._due:
                key = next(iter(self._due))
                del self._due[key]
                job = self._store.peek(key)
                if job is not None:
                    self._sync(key, job)

    def _sync(self, key: Key, job: Object) -> None:
        pods = self._pods_of(job)
        if "deletionTimestamp" in job["metadata"]:
            for pod in pods:
                self._let_go(pod)
            return
        if is_met(job, "Complete") or is_met(job, "Failed"):
            for pod in pods:
                self._let_go(pod)
            self._expire(key, job)
            return
        memory = self._memories.setdefault(job["metadata"]["uid"], _Memory())
        if self._suspend_or_resume(key, job, memory, pods):
            return
        verdict = self._count(key, job, memory, pods) or self._past_deadline(key, job, memory)
        job, pods = self._store.get(*key), self._pods_of(job)
        if verdict is not None:
            self._decide(key, job, *verdict)
            job = self._store.get(*key)
        if is_met(job, "FailureTarget") or is_met(job, "SuccessCriteriaMet"):
            self._delete_active(pods)
            self._conclude(key, job)
        else:
            self._make_pod(key, job, memory, pods)
        self._show(key, job)

    # -- Pods -------------------------------------------------------------------------------------

    def _pods_of(self, job: Object) -> Objects:
        found = [
            self._store.peek(key)
            for key in self._store.dependents_of(job["metadata"]["uid"])
            if key[0] == "pods"
        ]
        uid = job["metadata"]["uid"]
        return [pod for pod in found if pod is not None and job_uid_of(pod) == uid]

    def _count(
        self, key: Key, job: Object, memory: _Memory, pods: Objects
    ) -> tuple[str, str, str] | None:
        """Count the pods that have ended since; returns a verdict where one is due."""
        ended = [
            pod
            for pod in pods
            if is_over(pod) and TRACKING in pod["metadata"].get("finalizers", ())
        ]
        succeeded = failed = 0
        verdict: tuple[str, str, str] | None = None
        for pod in ended:
            if pod["status"]["phase"] == "Succeeded":
                succeeded += 1
                continue
            if pod["metadata"]["uid"] in memory.uncounted:
                continue
            judgement = judge_failure(job, pod)
            failed += judgement.action != "Ignore"
            if judgement.action == "FailJob":
                verdict = ("FailureTarget", "PodFailurePolicy", judgement.message)
            memory.failures += 1
            wait = min(BACKOFF_SECONDS * 2 ** (memory.failures - 1), LONGEST_BACKOFF_SECONDS)
            memory.next_pod_at = self._clock.monotonic() + wait * self._backoff_scale

        def change(item: Object) -> None:
            status = item["status"]
            for name, more in (("succeeded", succeeded), ("failed", failed)):
                if more:
                    status[name] = status.get(name, 0) + more

        status = (self._store.update(*key, change) if succeeded or failed else job)["status"]
        for pod in ended:
            self._let_go(pod)
        if verdict is None and status.get("succeeded"):
            return "SuccessCriteriaMet", "CompletionsReached", _DONE["CompletionsReached"]
        if verdict is None and status.get("failed", 0) > job["spec"]["backoffLimit"]:
            reason = "BackoffLimitExceeded"
            return "FailureTarget", reason, _DONE[reason]
        return verdict

    def _let_go(self, pod: Object) -> None:
        """Take the tracking finalizer off a pod."""
        if TRACKING not in pod["metadata"].get("finalizers", ()):
            return

        def drop(item: Object) -> None:
            finalizers = item["metadata"].get("finalizers", ())
            item["metadata"]["finalizers"] = [f for f in finalizers if f != TRACKING]

        key = _key(pod)
        if self._store.peek(key) is not None:
            self._store.update(*key, drop)

    def _delete_active(self, pods: Objects) -> None:
        for pod in pods:
            if not is_over(pod) and "deletionTimestamp" not in pod["metadata"]:
                self._store.delete(*_key(pod), uid=pod["metadata"]["uid"])

    def _make_pod(self, key: Key, job: Object, memory: _Memory, pods: Objects) -> None:
        waits_for_end = job["spec"].get("podReplacementPolicy") == "Failed"
        if any(
            not is_over(pod) and (waits_for_end or "deletionTimestamp" not in pod["metadata"])
            for pod in pods
        ):
            return
        left = memory.next_pod_at - self._clock.monotonic()
        if left > 0:
            self._mark_later(key, left)
            return
        store, namespace = self._store, job["metadata"]["namespace"]
        try:
            pod = store.create(
                "pods", namespace, make_pod(job), check=lambda item: admit_pod(store, item)
            )
        except ApiStatus as exc:
            wait = CREATE_RETRY_SECONDS * 2**memory.refusals * self._backoff_scale
            memory.refusals += 1
            memory.next_pod_at = self._clock.monotonic() + wait
            text = f"Error creating: {exc.message}"
            post_event(store, job, "Warning", "FailedCreate", text, COMPONENT)
            self._mark_later(key, wait)
            return
        memory.refusals = 0
        text = f"Created pod: {pod['metadata']['name']}"
        post_event(store, job, "Normal", "SuccessfulCreate", text, COMPONENT)

    # -- Status -----------------------------------------------------------------------------------

    def _suspend_or_resume(self, key: Key, job: Object, memory: _Memory, pods: Objects) -> bool:
        time, is_suspended = self._store.time(), bool(job["spec"].get("suspend"))

        def suspend(item: Object) -> None:
            item["status"].pop("startTime", None)
            text = "Job suspended"
            set_condition(
                item["status"], "Suspended", "True", time, reason="JobSuspended", message=text
            )

        def resume(item: Object) -> None:
            status = item["status"]
            status["startTime"] = time
            if is_met(item, "Suspended"):
                text = "Job resumed"
                set_condition(status, "Suspended", "False", time, reason="JobResumed", message=text)

        if is_suspended:
            memory.uncounted |= {pod["metadata"]["uid"] for pod in pods if not is_over(pod)}
            self._delete_active(pods)
            self._count(key, job, memory, pods)
            memory.started_at = None
            self._show(key, self._store.update(*key, suspend))
        elif "startTime" not in job["status"]:
            self._store.update(*key, resume)
        return is_suspended

    def _past_deadline(self, key: Key, job: Object, memory: _Memory) -> tuple[str, str, str] | None:
        seconds = job["spec"].get("activeDeadlineSeconds")
        now = self._clock.monotonic()
        is_new = memory.started_at is None
        started_at = memory.started_at = now if memory.started_at is None else memory.started_at
        if seconds is None:
            return None
        limit = seconds * self._deadline_scale
        if now - started_at >= limit:
            return "FailureTarget", "DeadlineExceeded", _DONE["DeadlineExceeded"]
        if is_new:
            self._mark_later(key, limit)
        return None

    def _decide(self, key: Key, job: Object, name: str, reason: str, message: str) -> None:
        if is_met(job, "FailureTarget") or is_met(job, "SuccessCriteriaMet"):
            return
        self._set(key, name, reason, message)

    def _conclude(self, key: Key, job: Object) -> None:
        """The last condition, once no pod is left that has not ended."""
        if any(not is_over(pod) for pod in self._pods_of(job)):
            return
        last = {"FailureTarget": "Failed", "SuccessCriteriaMet": "Complete"}
        for condition in job["status"]["conditions"]:
            name = last.get(condition["type"])
            if name is not None and condition["status"] == "True":
                self._show(key, job)
                self._set(key, name, condition["reason"], condition["message"])
                return

    def _set(self, key: Key, name: str, reason: str, message: str) -> None:
        time = self._store.time()

        def change(item: Object) -> None:
            set_condition(item["status"], name, "True", time, reason=reason, message=message)
            if name == "Complete":
                item["status"]["completionTime"] = time

        self._store.update(*key, change)

    def _show(self, key: Key, job: Object) -> None:
        """Put the numbers of pods into the status."""
        alive = [pod for pod in self._pods_of(job) if not is_over(pod)]
        going = sum("deletionTimestamp" in pod["metadata"] for pod in alive)
        active = len(alive) - going
        ready = sum(is_met(pod, "Ready") for pod in alive)
        counts: dict[str, Any] = {"terminating": going, "ready": ready}
        if active:
            counts["active"] = active

        def change(item: Object) -> None:
            item["status"].pop("active", None)
            item["status"].update(counts)
            item["status"].setdefault("uncountedTerminatedPods", {})

        shown = job["status"]
        if active != shown.get("active", 0) or not counts.items() <= shown.items():
            self._store.update(*key, change)

    def _expire(self, key: Key, job: Object) -> None:
        seconds = job["spec"].get("ttlSecondsAfterFinished")
        memory = self._memories.setdefault(job["metadata"]["uid"], _Memory())
        if seconds is None:
            return
        now = self._clock.monotonic()
        if memory.next_pod_at == float("inf"):
            return
        memory.next_pod_at = float("inf")  # there is none any more, and one timer is enough
        uid = job["metadata"]["uid"]

        async def expire() -> None:
            await self._clock.sleep(now + seconds - self._clock.monotonic())
            present = self._store.peek(key)
            is_there = present is not None and present["metadata"]["uid"] == uid
            if is_there and self._task is not None:
                self._store.delete(*key, uid=uid, propagation="Foreground")

        self._background.spawn(expire())


def _key(pod: Object) -> Key:
    return "pods", pod["metadata"]["namespace"], pod["metadata"]["name"]
