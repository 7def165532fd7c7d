"""The Job of a rollout, from three layers: settings, ``job_defaults``, the rollout's config.

A pure function, so that what a rollout becomes can be looked at without a cluster. The manifest is
the one that was tried on Kubernetes 1.36.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from agl_core.errors import Invalid
from agl_core.interfaces import Work
from agl_core.records import Rollout
from agl_core.wire import to_json
from agl_k8s.config import K8sConfig
from agl_k8s.layers import MAIN, layer_of_config, layer_of_defaults, manifest_of, without_dollar
from agl_k8s.merge import merge
from agl_k8s.names import (
    INSTANCE_LABEL,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    ROLLOUT_ANNOTATION,
    ROLLOUT_LABEL,
    SPEC_ANNOTATION,
    TIMEOUT_ANNOTATION,
    job_name,
    label_value,
)
from agl_k8s.refusals import (
    MAX_INPUT_BYTES,
    RESERVED,
    check_job,
    check_kept,
    check_layer,
    check_marks,
    check_shape,
)

TOKEN_KEY = "token"
INPUT_KEY = "input.json"
INPUT_FOLDER = "/var/run/agl-lite"
INPUT_VOLUME = "agl-input"
# Of a pod's deadline, in Kubernetes' validation.
MAX_DEADLINE_SECONDS = 2**31 - 1
HARDENED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def build_job(config: K8sConfig, work: Work) -> dict[str, Any]:
    """The manifest that a rollout's Job is created with.

    Raises:
        Invalid: It can never run so; the message names the field and what to do.
    """
    rollout = work.rollout
    layers = [config.job, layer_of_defaults(work.job_defaults), layer_of_config(rollout.config)]
    job = _base(config, rollout)
    for layer in layers:
        check_layer(layer, rollout.rollout_id)
        job = merge(job, manifest_of(layer))
        job = merge(job, layer.job_patch)
    check_shape(job)
    kept = _ours(config, rollout)
    check_kept(job, kept)
    check_marks(job, kept)
    ours = _environment(work)
    job = _equip(job, ours)
    if rollout.config.input_delivery == "file":
        job = _mount_input(job, rollout.rollout_id)
    job = merge(job, kept)
    job["metadata"]["annotations"][SPEC_ANNOTATION] = _digest(job)
    check_job(job, config, ours)
    return job


def build_secret(job: Mapping[str, Any], work: Work) -> dict[str, Any]:
    """What the Job's pods wait for: the rollout's token, and its input where that is a file.

    Args:
        job: As the API server returned it: the Secret belongs to it and goes with it.
        work: Whose token.
    """
    metadata = job["metadata"]
    data = {TOKEN_KEY: work.token.encode()}
    if work.rollout.config.input_delivery == "file":
        data[INPUT_KEY] = to_json(work.rollout.input)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "immutable": True,
        "metadata": {
            "name": metadata["name"],
            "labels": dict(metadata["labels"]),
            "annotations": {ROLLOUT_ANNOTATION: work.rollout.rollout_id},
            "ownerReferences": [
                {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "name": metadata["name"],
                    "uid": metadata["uid"],
                    "controller": True,
                    # True would need rights on the Job's finalizers.
                    "blockOwnerDeletion": False,
                }
            ],
        },
        "data": {name: base64.b64encode(value).decode() for name, value in data.items()},
    }


def _base(config: K8sConfig, rollout: Rollout) -> dict[str, Any]:
    """Defaults that layers may change."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job_name(rollout.rollout_id)},
        "spec": {
            "backoffLimit": rollout.config.max_retries,
            "ttlSecondsAfterFinished": config.ttl_seconds,
            "template": {
                "spec": {
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": config.stop_grace_seconds,
                    "automountServiceAccountToken": False,
                    # Else every Service of the namespace becomes variables of the agent.
                    "enableServiceLinks": False,
                    "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
                    "containers": [
                        {
                            "name": MAIN,
                            "terminationMessagePolicy": "FallbackToLogsOnError",
                        }
                    ],
                }
            },
        },
    }


def _ours(config: K8sConfig, rollout: Rollout) -> dict[str, Any]:
    """What no layer changes."""
    labels = {
        MANAGED_BY_LABEL: MANAGED_BY,
        INSTANCE_LABEL: config.instance,
        ROLLOUT_LABEL: label_value(rollout.rollout_id),
    }
    annotations = {ROLLOUT_ANNOTATION: rollout.rollout_id}
    template: dict[str, Any] = {"metadata": {"labels": labels, "annotations": dict(annotations)}}
    seconds = rollout.config.timeout_seconds
    if seconds is not None:
        annotations[TIMEOUT_ANNOTATION] = f"{seconds:.15g}"
        # On the pod: the Job's own deadline would count pulls and queues, and delete the pod.
        deadline = min(seconds + config.pause_allowance_seconds, MAX_DEADLINE_SECONDS)
        template["spec"] = {"activeDeadlineSeconds": math.ceil(deadline)}
    rules: list[dict[str, Any]] = [
        # First, because a disrupted pod has an exit code too.
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    ]
    if config.fail_codes:
        codes = {"containerName": MAIN, "operator": "In", "values": sorted(set(config.fail_codes))}
        rules.append({"action": "FailJob", "onExitCodes": codes})
    return {
        "metadata": {"labels": labels, "annotations": annotations},
        "spec": {
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": rules},
            "template": template,
        },
    }


def _environment(work: Work) -> list[dict[str, Any]]:
    """The agent's contract; each entry sees only those above it, so the attempt's id is first."""
    rollout = work.rollout
    name = job_name(rollout.rollout_id)
    quoted = quote(rollout.rollout_id, safe="")
    base = without_dollar(f"{work.agent_url.rstrip('/')}/rollout/{quoted}/attempt/")
    base += "$(AGL_ATTEMPT_ID)"
    secret = {"secretKeyRef": {"name": name, "key": TOKEN_KEY}}
    entries: list[dict[str, Any]] = [
        {"name": "AGL_ATTEMPT_ID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": "AGL_ROLLOUT_ID", "value": without_dollar(rollout.rollout_id)},
        {"name": "OPENAI_API_KEY", "valueFrom": secret},
        {"name": "ANTHROPIC_API_KEY", "valueFrom": secret},
        {"name": "OPENAI_BASE_URL", "value": f"{base}/v1"},
        {"name": "ANTHROPIC_BASE_URL", "value": base},
        {"name": "AGL_EVENT_URL", "value": f"{base}/events"},
    ]
    delivery = rollout.config.input_delivery
    if delivery == "env":
        text = to_json(rollout.input).decode()
        entries.append({"name": "AGL_TASK_INPUT", "value": without_dollar(text)})
    elif delivery == "url":
        entries.append({"name": "AGL_TASK_INPUT_URL", "value": f"{base}/input"})
    else:
        if len(to_json(rollout.input)) > MAX_INPUT_BYTES:
            raise Invalid(
                f"the input of rollout {rollout.rollout_id!r} is larger than {MAX_INPUT_BYTES} "
                "bytes, which a Secret cannot hold",
                hint='set config.input_delivery to "url"',
            )
        path = f"{INPUT_FOLDER}/{INPUT_KEY}"
        entries.append({"name": "AGL_TASK_INPUT_FILE", "value": path})
    return entries


def _equip(job: dict[str, Any], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """Give every container our variables, before the layers' own, and the least rights."""
    spec = job["spec"]["template"]["spec"]
    for kind in ("initContainers", "containers"):
        for container in spec.get(kind, ()):
            own = container.get("env", ())
            taken = sorted(entry["name"] for entry in own if entry["name"] in RESERVED)
            if taken:
                raise Invalid(
                    f"container {container.get('name')!r} sets {', '.join(taken)}, which the "
                    "agent's contract sets",
                    hint="choose other names",
                )
            container["env"] = [*ours, *own]
            security = container.get("securityContext", {})
            # Kubernetes refuses one that is privileged and yet may gain no privileges.
            hardened = {} if security.get("privileged") else HARDENED
            container["securityContext"] = merge(hardened, security)
    return job


def _mount_input(job: dict[str, Any], rollout_id: str) -> dict[str, Any]:
    mount = {"name": INPUT_VOLUME, "mountPath": INPUT_FOLDER, "readOnly": True}
    spec = job["spec"]["template"]["spec"]
    if any(volume["name"] == INPUT_VOLUME for volume in spec.get("volumes", ())):
        raise Invalid(
            f"a volume is named {INPUT_VOLUME!r}, as the one with the input", hint="rename it"
        )
    for kind in ("initContainers", "containers"):
        for container in spec.get(kind, ()):
            for own in container.get("volumeMounts", ()):
                if str(own.get("mountPath")).rstrip("/") == INPUT_FOLDER:
                    raise Invalid(
                        f"container {container['name']!r} mounts {INPUT_FOLDER}, as the input is",
                        hint='mount elsewhere, or set config.input_delivery to "url"',
                    )
            container["volumeMounts"] = [*container.get("volumeMounts", ()), mount]
    items = [{"key": INPUT_KEY, "path": INPUT_KEY}]
    secret = {"secretName": job_name(rollout_id), "items": items}
    spec["volumes"] = [*spec.get("volumes", ()), {"name": INPUT_VOLUME, "secret": secret}]
    return job


def _digest(job: Mapping[str, Any]) -> str:
    return hashlib.sha256(to_json(job)).hexdigest()[:16]
