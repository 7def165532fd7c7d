"""What a Job must not ask for: refused with the field's path, before anything is created."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agl_core.errors import Invalid
from agl_core.wire import to_json
from agl_k8s.config import JobLayer, K8sConfig
from agl_k8s.layers import MAIN
from agl_k8s.names import OWN_PREFIX, job_name, rollout_id_of

# Linux takes 128 KiB in one variable; what is larger ends the container as if by its own fault.
MAX_VARIABLE_BYTES = 65_536
MAX_MANIFEST_BYTES = 1_000_000
MAX_INPUT_BYTES = 1_000_000

# What the "baseline" of Kubernetes' Pod Security Standards lets a container add.
BASELINE_CAPABILITIES = frozenset(
    {
        "AUDIT_WRITE",
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "KILL",
        "MKNOD",
        "NET_BIND_SERVICE",
        "SETFCAP",
        "SETGID",
        "SETPCAP",
        "SETUID",
        "SYS_CHROOT",
    }
)

RESERVED = frozenset(
    {
        "AGL_ATTEMPT_ID",
        "AGL_ROLLOUT_ID",
        "AGL_EVENT_URL",
        "AGL_TASK_INPUT",
        "AGL_TASK_INPUT_URL",
        "AGL_TASK_INPUT_FILE",
        "OPENAI_API_KEY",
        "OPENAI_BASE_URL",
        "ANTHROPIC_API_KEY",
        "ANTHROPIC_BASE_URL",
    }
)


# What must be an object for the rest to be looked at.
_OBJECTS = (
    "metadata",
    "metadata.labels",
    "metadata.annotations",
    "spec",
    "spec.template",
    "spec.template.metadata",
    "spec.template.metadata.labels",
    "spec.template.metadata.annotations",
    "spec.template.spec",
)
_SETTINGS = {
    # Of the Job: it counts queues and pulls, spans all attempts, and takes their logs away.
    "spec.activeDeadlineSeconds": "set config.timeout_seconds of the rollout",
    "spec.podFailurePolicy.rules": "set fail_codes in [plugins.k8s]",
    "spec.template.spec.activeDeadlineSeconds": "set config.timeout_seconds of the rollout",
}


def check_layer(layer: JobLayer, rollout_id: str) -> None:
    """Look at a layer's variables.

    Raises:
        Invalid: One has a reserved name, or is too large.
    """
    taken = sorted(RESERVED & set(layer.env))
    if taken:
        raise Invalid(
            f"env of rollout {rollout_id!r} sets {', '.join(taken)}, which the agent's contract "
            "sets",
            hint="choose other names",
        )
    for name, value in layer.env.items():
        if len(value.encode()) > MAX_VARIABLE_BYTES:
            raise Invalid(
                f"env.{name} is larger than {MAX_VARIABLE_BYTES} bytes",
                hint='hand it over in the input, with config.input_delivery "url" or "file"',
            )


def check_shape(job: Mapping[str, Any]) -> None:
    """Look whether the layers have left a Job that can be worked on; the server knows the rest.

    Raises:
        Invalid: A patch has put something else where an object, a list or a name must be.
    """
    for path in _OBJECTS:
        found: Any = job
        for name in path.split("."):
            found = found.get(name, {} if name in ("metadata", "labels", "annotations") else None)
        if not isinstance(found, Mapping):
            raise _refused(path, found, "it is an object")
    pod_path = "spec.template.spec"
    pod = job["spec"]["template"]["spec"]
    for name in ("volumes", "initContainers", "containers"):
        _check_items(pod, pod_path, name)
    for path, container in _containers(pod):
        _check_items(container, path, "env")
        _check_items(container, path, "volumeMounts")
        security = container.get("securityContext", {})
        if not isinstance(security, Mapping):
            raise _refused(f"{path}.securityContext", security, "it is an object")


def _check_items(owner: Mapping[str, Any], path: str, name: str) -> None:
    """All of these are named, mounts by their volume."""
    items = owner.get(name, ())
    if not isinstance(items, list | tuple):
        raise _refused(f"{path}.{name}", items, "it is a list of objects")
    for item in items:
        if not isinstance(item, Mapping):
            raise _refused(f"{path}.{name}", item, "it is a list of objects")
        if not isinstance(item.get("name"), str):
            raise _refused(f"{path}.{name}[].name", item.get("name"), "each one has a name")


def check_kept(job: Mapping[str, Any], kept: Mapping[str, Any], path: str = "") -> None:
    """Look whether layers ask for something else where a value of ours holds.

    Raises:
        Invalid: One does; it says which setting has that effect.
    """
    for name, value in kept.items():
        found = job.get(name)
        if found is None or found == value:
            continue
        here = f"{path}.{name}" if path else name
        if isinstance(value, Mapping) and isinstance(found, Mapping):
            check_kept(found, value, here)
        else:
            raise _refused(here, found, _SETTINGS.get(here, f"it is always {value!r}"))


def check_marks(job: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
    """Look at the labels and annotations that layers set beside ours.

    Raises:
        Invalid: One has a prefix by which Jobs and what is known of them are told.
    """
    for path in ("metadata", "spec.template.metadata"):
        found: Any = job
        ours: Any = kept
        for name in path.split("."):
            found, ours = found.get(name, {}), ours.get(name, {})
        for kind in ("labels", "annotations"):
            for name, value in found.get(kind, {}).items():
                if name.startswith(OWN_PREFIX) and name not in ours.get(kind, {}):
                    raise _refused(f"{path}.{kind}.{name}", value, "choose another prefix")


def check_job(job: Mapping[str, Any], config: K8sConfig, ours: Sequence[Mapping[str, Any]]) -> None:
    """Look at the merged manifest.

    Raises:
        Invalid: It asks for something that would break what attempts are, or the cluster's peace.
    """
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    rollout_id = rollout_id_of(job) or ""
    for path, found, wanted in (
        ("apiVersion", job.get("apiVersion"), "batch/v1"),
        ("kind", job.get("kind"), "Job"),
        ("metadata.name", job["metadata"].get("name"), job_name(rollout_id)),
        ("metadata.namespace", job["metadata"].get("namespace"), None),
        ("spec.completions", spec.get("completions", 1), 1),
        ("spec.parallelism", spec.get("parallelism", 1), 1),
        ("spec.activeDeadlineSeconds", spec.get("activeDeadlineSeconds"), None),
        ("spec.completionMode", spec.get("completionMode", "NonIndexed"), "NonIndexed"),
        ("spec.managedBy", spec.get("managedBy"), None),
        ("spec.selector", spec.get("selector"), None),
        ("spec.template.spec.restartPolicy", pod.get("restartPolicy"), "Never"),
    ):
        if found != wanted:
            other = f"it is always {wanted!r}" if wanted else "leave it out"
            raise _refused(path, found, _SETTINGS.get(path, other))
    _check_containers(pod, ours)
    if not config.allow_privileged:
        _check_privileges(pod)
    size = len(to_json(job))
    if size > MAX_MANIFEST_BYTES:
        raise Invalid(
            f"the Job of rollout {rollout_id!r} has {size} bytes, more than {MAX_MANIFEST_BYTES}",
            hint='set config.input_delivery to "url", and keep data out of env and annotations',
        )


def _check_containers(pod: Mapping[str, Any], ours: Sequence[Mapping[str, Any]]) -> None:
    names = [container.get("name") for container in pod.get("containers", ())]
    if MAIN not in names:
        raise _refused("spec.template.spec.containers", names, f"one must be named {MAIN!r}")
    others = [name for name in names if name != MAIN]
    if others:
        # The pod would go on after the agent has ended, and the Job with it.
        raise _refused("spec.template.spec.containers", others, "make them 'sidecars'")
    for path, container in _containers(pod):
        if not container.get("image"):
            way_out = (
                "set config.image of the rollout, 'image' of job_defaults, or 'image' in "
                "[plugins.k8s.job]"
            )
            if container["name"] != MAIN:
                way_out = "give it one where it is listed"
            raise Invalid(f"{path}.image is not set", hint=way_out)
        if "restartPolicyRules" in container:
            raise _refused(f"{path}.restartPolicyRules", "...", "two tries would be one attempt")
        if list(container.get("env", ()))[: len(ours)] != list(ours):
            raise _refused(f"{path}.env", "...", "the agent's contract comes first")
        _check_sizes(path, container)
    if "restartPolicy" in pod["containers"][names.index(MAIN)]:
        raise _refused("spec.template.spec.containers[agent].restartPolicy", "...", "leave it out")


def _check_sizes(path: str, container: Mapping[str, Any]) -> None:
    for entry in container["env"]:
        value = entry.get("value")
        # Kubernetes undoes the escape before the container sees it.
        if isinstance(value, str) and len(value.replace("$$", "$").encode()) > MAX_VARIABLE_BYTES:
            raise Invalid(
                f"{path}.env[{entry['name']}] is larger than {MAX_VARIABLE_BYTES} bytes",
                hint='hand it over in the input, with config.input_delivery "url" or "file"',
            )


def _check_privileges(pod: Mapping[str, Any]) -> None:
    way_out = "set allow_privileged = true in [plugins.k8s]"
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            raise _refused(f"spec.template.spec.{name}", pod[name], way_out)
    for volume in pod.get("volumes", ()):
        if "hostPath" in volume:
            path = f"spec.template.spec.volumes[{volume['name']}].hostPath"
            raise _refused(path, volume["hostPath"], way_out)
    for path, container in _containers(pod):
        security = container.get("securityContext") or {}
        for name in ("privileged", "allowPrivilegeEscalation"):
            if security.get(name):
                raise _refused(f"{path}.securityContext.{name}", True, way_out)
        capabilities = security.get("capabilities") or {}
        if not isinstance(capabilities, Mapping):
            here = f"{path}.securityContext.capabilities"
            raise _refused(here, capabilities, "make it an object")
        added = capabilities.get("add") or ()
        if not isinstance(added, list | tuple):
            here = f"{path}.securityContext.capabilities.add"
            raise _refused(here, added, "make it a list of names")
        risky = sorted(set(map(str, added)) - BASELINE_CAPABILITIES)
        if risky:
            raise _refused(f"{path}.securityContext.capabilities.add", risky, way_out)


def _containers(pod: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for kind in ("initContainers", "containers"):
        for container in pod.get(kind, ()):
            yield f"spec.template.spec.{kind}[{container.get('name')}]", container


def _refused(path: str, found: Any, way_out: str) -> Invalid:
    return Invalid(f"the Job may not set {path} to {found!r:.200}", hint=way_out)
