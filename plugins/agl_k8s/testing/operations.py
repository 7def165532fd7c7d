"""Creating, listing, changing and deleting, as requests ask for it."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from typing import Any, cast, get_args

from attrs import field, frozen

from agl_core.errors import BadJson
from agl_core.wire import read_json, to_json
from agl_k8s.testing.admission import admit
from agl_k8s.testing.defaults import complete
from agl_k8s.testing.kinds import ApiStatus, Object, Objects
from agl_k8s.testing.objects import ObjectStore, Propagation
from agl_k8s.testing.patches import patched
from agl_k8s.testing.paths import Target
from agl_k8s.testing.schema import read_object
from agl_k8s.testing.selectors import FieldSelector, LabelSelector
from agl_k8s.testing.validation import check_change, check_new

# Their status is written apart, through the subresource.
_WITH_STATUS = ("jobs", "pods", "nodes")
# Has no version: the rest of a list as it is now.
_INCONSISTENT = -1
_EXPIRED_TOKEN = (
    "The provided continue parameter is too old to display a consistent list result. You can "
    "start a new list without the continue parameter, or use the continue token in this response "
    "to retrieve the remainder of the results. Continuing with the provided token results in an "
    "inconsistent list - objects that were created, modified, or deleted between the time the "
    "first chunk was returned and now may show up in the list."
)
_MODIFIED = (
    "the object has been modified; please apply your changes to the latest version and try again"
)
_ORPHANS = (
    '299 - "child pods are preserved by default when jobs are deleted; set '
    "propagationPolicy=Background to remove them or set propagationPolicy=Orphan to suppress this "
    'warning"'
)


@frozen
class Result:
    """An answer: an object, with values of ``Warning`` headers."""

    object: Object
    status: int = 200
    warnings: list[str] = field(factory=list)


def create(store: ObjectStore, target: Target, query: Mapping[str, str], body: Any) -> Result:
    warnings = _read(target, query, body)
    resource, namespace = target.kind.resource, target.namespace
    stated = (body.get("metadata") or {}).get("namespace")
    if stated and namespace and stated != namespace:
        message = (
            "the namespace of the provided object does not match the namespace sent on the request"
        )
        raise ApiStatus(400, "BadRequest", message)

    if resource in _WITH_STATUS:
        body.pop("status", None)

    def check(item: Object) -> None:
        check_new(resource, item)
        admit(store, resource, namespace or "", item)

    is_dry_run = query.get("dryRun") == "All"
    item = store.create(resource, namespace, body, check=check, is_dry_run=is_dry_run)
    return Result(item, 201, [*warnings, *_hidden_variables(resource, item)])


def get_list(store: ObjectStore, target: Target, query: Mapping[str, str]) -> Result:
    """A list, or a page of one; all pages together show one moment."""
    kind = target.kind
    labels = LabelSelector(query.get("labelSelector"))
    fields = FieldSelector(kind.resource, query.get("fieldSelector"))
    token, wanted = query.get("continue"), query.get("resourceVersion") or "0"
    version, start = store.version, ""
    if token:
        version, start = _read_token(token)
        if version == _INCONSISTENT:
            version = store.version
    else:
        _check_version(store, wanted)
        if query.get("resourceVersionMatch") == "Exact":
            version = int(wanted)
    try:
        found = store.list_at(kind.resource, target.namespace, version)
    except ApiStatus as exc:
        if not token:
            raise
        rest = {"continue": _token(_INCONSISTENT, start)}
        raise ApiStatus(410, "Expired", _EXPIRED_TOKEN, metadata=rest) from exc
    items = [
        item
        for item in found
        if labels.matches(item) and fields.matches(item) and _place(item) > start
    ]
    metadata: Object = {"resourceVersion": str(version)}
    limit = int(query.get("limit") or 0)
    if 0 < limit < len(items):
        metadata["continue"] = _token(version, _place(items[limit - 1]))
        if labels.is_empty and fields.is_empty:
            metadata["remainingItemCount"] = len(items) - limit
        items = items[:limit]
    return Result(
        {
            "kind": f"{kind.kind}List",
            "apiVersion": kind.api_version,
            "metadata": metadata,
            "items": [_untyped(item) for item in items],
        }
    )


def replace(store: ObjectStore, target: Target, query: Mapping[str, str], body: Any) -> Result:
    warnings = _read(target, query, body)
    metadata = body.get("metadata") or {}
    if metadata.get("name") not in (None, target.name):
        message = (
            f"the name of the object ({metadata['name']}) does not match "
            f"the name on the URL ({target.name})"
        )
        raise ApiStatus(400, "BadRequest", message)
    if target.kind.resource == "leases" and not metadata.get("resourceVersion"):
        message = (
            f'{target.kind.qualified_kind} "{target.name}" is invalid: metadata.resourceVersion: '
            "Invalid value: 0: must be specified for an update"
        )
        raise ApiStatus(422, "Invalid", message, target.kind.details(target.name))
    return Result(_write(store, target, body), warnings=warnings)


def patch(
    store: ObjectStore,
    target: Target,
    query: Mapping[str, str],
    body: Any,
    content_type: str,
) -> Result:
    present = store.get(target.kind.resource, target.namespace, target.name)
    new = patched(present, body, content_type)
    warnings = _read(target, query, new)
    return Result(_write(store, target, new), warnings=warnings)


def delete(store: ObjectStore, target: Target, query: Mapping[str, str], body: Any) -> Result:
    """Delete an object; the answer is the object where it is not gone yet."""
    resource = target.kind.resource
    options = _DeleteOptions.of(query, body)
    warnings = []
    if resource == "jobs" and options.propagation is None:
        warnings.append(_ORPHANS)
    item = options.delete(store, target, target.name)
    metadata = item["metadata"]
    there = store.peek((resource, target.namespace or "", target.name))
    if there is not None and there["metadata"]["uid"] == metadata["uid"]:
        return Result(item, warnings=warnings)
    details = target.kind.details(target.name) | {"uid": metadata["uid"]}
    return Result(_success(details), warnings=warnings)


def delete_collection(
    store: ObjectStore, target: Target, query: Mapping[str, str], body: Any
) -> Result:
    """Delete all that the selectors of the query match."""
    options = _DeleteOptions.of(query, body)
    listed = get_list(store, target, query)
    for item in listed.object["items"]:
        options.delete(store, target, item["metadata"]["name"])
    return listed


def evict(store: ObjectStore, namespace: str | None, name: str, body: Any = None) -> Result:
    """What a POST to a pod's ``eviction`` does: a condition, then a deletion."""
    pod = store.get("pods", namespace, name)
    options = _DeleteOptions.of({}, (body or {}).get("deleteOptions"))

    def disrupt(item: Object) -> None:
        status = item.setdefault("status", {})
        conditions = status.setdefault("conditions", [])
        conditions[:] = [c for c in conditions if c.get("type") != "DisruptionTarget"]
        conditions.append(
            {
                "type": "DisruptionTarget",
                "status": "True",
                "lastProbeTime": None,
                "lastTransitionTime": store.time(),
                "reason": "EvictionByEvictionAPI",
                "message": "Eviction API: evicting",
            }
        )

    if options.uid not in (None, pod["metadata"]["uid"]):
        store.delete("pods", namespace, name, uid=options.uid)  # refuses
    if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
        store.update("pods", namespace, name, disrupt)
    store.delete(
        "pods",
        namespace,
        name,
        uid=options.uid,
        propagation="Background",
        grace_seconds=options.grace_seconds,
    )
    return Result(_success(None), 201)


def check_watch_version(text: str | None) -> int | None:
    """The version after which a watch begins; None for one that begins with what is there.

    Raises:
        ApiStatus: 400, it is no version.
    """
    if text in (None, "", "0"):
        return None
    return _version(text or "")


# -------------------------------------------------------------------------------------------------


@frozen
class _DeleteOptions:
    propagation: Propagation | None
    uid: str | None
    version: str | None
    grace_seconds: int | None

    @classmethod
    def of(cls, query: Mapping[str, str], body: Any) -> _DeleteOptions:
        """Of the query, or of a body, which hides the query as a whole."""
        found: dict[str, Any] = body if isinstance(body, dict) and body else dict(query)
        policy = found.get("propagationPolicy")
        if policy is not None and policy not in get_args(Propagation):
            message = (
                'DeleteOptions.meta.k8s.io "" is invalid: propagationPolicy: Unsupported value: '
                f'"{policy}": supported values: "Foreground", "Background", "Orphan", "nil"'
            )
            raise ApiStatus(422, "Invalid", message)
        grace = found.get("gracePeriodSeconds")
        preconditions = found.get("preconditions") or {}
        return cls(
            cast("Propagation | None", policy),
            preconditions.get("uid"),
            preconditions.get("resourceVersion"),
            None if grace is None else int(grace),
        )

    def delete(self, store: ObjectStore, target: Target, name: str) -> Object:
        return store.delete(
            target.kind.resource,
            target.namespace,
            name,
            uid=self.uid,
            version=self.version,
            propagation=self.propagation,
            grace_seconds=self.grace_seconds,
        )


def _read(target: Target, query: Mapping[str, str], body: Any) -> list[str]:
    """Check the fields of what was sent; returns warnings."""
    reading = read_object(target.kind, body)
    mode = query.get("fieldValidation") or "Warn"
    if mode not in ("Strict", "Warn", "Ignore"):
        message = (
            f'fieldValidation: Unsupported value: "{mode}": supported values: '
            '"Ignore", "Strict", "Warn"'
        )
        raise ApiStatus(422, "Invalid", message)
    if reading.unknown and mode == "Strict":
        raise reading.refusal()
    reading.drop_unknown()
    return reading.warnings() if mode == "Warn" else []


def _write(store: ObjectStore, target: Target, body: Object) -> Object:
    """Put what may be written at a target in place of what is there."""
    kind, has_status = target.kind, target.kind.resource in _WITH_STATUS
    wanted = body.get("metadata") or {}

    def change(item: Object) -> None:
        metadata = item["metadata"]
        if wanted.get("resourceVersion") not in (None, "", metadata["resourceVersion"]):
            raise kind.conflict(target.name, _MODIFIED)
        if wanted.get("uid") not in (None, "", metadata["uid"]):
            why = (
                f"Precondition failed: UID in precondition: {wanted['uid']}, "
                f"UID in object meta: {metadata['uid']}"
            )
            raise kind.conflict(target.name, why)
        if target.subresource == "status":
            item["status"] = body.get("status") or {}
            return
        old = dict(item)
        kept = {"status": item["status"]} if has_status and "status" in item else {}
        item.clear()
        item.update(body)
        item["metadata"] = dict(wanted) | {"name": target.name}
        if has_status:
            item.pop("status", None)
        item.update(kept)
        if "spec" in old and not item.get("spec"):
            item["spec"] = old["spec"]
        complete(kind.resource, item)
        check_change(kind.resource, old, item)

    return store.update(kind.resource, target.namespace, target.name, change)


def _check_version(store: ObjectStore, text: str) -> None:
    version = _version(text)
    if version > store.version:
        message = f"Too large resource version: {version}, current: {store.version}"
        cause = {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
        raise ApiStatus(504, "Timeout", message, {"causes": [cause], "retryAfterSeconds": 1})


def _version(text: str) -> int:
    if not text.isdecimal():
        message = f'Invalid value: "{text}": strconv.ParseUint: parsing "{text}": invalid syntax'
        raise ApiStatus(400, "BadRequest", f"resourceVersion: {message}")
    return int(text)


def _token(version: int, start: str) -> str:
    return base64.urlsafe_b64encode(to_json({"rv": version, "start": start})).decode()


def _read_token(token: str) -> tuple[int, str]:
    try:
        found = read_json(base64.urlsafe_b64decode(token))
        return int(found["rv"]), str(found["start"])
    except (BadJson, binascii.Error, ValueError, KeyError, TypeError) as exc:
        raise ApiStatus(400, "BadRequest", "continue key is not valid") from exc


def _place(item: Object) -> str:
    metadata = item["metadata"]
    # A space is before everything that a name can have.
    return f"{metadata.get('namespace', '')} {metadata['name']}"


def _untyped(item: Object) -> Object:
    return {part: value for part, value in item.items() if part not in ("apiVersion", "kind")}


def _success(details: Object | None) -> Object:
    found: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    return found if details is None else found | {"details": details}


def _hidden_variables(resource: str, item: Object) -> Iterator[str]:
    """Warnings of variables that an earlier entry of the same name has set."""
    if resource not in ("jobs", "pods"):
        return
    is_job = resource == "jobs"
    spec = item["spec"]["template"]["spec"] if is_job else item["spec"]
    field_ = "spec.template.spec" if is_job else "spec"
    for part in ("initContainers", "containers"):
        containers: Objects = spec.get(part) or []
        for place, container in enumerate(containers):
            seen: set[str] = set()
            for number, entry in enumerate(container.get("env") or ()):
                if entry["name"] in seen:
                    yield (
                        f'299 - "{field_}.{part}[{place}].env[{number}]: hides previous definition '
                        f'of \\"{entry["name"]}\\", which may be dropped when using apply"'
                    )
                seen.add(entry["name"])
