"""How the Job controller reads pods: what counts as a failure, and what a new pod looks like."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from agl_k8s.testing.kinds import Object
from agl_k8s.testing.metadata import copied
from agl_k8s.testing.reporting import condition_of

TRACKING = "batch.kubernetes.io/job-tracking"

Action = Literal["Count", "Ignore", "FailJob"]


@frozen
class Judgement:
    """What becomes of a failed pod, and why where a rule says so."""

    action: Action
    message: str = ""


def judge_failure(job: Object, pod: Object) -> Judgement:
    """The first rule of the podFailurePolicy that matches; without one it counts."""
    rules = (job["spec"].get("podFailurePolicy") or {}).get("rules") or ()
    for index, rule in enumerate(rules):
        action: Action = rule["action"]
        why = _matches_exit(rule, pod) or _matches_condition(rule, pod)
        if why is not None:
            return Judgement(action, f"{why} matching {action} rule at index {index}")
    return Judgement("Count")


def make_pod(job: Object) -> Object:
    """The body of a pod of a Job."""
    template, metadata = job["spec"]["template"], job["metadata"]
    wanted = template.get("metadata") or {}
    return {
        "metadata": {
            "generateName": f"{metadata['name']}-",
            "labels": copied(wanted.get("labels") or {}),
            "annotations": copied(wanted.get("annotations") or {}),
            "finalizers": [TRACKING],
            "ownerReferences": [
                {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "name": metadata["name"],
                    "uid": metadata["uid"],
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": copied(template["spec"]),
    }


def job_uid_of(pod: Object) -> str | None:
    """The Job that a pod belongs to."""
    for ref in pod["metadata"].get("ownerReferences") or ():
        if ref.get("controller") and ref.get("kind") == "Job":
            uid: str = ref["uid"]
            return uid
    return None


def _matches_exit(rule: Object, pod: Object) -> str | None:
    wanted = rule.get("onExitCodes")
    if not wanted:
        return None
    status = pod.get("status") or {}
    for part in ("containerStatuses", "initContainerStatuses"):
        for container in status.get(part) or ():
            name = container["name"]
            code = ((container.get("state") or {}).get("terminated") or {}).get("exitCode")
            if not code or wanted.get("containerName") not in (None, name):
                continue
            if (code in wanted["values"]) is (wanted["operator"] == "In"):
                return f"Container {name} for pod {_place(pod)} failed with exit code {code}"
    return None


def _matches_condition(rule: Object, pod: Object) -> str | None:
    for wanted in rule.get("onPodConditions") or ():
        found = condition_of(pod, wanted["type"])
        if found and found.get("status") == wanted.get("status", "True"):
            return f"Pod {_place(pod)} has condition {wanted['type']}"
    return None


def _place(pod: Object) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
