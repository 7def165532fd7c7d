"""A pod as its raw object shows it: what the verdict and the evidence read of it."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from typing import Any

from agl_k8s.times import seconds_of

AGENT = "agent"
FINAL_PHASES = frozenset({"Succeeded", "Failed"})

# The phase follows the end of the last container by a second or so, and says what a container's
# state does not: that the kubelet ended the pod. Native sidecars may take the whole grace first.
PHASE_LAG_SECONDS = 5.0
DEFAULT_GRACE_SECONDS = 30.0

LONGEST_QUOTE = 300


class PodView:
    """What matters of a pod."""

    def __init__(self, pod: Mapping[str, Any]) -> None:
        metadata = pod.get("metadata") or {}
        self.spec: Mapping[str, Any] = pod.get("spec") or {}
        self.status: Mapping[str, Any] = pod.get("status") or {}
        self.uid: str = metadata.get("uid", "")
        self.phase = self.status.get("phase")
        self.node: str | None = self.spec.get("nodeName") or None
        self.created_at = time_of(metadata.get("creationTimestamp"))
        self.deletion_due = time_of(metadata.get("deletionTimestamp"))
        grace = self.spec.get("terminationGracePeriodSeconds")
        self.grace_seconds: float = DEFAULT_GRACE_SECONDS if grace is None else grace
        self.deletion_requested_at: float | None = None
        if self.deletion_due is not None:
            given = metadata.get("deletionGracePeriodSeconds")
            grace_seconds = self.grace_seconds if given is None else given
            self.deletion_requested_at = self.deletion_due - grace_seconds
        agent = next((s for s in self._statuses("containerStatuses") if s["name"] == AGENT), {})
        state = agent.get("state") or {}
        self.running: Mapping[str, Any] | None = state.get("running")
        self.ended: Mapping[str, Any] | None = state.get("terminated")
        if self.ended is None and self.running is None:
            self.ended = (agent.get("lastState") or {}).get("terminated")

    @property
    def on_node(self) -> str:
        return f" on node {self.node}" if self.node else ""

    @property
    def exit_code(self) -> int | None:
        return self.ended.get("exitCode") if self.ended is not None else None

    @property
    def started_at(self) -> float | None:
        # A container that could not start is said to have started in 1970.
        return time_of((self.running or self.ended or {}).get("startedAt")) or None

    @property
    def finished_at(self) -> float | None:
        return time_of((self.ended or {}).get("finishedAt")) or None

    @property
    def ran_seconds(self) -> float | None:
        """From the agent's start until the pod's deletion was asked for."""
        if self.started_at is None or self.deletion_requested_at is None:
            return None
        return self.deletion_requested_at - self.started_at

    @property
    def has_succeeded(self) -> bool:
        """The agent did, whatever became of containers beside it."""
        if self.phase == "Succeeded":
            return True
        if self.ended is None or self.exit_code != 0 or self.ended.get("reason") == "OOMKilled":
            return False
        disruption = self.condition("DisruptionTarget") or {}
        return not self.status.get("reason") and disruption.get("status") != "True"

    @property
    def is_cut(self) -> bool:
        """Its deletion was asked for before its agent ended.

        Times are in whole seconds, so an end in the same second counts as brought about.
        """
        if self.deletion_requested_at is None:
            return False
        return self.finished_at is None or self.finished_at >= self.deletion_requested_at

    def is_settled(self, now: float) -> bool:
        """Nothing that is still to come changes how it ended."""
        if self.phase in FINAL_PHASES:
            return True
        if self.ended is None:
            return False
        if self.ended.get("reason") == "OOMKilled" and self.exit_code != 0:
            return True
        if self.finished_at is None:
            return False
        return now - self.finished_at > self.grace_seconds + PHASE_LAG_SECONDS

    def condition(self, name: str) -> Mapping[str, Any] | None:
        conditions = self.status.get("conditions") or ()
        return next((c for c in conditions if c.get("type") == name), None)

    def met_at(self, name: str) -> float:
        """Since when a condition is true; 0.0 where it is not."""
        condition = self.condition(name) or {}
        is_met = condition.get("status") == "True"
        return (time_of(condition.get("lastTransitionTime")) or 0.0) if is_met else 0.0

    def is_sidecar(self, name: str) -> bool:
        """An init container that runs on beside the agent."""
        inits = self.spec.get("initContainers") or ()
        return any(c.get("name") == name and c.get("restartPolicy") == "Always" for c in inits)

    def image_of(self, name: str) -> str | None:
        """What a container is to run."""
        containers = [
            *(self.spec.get("initContainers") or ()),
            *(self.spec.get("containers") or ()),
        ]
        return next((c.get("image") for c in containers if c.get("name") == name), None)

    def failed_init(self) -> tuple[str, Mapping[str, Any]] | None:
        """The name and end of the init container that kept the agent from starting."""
        for status in self._statuses("initContainerStatuses"):
            ended = (status.get("state") or {}).get("terminated")
            if ended and ended.get("exitCode") != 0 and not self.is_sidecar(status["name"]):
                return status["name"], ended
        return None

    def starting(self) -> list[tuple[str, Mapping[str, Any]]]:
        """States of the containers that the agent's start depends on, its own last."""
        statuses = [
            *self._statuses("initContainerStatuses"),
            *(s for s in self._statuses("containerStatuses") if s["name"] == AGENT),
        ]
        return [(status["name"], status.get("state") or {}) for status in statuses]

    def exit_sentence(self) -> str:
        """What the agent's container ended with."""
        if self.ended is None:
            return f"container {AGENT!r} ended{self.on_node}"
        told = f"container {AGENT!r} exited with {code_text(self.ended)}{self.on_node}"
        reason = self.ended.get("reason")
        return told if reason in (None, "", "Completed", "Error") else f"{told} ({reason})"

    def exit_clause(self) -> str:
        """The same, to stand at the end of a sentence."""
        return f", and {self.exit_sentence()}" if self.ended is not None else self.on_node

    def _statuses(self, name: str) -> Iterable[Mapping[str, Any]]:
        return self.status.get(name) or ()


def code_text(ended: Mapping[str, Any]) -> str:
    """An exit code, with the name of the signal where it stands for one."""
    code = ended.get("exitCode")
    number = ended.get("signal") or (code - 128 if isinstance(code, int) and code > 128 else 0)
    try:
        return f"code {code} ({signal.Signals(number).name})"
    except ValueError:
        return f"code {code}"


def join(reason: Any, message: Any) -> str:
    """A reason and its message, where they are given."""
    return ": ".join(filter(None, (reason or "", quote(message))))


def quote(text: Any) -> str:
    """A message of the cluster on one line, without a full stop, of bearable length."""
    line = " ".join(str(text or "").split()).rstrip(".")
    return line if len(line) <= LONGEST_QUOTE else f"{line[: LONGEST_QUOTE - 1]}…"


def time_of(text: Any) -> float | None:
    """Seconds since the epoch; None where there is no time, or none that can be read."""
    try:
        return seconds_of(text) if text else None
    except ValueError:
        return None
