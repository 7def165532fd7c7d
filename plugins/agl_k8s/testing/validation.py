"""What the API server refuses to store, in its words."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any

from attrs import frozen

from agl_core.wire import to_json
from agl_k8s.testing.kinds import ApiStatus, Kind, Object, kind_of
from agl_k8s.testing.metadata import LONGEST_NAME

LARGEST_ANNOTATIONS_BYTES = 256 * 1024
LARGEST_OBJECT_BYTES = 1_572_864
"""Of etcd; it is counted here as compact JSON."""

_LABEL = re.compile(r"^[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")
_DNS_LABEL = re.compile(r"^[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?$")
_SUBDOMAIN = re.compile(r"^[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*$")
_ENV_NAME = re.compile(r"^[^\x00-\x20=\x7f-\U0010ffff]+$")

_LABEL_RULE = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or "
    "'.', and must start and end with an alphanumeric character"
)
_DNS_RULE = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and "
    "must start and end with an alphanumeric character"
)
_SUBDOMAIN_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or "
    "'.', and must start and end with an alphanumeric character"
)
_POLICY_ACTIONS = ("Count", "FailIndex", "FailJob", "Ignore")
# Parts of a Job's template that may change while it is suspended.
_FREE_WHILE_SUSPENDED = ("nodeSelector", "tolerations", "affinity", "schedulingGates")
_JOB_IMMUTABLE = (
    "completions",
    "completionMode",
    "selector",
    "manualSelector",
    "podFailurePolicy",
    "podReplacementPolicy",
    "backoffLimitPerIndex",
)
_POD_MUTABLE = ("activeDeadlineSeconds", "terminationGracePeriodSeconds", "tolerations")


@frozen
class Problem:
    """One fault of an object."""

    field: str
    reason: str
    text: str

    def __str__(self) -> str:
        return f"{self.field}: {self.text}"


class Problems:
    """Collects the faults of an object."""

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def invalid(self, field: str, value: Any, why: str) -> None:
        shown = f'"{value}"' if isinstance(value, str) else to_json(value).decode()[:200]
        self.found.append(Problem(field, "FieldValueInvalid", f"Invalid value: {shown}: {why}"))

    def required(self, field: str, why: str = "") -> None:
        text = f"Required value: {why}" if why else "Required value"
        self.found.append(Problem(field, "FieldValueRequired", text))

    def unsupported(self, field: str, value: Any, allowed: tuple[str, ...]) -> None:
        words = ", ".join(f'"{word}"' for word in allowed)
        text = f'Unsupported value: "{value}": supported values: {words}'
        self.found.append(Problem(field, "FieldValueNotSupported", text))

    def forbidden(self, field: str, why: str) -> None:
        self.found.append(Problem(field, "FieldValueForbidden", f"Forbidden: {why}"))

    def too_long(self, field: str, limit: int) -> None:
        text = f"Too long: may not be more than {limit} bytes"
        self.found.append(Problem(field, "FieldValueTooLong", text))

    def duplicate(self, field: str, value: str) -> None:
        text = f'Duplicate value: "{value}"'
        self.found.append(Problem(field, "FieldValueDuplicate", text))

    def raise_if_any(self, kind: Kind, name: str) -> None:
        if not self.found:
            return
        texts = [str(problem) for problem in self.found]
        told = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
        message = f'{kind.qualified_kind} "{name}" is invalid: {told}'
        causes = [{"reason": p.reason, "message": p.text, "field": p.field} for p in self.found]
        group = {"group": kind.group} if kind.group else {}
        details = {"name": name, **group, "kind": kind.kind, "causes": causes}
        raise ApiStatus(422, "Invalid", message, details)


def check_new(resource: str, item: Object) -> None:
    """Check an object that is to be created, its defaults filled in.

    Raises:
        ApiStatus: 422.
    """
    problems = Problems()
    _check_metadata(problems, resource, item["metadata"])
    if resource == "jobs":
        _check_job(problems, item)
    elif resource == "pods":
        _check_pod_spec(problems, item["spec"], "spec")
    elif resource == "secrets":
        _check_secret(problems, item)
    _finish(problems, resource, item)


def check_change(resource: str, old: Object, new: Object) -> None:
    """Check an object that is to replace another.

    Raises:
        ApiStatus: 422.
    """
    problems = Problems()
    _check_metadata(problems, resource, new["metadata"])
    if resource == "jobs":
        _check_job(problems, new)
        _check_job_change(problems, old["spec"], new["spec"])
    elif resource == "pods":
        _check_pod_change(problems, old["spec"], new.get("spec") or {})
    elif resource == "secrets":
        _check_secret(problems, new)
        if old.get("immutable"):
            for part in ("data", "immutable"):
                if old.get(part) != new.get(part):
                    problems.forbidden(part, "field is immutable when `immutable` is set")
    _finish(problems, resource, new)


def _finish(problems: Problems, resource: str, item: Object) -> None:
    problems.raise_if_any(kind_of(resource), item["metadata"]["name"])
    if len(to_json(item)) > LARGEST_OBJECT_BYTES:
        # The object is well-formed, and the answer blames it all the same.
        problems.too_long("", LARGEST_OBJECT_BYTES)
        problems.raise_if_any(kind_of(resource), item["metadata"]["name"])


def _check_metadata(problems: Problems, resource: str, metadata: Object) -> None:
    name = metadata["name"]
    longest = LONGEST_NAME if resource in ("jobs", "namespaces", "services") else 253
    if len(name) > longest:
        problems.invalid("metadata.name", name, f"must be no more than {longest} characters")
    if not _SUBDOMAIN.match(name):
        problems.invalid("metadata.name", name, _SUBDOMAIN_RULE)
    _check_labels(problems, metadata.get("labels") or {}, "metadata.labels")
    annotations = metadata.get("annotations") or {}
    for key in annotations:
        _check_qualified(problems, key, "metadata.annotations")
    size = sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items())
    if size > LARGEST_ANNOTATIONS_BYTES:
        problems.too_long("metadata.annotations", LARGEST_ANNOTATIONS_BYTES)
    for place, ref in enumerate(metadata.get("ownerReferences") or ()):
        for part in ("apiVersion", "kind", "name", "uid"):
            if not ref.get(part):
                problems.required(f"metadata.ownerReferences[{place}].{part}")


def _check_labels(problems: Problems, labels: Object, field: str) -> None:
    for key, value in labels.items():
        _check_qualified(problems, key, field)
        if len(value) > LONGEST_NAME:
            problems.invalid(field, value, f"must be no more than {LONGEST_NAME} characters")
        elif value and not _LABEL.match(value):
            problems.invalid(field, value, _LABEL_RULE)


def _check_qualified(problems: Problems, key: str, field: str) -> None:
    prefix, slash, name = key.rpartition("/")
    if not _LABEL.match(name) or (slash and not _SUBDOMAIN.match(prefix)):
        problems.invalid(
            field, key, "a qualified name must consist of an optional prefix and a name part"
        )


def _check_job(problems: Problems, job: Object) -> None:
    spec = job["spec"]
    for part in (
        "parallelism",
        "completions",
        "backoffLimit",
        "activeDeadlineSeconds",
        "ttlSecondsAfterFinished",
    ):
        if (value := spec.get(part)) is not None and value < 0:
            problems.invalid(f"spec.{part}", value, "must be greater than or equal to 0")
    template = spec["template"]
    labels = template["metadata"].get("labels") or {}
    _check_labels(problems, labels, "spec.template.metadata.labels")
    pod = template["spec"]
    field = "spec.template.spec"
    if pod.get("restartPolicy") not in ("OnFailure", "Never"):
        problems.required(f"{field}.restartPolicy", 'valid values: "OnFailure", "Never"')
    _check_pod_spec(problems, pod, field)
    policy = spec.get("podFailurePolicy")
    replacement = spec.get("podReplacementPolicy")
    if policy is None:
        if replacement not in ("Failed", "TerminatingOrFailed"):
            allowed = ("Failed", "TerminatingOrFailed")
            problems.unsupported("spec.podReplacementPolicy", replacement, allowed)
        return
    if replacement != "Failed":
        problems.unsupported("spec.podReplacementPolicy", replacement, ("Failed",))
    if pod.get("restartPolicy") != "Never":
        problems.invalid(
            f"{field}.restartPolicy",
            pod.get("restartPolicy"),
            "only 'Never' is supported when podFailurePolicy is specified",
        )
    for place, rule in enumerate(policy.get("rules") or ()):
        _check_rule(problems, spec, rule, f"spec.podFailurePolicy.rules[{place}]")


def _check_rule(problems: Problems, spec: Object, rule: Object, field: str) -> None:
    action = rule.get("action")
    if not action:
        problems.required(f"{field}.action", f"valid values: {list(_POLICY_ACTIONS)}")
    elif action not in _POLICY_ACTIONS:
        problems.unsupported(f"{field}.action", action, _POLICY_ACTIONS)
    elif action == "FailIndex" and spec.get("backoffLimitPerIndex") is None:
        problems.invalid(f"{field}.action", action, "requires the backoffLimitPerIndex to be set")
    codes, patterns = rule.get("onExitCodes"), rule.get("onPodConditions") or []
    if codes and patterns:
        problems.invalid(
            field, rule, "specifying both OnExitCodes and OnPodConditions is not supported"
        )
    elif not codes and not patterns:
        problems.invalid(
            field, rule, "specifying one of OnExitCodes and OnPodConditions is required"
        )
    for place, pattern in enumerate(patterns):
        if not pattern.get("type"):
            problems.required(f"{field}.onPodConditions[{place}].type")
    if not codes:
        return
    operator, values = codes.get("operator"), codes.get("values") or []
    if operator not in ("In", "NotIn"):
        problems.unsupported(f"{field}.onExitCodes.operator", operator, ("In", "NotIn"))
    if not values:
        problems.invalid(f"{field}.onExitCodes.values", values, "at least one value is required")
    if values != sorted(values):
        problems.invalid(f"{field}.onExitCodes.values", values, "must be ordered")
    if len(set(values)) < len(values):
        problems.invalid(f"{field}.onExitCodes.values", values, "must not contain duplicates")
    if operator == "In" and 0 in values:
        problems.invalid(
            f"{field}.onExitCodes.values[{values.index(0)}]", 0, "must not be 0 for the In operator"
        )
    wanted = codes.get("containerName")
    pod = spec["template"]["spec"]
    names = {
        container.get("name")
        for part in ("containers", "initContainers")
        for container in pod.get(part) or ()
    }
    if wanted is not None and wanted not in names:
        problems.invalid(
            f"{field}.onExitCodes.containerName",
            wanted,
            "must be one of the container or initContainer names in the pod template",
        )


def _check_pod_spec(problems: Problems, spec: Object, field: str) -> None:
    if not spec.get("containers"):
        problems.required(f"{field}.containers")
    if (deadline := spec.get("activeDeadlineSeconds")) is not None and deadline < 1:
        problems.invalid(
            f"{field}.activeDeadlineSeconds",
            deadline,
            "must be between 1 and 2147483647, inclusive",
        )
    if spec["terminationGracePeriodSeconds"] < 0:
        problems.invalid(
            f"{field}.terminationGracePeriodSeconds",
            spec["terminationGracePeriodSeconds"],
            "must be greater than or equal to 0",
        )
    volumes = {volume.get("name") for volume in spec.get("volumes") or ()}
    names: set[str] = set()
    for part in ("initContainers", "containers"):
        for place, container in enumerate(spec.get(part) or ()):
            _check_container(problems, container, f"{field}.{part}[{place}]", names, volumes)


def _check_container(
    problems: Problems, container: Object, field: str, names: set[str], volumes: set[str]
) -> None:
    name = container.get("name") or ""
    if not name:
        problems.required(f"{field}.name")
    elif not _DNS_LABEL.match(name):
        problems.invalid(f"{field}.name", name, _DNS_RULE)
    elif name in names:
        problems.duplicate(f"{field}.name", name)
    names.add(name)
    if not container.get("image"):
        problems.required(f"{field}.image")
    for place, entry in enumerate(container.get("env") or ()):
        _check_env(problems, entry, f"{field}.env[{place}]")
    for place, mount in enumerate(container.get("volumeMounts") or ()):
        if mount.get("name") not in volumes:
            text = f'Not found: "{mount.get("name")}"'
            found = Problem(f"{field}.volumeMounts[{place}].name", "FieldValueNotFound", text)
            problems.found.append(found)
        if not mount.get("mountPath"):
            problems.required(f"{field}.volumeMounts[{place}].mountPath")


def _check_env(problems: Problems, entry: Object, field: str) -> None:
    name = entry.get("name") or ""
    if not name:
        problems.required(f"{field}.name")
    elif not _ENV_NAME.match(name):
        problems.invalid(
            f"{field}.name",
            name,
            "a valid environment variable name must consist only of printable ASCII characters "
            "other than '='",
        )
    source = entry.get("valueFrom")
    if source is None:
        return
    if entry.get("value"):
        problems.invalid(f"{field}.valueFrom", "", "may not be specified when `value` is not empty")
    for part in ("secretKeyRef", "configMapKeyRef"):
        if part in source and not (source[part] or {}).get("key"):
            problems.required(f"{field}.valueFrom.{part}.key")


def _check_secret(problems: Problems, secret: Object) -> None:
    for key, value in (secret.get("data") or {}).items():
        try:
            base64.b64decode(value or "", validate=True)
        except (binascii.Error, ValueError):
            problems.invalid(f"data[{key}]", "<value omitted>", "illegal base64 data")
        if not re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", key):
            problems.invalid(
                f"data[{key}]",
                key,
                "a valid config key must consist of alphanumeric characters, '-', '_' or '.'",
            )


def _check_job_change(problems: Problems, old: Object, new: Object) -> None:
    immutable = "field is immutable"
    for part in _JOB_IMMUTABLE:
        if old.get(part) != new.get(part):
            problems.invalid(f"spec.{part}", new.get(part), immutable)
    if _fixed_template(old, old) != _fixed_template(new, old):
        problems.invalid("spec.template", new["template"], immutable)


def _fixed_template(spec: Object, present: Object) -> Object:
    """The part of a template that may not change."""
    template: Object = spec["template"]
    if not present.get("suspend"):
        return template
    pod = {k: v for k, v in template["spec"].items() if k not in _FREE_WHILE_SUSPENDED}
    for part in ("initContainers", "containers"):
        if pod.get(part):
            pod[part] = [{**container, "resources": None} for container in pod[part]]
    return {"spec": pod}


def _check_pod_change(problems: Problems, old: Object, new: Object) -> None:
    def fixed(spec: Object) -> Object:
        rest = {part: value for part, value in spec.items() if part not in _POD_MUTABLE}
        for part in ("initContainers", "containers"):
            if rest.get(part):
                rest[part] = [{**container, "image": None} for container in rest[part]]
        return rest

    if fixed(old) != fixed(new):
        problems.forbidden(
            "spec",
            "pod updates may not change fields other than `spec.containers[*].image`,"
            "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only "
            "additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to "
            "be set to 1 if it was previously negative)",
        )
