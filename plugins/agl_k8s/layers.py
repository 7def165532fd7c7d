"""What each layer of a Job says, in Kubernetes' form."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import attrs

from agl_core.errors import Invalid
from agl_core.records import RolloutConfig
from agl_k8s.config import JobLayer

MAIN = "agent"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"

_LISTS = {"command", "args", "image_pull_secrets"}
_OBJECT_LISTS = {"volumes", "volume_mounts", "tolerations", "sidecars", "init_containers"}
_TEXTS = {"image", "service_account", "priority_class", "queue_name"}
_TEXT_MAPS = {"env", "node_selector", "labels", "annotations"}


def without_dollar(text: str) -> str:
    """Text that Kubernetes hands on as it is: in env, command and args it reads ``$``."""
    return text.replace("$", "$$")


def layer_of_defaults(defaults: Mapping[str, Any]) -> JobLayer:
    """``job_defaults`` of a bundle of resources.

    Raises:
        Invalid: A key is unknown, or a value is of the wrong type.
    """
    known = [field.name for field in attrs.fields(JobLayer)]
    values: dict[str, Any] = {}
    for name, value in defaults.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            guess = f", did you mean {near[0]!r}?" if near else ""
            raise Invalid(
                f"job_defaults: unknown key {name!r}{guess}", hint=f"allowed: {', '.join(known)}"
            )
        if value is not None:
            values[name] = _checked(name, value)
    return JobLayer(**values)


def _checked(name: str, value: Any) -> Any:
    if name in _TEXTS:
        wanted, is_right = "text", isinstance(value, str)
    elif name in _LISTS:
        wanted, is_right = "a list of texts", _is_list(value, str)
    elif name in _OBJECT_LISTS:
        wanted, is_right = "a list of objects", _is_list(value, Mapping)
    elif name in _TEXT_MAPS:
        wanted = "an object of texts"
        is_right = isinstance(value, Mapping) and _is_list(list(value.values()), str)
    else:
        wanted, is_right = "an object", isinstance(value, Mapping)
    if not is_right:
        raise Invalid(f"job_defaults.{name} must be {wanted}, not {value!r:.100}")
    return tuple(value) if isinstance(value, list) else value


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, kind) for item in value)


def layer_of_config(config: RolloutConfig) -> JobLayer:
    """What a rollout says itself."""
    return JobLayer(
        image=config.image,
        command=config.command,
        args=config.args or None,
        env=config.env,
        resources=config.resources,
        job_patch=config.job_patch,
    )


def manifest_of(layer: JobLayer) -> dict[str, Any]:
    """A layer's fields as a partial Job; ``job_patch`` is merged by the caller."""
    main: dict[str, Any] = {"name": MAIN}
    _put(main, "image", layer.image)
    _put(main, "command", _words(layer.command))
    _put(main, "args", _words(layer.args))
    _put(main, "env", _variables(layer.env))
    _put(main, "resources", layer.resources)
    _put(main, "volumeMounts", list(layer.volume_mounts))
    _put(main, "securityContext", layer.security_context)
    pod: dict[str, Any] = {"containers": [main]}
    _put(pod, "volumes", list(layer.volumes))
    _put(pod, "serviceAccountName", layer.service_account)
    _put(pod, "imagePullSecrets", [{"name": name} for name in layer.image_pull_secrets])
    _put(pod, "nodeSelector", layer.node_selector)
    _put(pod, "tolerations", list(layer.tolerations))
    _put(pod, "affinity", layer.affinity)
    _put(pod, "priorityClassName", layer.priority_class)
    _put(pod, "securityContext", layer.pod_security_context)
    sidecars = [{**sidecar, "restartPolicy": "Always"} for sidecar in layer.sidecars]
    _put(pod, "initContainers", [*sidecars, *layer.init_containers])
    job: dict[str, Any] = {"spec": {"template": {"spec": pod}}}
    labels = dict(layer.labels)
    metadata: dict[str, Any] = {}
    template: dict[str, Any] = {}
    if layer.queue_name:
        # Created suspended; Kueue starts it when there is room.
        metadata["labels"] = {**labels, QUEUE_LABEL: layer.queue_name}
        job["spec"]["suspend"] = True
    else:
        _put(metadata, "labels", labels)
    _put(metadata, "annotations", layer.annotations)
    _put(template, "labels", labels)
    _put(template, "annotations", layer.annotations)
    _put(job, "metadata", metadata)
    _put(job["spec"]["template"], "metadata", template)
    return job


def _put(target: dict[str, Any], name: str, value: Any) -> None:
    if value:
        target[name] = value


def _words(words: tuple[str, ...] | None) -> list[str]:
    return [without_dollar(word) for word in words or ()]


def _variables(env: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": without_dollar(value)} for name, value in env.items()]
