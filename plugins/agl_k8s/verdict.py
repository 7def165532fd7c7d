"""What pods, Jobs and Events say of an attempt: how it ended, or why it does not begin.

Pure functions of raw objects. What only a log could tell is left out: a message names facts that
no secret is in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from attrs import frozen

from agl_core.records import Attempt, Reason
from agl_k8s.pod_view import AGENT, FINAL_PHASES, PodView, code_text, join, quote, time_of

_CANNOT_RUN = frozenset({"StartError", "ContainerCannotRun"})

# Reasons for waiting that need a person, and what that person can do.
_CONFIG_WAITS = {
    "ImagePullBackOff": "check the image's name and image_pull_secrets",
    "ErrImageNeverPull": "load the image onto the nodes or let it be pulled",
    "InvalidImageName": "correct the image's name",
    "CreateContainerConfigError": "check the Secrets and ConfigMaps it names, and runAsNonRoot",
    "CreateContainerError": "check its command and security context",
}
# Of these, the ones that the next pod with this image meets too.
_IMAGE_WAITS = frozenset({"ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName"})
# A failing pull flips between the two.
_SAME_WAIT = {"ErrImagePull": "ImagePullBackOff"}

# A quota that was just created has no status yet.
_QUOTA = ("exceeded quota:", "status unknown for quota:")
_REFUSALS = (
    ("failed quota:", "set the resources that the quota asks for"),
    ("service account", "create it or change service_account"),
    ("no PriorityClass", "create it or change priority_class"),
    ("per Container", "keep the resources within the namespace's LimitRange"),
    ("per Pod", "keep the resources within the namespace's LimitRange"),
    ("violates PodSecurity", "change the security context or the namespace's policy"),
)
# The API server's own trouble: the next try of the Job controller may pass.
_PASSING = (
    "internal error occurred",
    "timeout",
    "timed out",
    "connection refused",
    "etcdserver",
    "too many requests",
    "currently unable to handle the request",
)


INITIALIZING = "PodInitializing"


@frozen(kw_only=True)
class Ending:
    """How an attempt ended."""

    phase: Literal["succeeded", "failed", "cancelled"]
    reason: Reason | None
    exit_code: int | None
    message: str
    """One clause for a person."""
    finished_at: float
    missing_image: str | None = None
    """The image that could not be had, where that is why it never began."""


@frozen(kw_only=True)
class JobVerdict:
    """No further attempt follows."""

    outcome: Literal["complete", "failed"]
    reason: str
    message: str
    is_final: bool
    """The Job has no pod left."""


@frozen(kw_only=True)
class Waiting:
    """Why a pod's agent has not started."""

    code: str
    message: str
    since: float
    is_config: bool
    """Waiting longer does not help: somebody has to change something."""
    missing_image: str | None = None


@frozen(kw_only=True)
class NoPod:
    """Why a Job has no pod."""

    is_quota: bool
    """Passes when others end."""
    message: str


def attempt_of(pod: Mapping[str, Any]) -> Attempt | None:
    """The attempt that a pod is; None until its agent has started or ended."""
    seen = PodView(pod)
    if seen.running is None and seen.ended is None:
        return None
    return Attempt(attempt_id=seen.uid, node=seen.node, started_at=seen.started_at)


def is_ending(pod: Mapping[str, Any]) -> bool:
    """The agent has ended, but the pod's phase does not say so yet: time alone may decide."""
    seen = PodView(pod)
    return seen.ended is not None and seen.phase not in FINAL_PHASES


def judge_pod(
    pod: Mapping[str, Any],
    *,
    asked: Literal["cancelled", "timeout"] | None,
    is_gone: bool,
    has_word: bool,
    timeout_seconds: float | None = None,
    now: float,
) -> Ending | None:
    """How a pod ended; None: it has not, or cannot be told yet.

    Args:
        pod: Its latest state.
        asked: Why it was told to end by us.
        is_gone: The object was deleted, and ``pod`` is the last that was seen of it.
        has_word: The agent itself said that it was done, such as by a final reward.
        timeout_seconds: How long it may run. A controller that was restarted does not remember
            that it has deleted the pod for that.
        now: Seconds since the epoch.
    """
    seen = PodView(pod)
    if not is_gone and not seen.is_settled(now):
        return None
    is_cut = seen.is_cut
    if seen.has_succeeded and (not is_cut or (asked is None and has_word)):
        return _ending(seen, now, None, seen.exit_sentence())
    is_unseen = is_gone and seen.ended is None and seen.phase not in FINAL_PHASES
    if asked is not None and (is_cut or is_unseen):
        told = "was cancelled" if asked == "cancelled" else "ran longer than allowed"
        return _ending(seen, now, asked, f"the attempt {told}{seen.exit_clause()}")
    reason, message = (
        _by_cluster(seen, timeout_seconds) or _by_container(seen) or _by_absence(seen, is_gone)
    )
    return _ending(seen, now, reason, message)


def judge_job(job: Mapping[str, Any]) -> JobVerdict | None:
    """What a Job's conditions say; None: attempts may follow.

    Its counters lag behind and are never looked at: a Job with a failed pod may go on.
    """
    met = {
        condition.get("type"): condition
        for condition in (job.get("status") or {}).get("conditions") or ()
        if condition.get("status") == "True"
    }
    for name, outcome, is_final in _JOB_CONDITIONS:
        if (condition := met.get(name)) is not None:
            return JobVerdict(
                outcome=outcome,
                reason=condition.get("reason") or name,
                message=quote(condition.get("message")),
                is_final=is_final,
            )
    return None


def why_waiting(pod: Mapping[str, Any], now: float) -> Waiting | None:
    """Why a pod's agent does not start; None: it has, or the pod is over."""
    seen = PodView(pod)
    is_over = seen.phase in FINAL_PHASES or seen.deletion_requested_at is not None
    if is_over or attempt_of(pod) is not None:
        return None
    scheduled = seen.condition("PodScheduled")
    if scheduled is None or scheduled.get("status") != "True":
        return _unscheduled(seen, scheduled or {}, now)
    since = max((seen.met_at(name) for name in _STEPS), default=None) or seen.created_at or now
    for name, state in seen.starting():
        if (held := _held_up(seen, name, state, since)) is not None:
            return held
    for name, state in seen.starting():
        if "running" in state and name != AGENT and not seen.is_sidecar(name):
            return Waiting(
                code=INITIALIZING,
                message=f"init container {name!r} has not ended",
                since=max(since, time_of(state["running"].get("startedAt")) or since),
                is_config=False,
            )
    reason = (dict(seen.starting()).get(AGENT) or {}).get("waiting", {}).get("reason")
    return Waiting(
        code=reason or "ContainerCreating",
        message=f"its network and volumes are not ready{seen.on_node}",
        since=since,
        is_config=False,
    )


def why_no_pod(events: Iterable[Mapping[str, Any]]) -> NoPod | None:
    """Why the Job controller cannot create a pod; None: not known, or it may pass by itself.

    Args:
        events: Of one Job; the latest ``FailedCreate`` counts.
    """
    refused = [event for event in events if event.get("reason") == "FailedCreate"]
    if not refused:
        return None
    text = str(max(refused, key=event_time).get("message") or "")
    told = quote(text.removeprefix("Error creating: "))
    if any(sign in text for sign in _QUOTA):
        return NoPod(is_quota=True, message=told)
    is_refused = " is forbidden: " in text or " is invalid: " in text
    if not is_refused and any(sign in text.lower() for sign in _PASSING):
        return None
    advice = next((advice for sign, advice in _REFUSALS if sign in text), None)
    return NoPod(is_quota=False, message=f"{told}; {advice}" if advice else told)


def event_time(event: Mapping[str, Any]) -> float:
    """When an Event was last seen; 0.0 where it does not tell."""
    times = (
        (event.get("series") or {}).get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
        event.get("firstTimestamp"),
        (event.get("metadata") or {}).get("creationTimestamp"),
    )
    return next((seconds for text in times if (seconds := time_of(text)) is not None), 0.0)


# --- the rows of the verdict ---------------------------------------------------------------------

_Cause = tuple[Reason, str]

_JOB_CONDITIONS: tuple[tuple[str, Literal["complete", "failed"], bool], ...] = (
    ("Complete", "complete", True),
    ("Failed", "failed", True),
    ("SuccessCriteriaMet", "complete", False),
    ("FailureTarget", "failed", False),
)
_STEPS = ("PodScheduled", "PodReadyToStartContainers", "Initialized")


def _by_cluster(seen: PodView, timeout_seconds: float | None) -> _Cause | None:
    """Ends that the agent did not bring about, whatever its container says."""
    disruption = seen.condition("DisruptionTarget")
    if disruption is not None and disruption.get("status") == "True":
        why = join(disruption.get("reason"), disruption.get("message"))
        return "infra", f"the pod was disrupted{seen.on_node}: {why}"
    code = seen.status.get("reason")
    if code == "DeadlineExceeded":
        limit = seen.spec.get("activeDeadlineSeconds")
        told = f" of {limit} seconds" if limit else ""
        return "timeout", f"the pod ran into its deadline{told}{seen.on_node}"
    if code == "Evicted":
        why = quote(seen.status.get("message")) or "it went over a limit of its own"
        return "agent", f"the pod was evicted{seen.on_node}: {why}"
    if code:
        why = join(code, seen.status.get("message"))
        return "infra", f"the kubelet ended the pod{seen.on_node}: {why}"
    if not seen.is_cut:
        return None
    ran = seen.ran_seconds
    # Both ends of the run are known in whole seconds.
    if timeout_seconds is not None and ran is not None and ran > timeout_seconds - 1.0:
        return "timeout", f"the attempt ran longer than {timeout_seconds:g} seconds{seen.on_node}"
    return "infra", f"the pod was deleted by someone else{seen.exit_clause()}"


def _by_container(seen: PodView) -> _Cause | None:
    """Ends that the agent's container, or one before it, tells."""
    if seen.ended is None:
        failed = seen.failed_init()
        if failed is None:
            return None
        name, state = failed
        told = f"init container {name!r} failed with {code_text(state)}{seen.on_node}"
        return "config", f"{told}; correct its command or image"
    reason = seen.ended.get("reason")
    if reason == "OOMKilled":
        return "oom", f"{seen.exit_sentence()}: more memory was needed than its limit allows"
    if reason in _CANNOT_RUN:
        told = join(reason, seen.ended.get("message"))
        return "config", f"container {AGENT!r} cannot start: {told}; correct its command or image"
    if reason == "ContainerStatusUnknown":
        # The kubelet makes up an exit code for a container that it has lost.
        return "infra", f"container {AGENT!r} was lost{seen.on_node}"
    return "agent", seen.exit_sentence()


def _by_absence(seen: PodView, is_gone: bool) -> _Cause:
    if is_gone and seen.phase not in FINAL_PHASES:
        return "infra", f"the pod was lost{seen.on_node}: it is gone and left no exit code"
    return "infra", f"the pod failed{seen.on_node} and says nothing of its containers"


def _ending(seen: PodView, now: float, reason: Reason | None, message: str) -> Ending:
    phase: Literal["succeeded", "failed", "cancelled"] = "failed"
    if reason is None:
        phase = "succeeded"
    elif reason == "cancelled":
        phase = "cancelled"
    ended = seen.ended or (seen.failed_init() or ("", {}))[1]
    finished_at = time_of(ended.get("finishedAt")) or None
    if finished_at is None and seen.deletion_due is not None:
        finished_at = min(seen.deletion_due, now)  # a deletion is due after its grace
    return Ending(
        phase=phase,
        reason=reason,
        exit_code=seen.exit_code,
        message=message,
        finished_at=now if finished_at is None else finished_at,
    )


def _unscheduled(seen: PodView, condition: Mapping[str, Any], now: float) -> Waiting:
    since = time_of(condition.get("lastTransitionTime")) or seen.created_at or now
    return Waiting(
        code=condition.get("reason") or "Unscheduled",
        message=quote(condition.get("message")) or "no scheduler has looked at the pod",
        since=since,
        is_config=False,
    )


def _held_up(seen: PodView, name: str, state: Mapping[str, Any], since: float) -> Waiting | None:
    waiting = state.get("waiting") or {}
    reason = waiting.get("reason")
    if reason in (None, "PodInitializing", "ContainerCreating"):
        return None
    code = _SAME_WAIT.get(reason, reason)
    told = quote(waiting.get("message")) or "no reason is given"
    advice = _CONFIG_WAITS.get(code)
    return Waiting(
        code=code,
        message=f"container {name!r}{seen.on_node}: {told}" + (f"; {advice}" if advice else ""),
        since=since,
        is_config=advice is not None,
        missing_image=seen.image_of(name) if code in _IMAGE_WAITS else None,
    )
