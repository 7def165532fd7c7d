"""One rollout as its Job and pods show it: what follows from them, without any calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import attrs
from attrs import define, field

from agl_core.interfaces import RunReport
from agl_core.records import Attempt, EventDraft, RolloutError
from agl_k8s.config import K8sConfig
from agl_k8s.names import TIMEOUT_ANNOTATION
from agl_k8s.times import seconds_of
from agl_k8s.verdict import Ending, attempt_of, is_ending, judge_job, judge_pod, why_waiting

StopReason = Literal["cancelled", "timeout"]
Outcome = Literal["succeeded", "failed", "cancelled"]

NO_NODE = "unscheduled"


@define(kw_only=True, eq=False)
class Run:
    """What is known of a rollout's Job; the runner feeds it and acts on it."""

    rollout_id: str
    job: dict[str, Any]
    added_at: float
    """By the monotonic clock."""
    is_job_gone: bool = False
    pods: dict[str, dict[str, Any]] = field(factory=dict)
    """By uid, in the order of their creation."""
    gone: set[str] = field(factory=set)
    """Pods whose objects were deleted; ``pods`` has their last state."""
    earlier: tuple[Attempt, ...] = ()
    """Attempts that only the record tells of: their pods were gone before we looked."""
    endings: dict[str, Ending] = field(factory=dict)
    evidence: dict[str, tuple[EventDraft, ...]] = field(factory=dict)
    given_up: set[str] = field(factory=set)
    """Pods whose end is our word alone: they never started, or no node ends them."""
    is_cancelled: bool = False
    timed_out: set[str] = field(factory=set)
    outcome: Outcome | None = None
    succeeded_attempt_id: str | None = None
    error: RolloutError | None = None
    told: RunReport | None = None
    """The last report."""
    is_released: bool = False

    # --- reading -----------------------------------------------------------------------------

    @property
    def uid(self) -> str:
        return str(self.job["metadata"]["uid"])

    @property
    def name(self) -> str:
        return str(self.job["metadata"]["name"])

    @property
    def is_finished(self) -> bool:
        return self.outcome is not None

    @property
    def is_suspended(self) -> bool:
        return bool(self.job.get("spec", {}).get("suspend"))

    @property
    def is_job_over(self) -> bool:
        """The Job makes no further pod: it has its verdict, is being deleted, or is gone."""
        is_terminating = "deletionTimestamp" in self.job["metadata"]
        return self.is_job_gone or is_terminating or judge_job(self.job) is not None

    @property
    def is_waiting(self) -> bool:
        """Nothing runs, or something is to go: time alone may decide, so it is looked at again."""
        if self.is_released or not (self.is_finished or self.open_pods()):
            return True
        return any(
            attempt_of(pod) is None or is_ending(pod) or "deletionTimestamp" in pod["metadata"]
            for pod in (self.pods[uid] for uid in self.open_pods())
        )

    @property
    def timeout_seconds(self) -> float | None:
        text = self.job["metadata"].get("annotations", {}).get(TIMEOUT_ANNOTATION)
        return float(text) if text else None

    def live_pods(self) -> list[str]:
        """Pods whose objects still exist."""
        return [uid for uid in self.pods if uid not in self.gone]

    def open_pods(self) -> list[str]:
        """Pods that have not ended as far as is known."""
        return [uid for uid in self.pods if uid not in self.endings]

    def report(self) -> RunReport:
        """What the controller is told."""
        return RunReport(
            rollout_id=self.rollout_id,
            attempts=tuple(self._attempts()),
            is_finished=self.is_finished,
            outcome=self.outcome,
            succeeded_attempt_id=self.succeeded_attempt_id,
            error=self.error,
            evidence={uid: self.evidence[uid] for uid in self.endings if self.evidence.get(uid)},
        )

    def _attempts(self) -> list[Attempt]:
        attempts = list(self.earlier)
        for uid, pod in self.pods.items():
            ending = self.endings.get(uid)
            begun = attempt_of(pod)
            if begun is None and ending is None:
                continue
            # A container that has ended is an attempt that runs until its end is judged.
            attempts.append(
                Attempt(
                    attempt_id=uid,
                    node=pod.get("spec", {}).get("nodeName") or NO_NODE,
                    started_at=begun.started_at if begun is not None else None,
                    phase=ending.phase if ending else "running",
                    reason=ending.reason if ending else None,
                    exit_code=ending.exit_code if ending else None,
                    finished_at=ending.finished_at if ending else None,
                )
            )
        return attempts

    # --- what the cluster says -----------------------------------------------------------------

    def take_job(self, job: dict[str, Any], *, is_gone: bool = False) -> None:
        """The Job has changed."""
        self.job = job
        self.is_job_gone = self.is_job_gone or is_gone

    def take_pod(self, pod: dict[str, Any], *, is_gone: bool = False) -> None:
        """A pod of the Job has changed."""
        uid = pod["metadata"]["uid"]
        is_new = uid not in self.pods
        self.pods[uid] = pod
        if is_gone:
            self.gone.add(uid)
        if is_new:
            by_age = sorted(self.pods.items(), key=lambda item: seconds_of_creation(item[1]))
            self.pods = dict(by_age)

    def recall(self, attempts: Iterable[Attempt], now: float) -> None:
        """What the record of the rollout knows; a pod that left before its end was seen is lost.

        Attempts that no runner has reported are the gateway's guesses and tell nothing.
        """
        verdict = judge_job(self.job)
        is_complete = verdict is not None and verdict.outcome == "complete"
        self.earlier = tuple(
            attempt
            if attempt.is_ended or is_complete
            else attrs.evolve(attempt, phase="failed", reason="infra", finished_at=now)
            for attempt in attempts
            if attempt.node is not None and attempt.attempt_id not in self.pods
        )

    # --- what follows ----------------------------------------------------------------------------

    def judge(self, uid: str, config: K8sConfig, now: float) -> Ending | None:
        """How a pod ended; None: it has not."""
        pod = self.pods[uid]
        asked: StopReason | None = "timeout" if uid in self.timed_out else None
        if self.is_cancelled:
            asked = "cancelled"
        ending = judge_pod(
            pod,
            asked=asked,
            is_gone=uid in self.gone,
            has_word=False,
            timeout_seconds=self.timeout_seconds,
            now=now,
        )
        if ending is None and not self.is_cancelled:
            if "deletionTimestamp" in pod["metadata"]:
                ending = _judge_terminating(pod, asked, config, now)
            elif attempt_of(pod) is None:
                ending = _judge_waiting(pod, config, now)
            if ending is not None:
                self.given_up.add(uid)
        return ending

    def decide(self, config: K8sConfig) -> None:
        """Settle the outcome where what has ended and the Job's word allow it."""
        if self.is_finished:
            return
        for uid, ending in self.endings.items():
            if ending.phase == "succeeded":
                self._finish("succeeded", attempt_id=uid)
                return
        if self.is_cancelled:
            if self.is_job_gone and not self.live_pods():
                self._finish("cancelled")
            return
        ended = [self.endings[uid] for uid in self.pods if uid in self.endings]
        last = ended[-1] if ended else None
        if last is not None and last.reason == "config":
            # Another try would meet the same, so the Job's own retries are not waited for.
            self.fail("config", last.message)
            return
        reasons = [attempt.reason for attempt in self.earlier] + [end.reason for end in ended]
        lost = reasons.count("infra")
        if last is not None and lost > config.infra_retries:
            self.fail("infra", f"{lost} attempts were lost, the last one because {last.message}")
        elif last is not None and self.given_up:
            # The Job waits for these pods for ever and replaces none of them.
            self.fail(last.reason or "infra", last.message)
        elif not self.open_pods():
            self._decide_by_job(last)

    def _decide_by_job(self, last: Ending | None) -> None:
        verdict = judge_job(self.job)
        if verdict is not None and last is not None and last.reason is not None:
            # Also where the Job is complete: an exit 0 after our own signal is no success.
            self.fail(last.reason, last.message)
        elif verdict is not None and verdict.outcome == "complete":
            self._finish("succeeded")  # its pod is gone, so the latest attempt known counts
        elif verdict is not None:
            code = "timeout" if verdict.reason == "DeadlineExceeded" else "infra"
            self.fail(code, f"the Job failed: {verdict.message or verdict.reason}")
        elif self.is_job_gone:
            self.fail("infra", "its Job was deleted by someone else")

    def fail(self, code: str, message: str) -> None:
        """No attempt follows, and none has succeeded."""
        self._finish("failed", error=RolloutError(code=code, message=message))

    def _finish(
        self,
        outcome: Outcome,
        *,
        attempt_id: str | None = None,
        error: RolloutError | None = None,
    ) -> None:
        self.outcome, self.succeeded_attempt_id, self.error = outcome, attempt_id, error


def _judge_terminating(
    pod: dict[str, Any], asked: StopReason | None, config: K8sConfig, now: float
) -> Ending | None:
    """A pod that no node ends: it stays Terminating for ever."""
    due = seconds_of(pod["metadata"]["deletionTimestamp"])  # the end of its grace
    if now - due <= config.node_lost_seconds:
        return None
    node = pod.get("spec", {}).get("nodeName") or "its node"
    return Ending(
        phase="failed",
        reason=asked or "infra",
        exit_code=None,
        message=f"the pod was to end, but {node} does not answer",
        finished_at=now,
    )


def _judge_waiting(pod: dict[str, Any], config: K8sConfig, now: float) -> Ending | None:
    """A pod that has waited for too long to start."""
    waiting = why_waiting(pod, now)
    if waiting is None:
        return None
    grace = config.start_grace_seconds if waiting.is_config else config.pending_seconds
    if now - waiting.since <= grace:
        return None
    return Ending(
        phase="failed",
        reason="config" if waiting.is_config else "infra",
        exit_code=None,
        message=f"the pod could not start: {waiting.code}: {waiting.message}",
        finished_at=now,
        missing_image=waiting.missing_image,
    )


def seconds_of_creation(pod: dict[str, Any]) -> float:
    """When a pod was created; its API knows whole seconds."""
    text = pod["metadata"].get("creationTimestamp")
    return seconds_of(text) if text else 0.0
