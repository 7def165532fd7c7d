"""What the API server fills in where a body says nothing."""

from __future__ import annotations

import base64

from agl_k8s.testing.kinds import Object
from agl_k8s.testing.metadata import NAMESPACE_CONTENT

CONTROLLER_UID = "batch.kubernetes.io/controller-uid"
JOB_NAME = "batch.kubernetes.io/job-name"
# The names that these labels had before; the server still writes both.
_OLD_CONTROLLER_UID = "controller-uid"
_OLD_JOB_NAME = "job-name"
_UNREACHABLE_SECONDS = 300


def fill(resource: str, item: Object) -> None:
    """Complete a new object, which has its name and uid already."""
    complete(resource, item)
    metadata = item["metadata"]
    if resource == "jobs":
        _own_pods(item)
        item["status"] = {}
    elif resource == "pods":
        item["status"] = item.get("status") or {}
        _complete(item["status"], {"phase": "Pending", "qosClass": "BestEffort"})
    elif resource == "namespaces":
        metadata["finalizers"] = [*metadata.get("finalizers", ()), NAMESPACE_CONTENT]
        item.setdefault("status", {}).setdefault("phase", "Active")


def complete(resource: str, item: Object) -> None:
    """Fill in the values that every object of a kind has, whether new or changed."""
    if resource == "jobs":
        _fill_job(item)
    elif resource == "pods":
        _fill_pod(item)
    elif resource == "secrets":
        _fill_secret(item)


def _fill_job(job: Object) -> None:
    spec = job["spec"] = job.get("spec") or {}
    has_policy = spec.get("podFailurePolicy") is not None
    if spec.get("parallelism") is None:
        _complete(spec, {"completions": 1})
    _complete(
        spec,
        {
            "parallelism": 1,
            "backoffLimit": 6,
            "completionMode": "NonIndexed",
            "suspend": False,
            "manualSelector": False,
            "podReplacementPolicy": "Failed" if has_policy else "TerminatingOrFailed",
        },
    )
    for rule in (spec.get("podFailurePolicy") or {}).get("rules") or ():
        for pattern in rule.get("onPodConditions") or ():
            pattern.setdefault("status", "True")
    template = spec["template"] = spec.get("template") or {}
    template["metadata"] = template.get("metadata") or {}
    template["spec"] = template.get("spec") or {}
    _fill_pod_spec(template["spec"])


def _own_pods(job: Object) -> None:
    """Give a Job the labels by which it knows its pods."""
    metadata, spec = job["metadata"], job["spec"]
    template_metadata = spec["template"]["metadata"]
    if not metadata.get("labels") and template_metadata.get("labels"):
        metadata["labels"] = dict(template_metadata["labels"])
    if spec["manualSelector"]:
        return
    template_metadata["labels"] = (template_metadata.get("labels") or {}) | {
        CONTROLLER_UID: metadata["uid"],
        JOB_NAME: metadata["name"],
        _OLD_CONTROLLER_UID: metadata["uid"],
        _OLD_JOB_NAME: metadata["name"],
    }
    spec["selector"] = {"matchLabels": {CONTROLLER_UID: metadata["uid"]}}


def _fill_pod(pod: Object) -> None:
    spec = pod["spec"] = pod.get("spec") or {}
    _fill_pod_spec(spec)
    _complete(
        spec,
        {
            "serviceAccountName": "default",
            "enableServiceLinks": True,
            "preemptionPolicy": "PreemptLowerPriority",
            "priority": 0,
        },
    )
    tolerations = spec["tolerations"] = list(spec.get("tolerations") or ())
    for taint in ("not-ready", "unreachable"):
        key = f"node.kubernetes.io/{taint}"
        if not any(t.get("key") in (None, key) for t in tolerations):
            tolerations.append(
                {
                    "key": key,
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": _UNREACHABLE_SECONDS,
                }
            )


def _fill_pod_spec(spec: Object) -> None:
    _complete(
        spec,
        {
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 30,
            "dnsPolicy": "ClusterFirst",
            "schedulerName": "default-scheduler",
            "securityContext": {},
        },
    )
    for part in ("initContainers", "containers"):
        for container in spec.get(part) or ():
            if isinstance(container, dict):
                _fill_container(container)


def _fill_container(container: Object) -> None:
    image = str(container.get("image", ""))
    is_latest = ":" not in image.rsplit("/", 1)[-1] or image.endswith(":latest")
    _complete(
        container,
        {
            "imagePullPolicy": "Always" if is_latest else "IfNotPresent",
            "resources": {},
            "terminationMessagePath": "/dev/termination-log",
            "terminationMessagePolicy": "File",
        },
    )
    for entry in container.get("env") or ():
        reference = (entry.get("valueFrom") or {}).get("fieldRef")
        if reference is not None:
            reference.setdefault("apiVersion", "v1")


def _fill_secret(secret: Object) -> None:
    secret.setdefault("type", "Opaque")
    texts = secret.pop("stringData", None) or {}
    if texts:
        encoded = {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}
        secret["data"] = (secret.get("data") or {}) | encoded


def _complete(part: Object, values: Object) -> None:
    for name, value in values.items():
        if part.get(name) is None:
            part[name] = value
