"""What ``agl doctor`` finds on a cluster: can rollouts run there, and if not, what is missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from agl_core.clock import Clock
from agl_core.errors import AglError, ConfigError
from agl_core.interfaces import Finding, Work
from agl_k8s.api import KubeApi
from agl_k8s.config import K8sConfig
from agl_k8s.credentials import SERVICE_ACCOUNT
from agl_k8s.errors import KubeError, kind_of
from agl_k8s.manifest import build_job
from agl_k8s.probe import probe
from agl_k8s.quotas import look_at_quotas

# All that the runner does: API group, resource, subresource, verbs.
RIGHTS = (
    ("batch", "jobs", "", ("create", "get", "list", "watch", "delete")),
    ("", "pods", "", ("list", "watch", "delete")),
    ("", "pods", "log", ("get",)),
    ("", "events", "", ("list",)),
    ("", "secrets", "", ("create",)),
)
LEASE_RIGHTS = ("coordination.k8s.io", "leases", "", ("create", "get", "update"))

# Somebody waits for each line. The server's own limit for a webhook is as long.
REQUEST_SECONDS = 10.0

_BY_KIND = {
    "unauthorized": "the credentials are wrong or have ended: log in anew, or correct them",
    "unreachable": "check the server's address in the kubeconfig, the network between, and proxies",
}
# Where no answer came, parts of the reason for that.
_BY_REASON = {
    "Certificate": "we do not trust the server's certificate: correct certificate-authority in the "
    "kubeconfig, or the name in the server's address",
    "SSL": "no TLS that we could use is spoken there: correct the server's address in the "
    "kubeconfig (https, port)",
    "NoObject": "something else answers there, such as a proxy or a login page: correct the "
    "server's address in the kubeconfig, or NO_PROXY",
}


async def examine(
    config: K8sConfig,
    clock: Clock,
    work: Work,
    *,
    with_probe: bool,
    service_account: Path = SERVICE_ACCOUNT,
) -> AsyncIterator[Finding]:
    """See ``Runner.examine``."""
    async with AsyncExitStack() as stack:
        api = KubeApi(
            config, clock, service_account=service_account, request_seconds=REQUEST_SECONDS
        )
        try:
            await stack.enter_async_context(api)
            version = await api.server_version()
        except (ConfigError, KubeError) as exc:
            yield _failed("cluster", exc)
            for subject in ("namespace", "rights", "job", "quota", "probe"):
                yield _skipped(subject, "there is no cluster to ask")
            return
        yield _ok("cluster", f"Kubernetes {version} answers")
        yield (namespace := await _look_at_namespace(api))
        yield (rights := await _look_at_rights(api, config))
        if namespace.status == "failed":
            for subject in ("job", "quota", "probe"):
                yield _skipped(subject, "the namespace is not usable")
            return
        try:
            job = build_job(config, work)
        except AglError as exc:
            yield _failed("job", exc)
            yield _skipped("probe", "the settings make no Job")
            return
        yield (accepted := await _look_at_job(api, job))
        async for finding in _look_at_names(api, job):
            yield finding
        yield await look_at_quotas(api, _pod(job), config.max_active)
        if not with_probe:
            yield _skipped("probe", "not asked for")
        elif "failed" in (rights.status, accepted.status):
            yield _skipped("probe", "no Job can be created")
        else:
            yield await probe(api, clock, config, work, job)


async def _look_at_namespace(api: KubeApi) -> Finding:
    name = api.namespace
    try:
        found = await api.get("namespaces", name)
    except KubeError as exc:
        kind = kind_of(exc)
        if kind == "forbidden":
            # The rights that the controller needs do not reach so far.
            return _skipped("namespace", f"{name}: we may not look at namespaces")
        if kind == "not_found":
            hint = f"create it, or correct plugins.k8s.namespace: kubectl create namespace {name}"
            return Finding(
                subject="namespace", status="failed", message=f"{name} does not exist", hint=hint
            )
        return _failed("namespace", exc)
    if found.get("status", {}).get("phase") == "Terminating":
        message = f"{name} is being deleted"
        return Finding(
            subject="namespace", status="failed", message=message, hint="use another namespace"
        )
    return _ok("namespace", name)


async def _look_at_rights(api: KubeApi, config: K8sConfig) -> Finding:
    wanted = [*RIGHTS, LEASE_RIGHTS] if config.lease else list(RIGHTS)
    asked = [
        (verb, group, resource, subresource)
        for group, resource, subresource, verbs in wanted
        for verb in verbs
    ]
    try:
        answers = await asyncio.gather(*(api.review_access(*right) for right in asked))
    except KubeError as exc:
        return _failed("rights", exc)
    missing: dict[str, list[str]] = {}
    for (verb, group, resource, subresource), is_allowed in zip(asked, answers, strict=True):
        if not is_allowed:
            name = f"{resource}/{subresource}" if subresource else resource
            missing.setdefault(f"{name}.{group}" if group else name, []).append(verb)
    if not missing:
        return _ok("rights", f"all {len(asked)} that the controller needs")
    told = "; ".join(f"{'/'.join(verbs)} {name}" for name, verbs in missing.items())
    return Finding(
        subject="rights",
        status="failed",
        message=f"missing in namespace {api.namespace}: {told}",
        hint="bind the Role of deploy/ to the user or service account that this runs as",
    )


async def _look_at_job(api: KubeApi, job: dict[str, Any]) -> Finding:
    try:
        await api.create("jobs", job, is_dry_run=True)
    except KubeError as exc:
        if kind_of(exc) == "quota":
            return Finding(
                subject="job",
                status="warning",
                message=f"no more Jobs at present: {exc.message}",
                hint="rollouts wait until others end, or raise the quota",
            )
        if kind_of(exc) == "invalid":
            return Finding(
                subject="job",
                status="failed",
                message=f"the API server would refuse it: {exc.message}",
                hint="correct [plugins.k8s.job]; a path that is named is one of the Job",
            )
        return _failed("job", exc)
    image = next(c["image"] for c in _pod(job)["containers"] if c["name"] == "agent")
    return _ok("job", f"the API server would take it, with image {image}")


async def _look_at_names(api: KubeApi, job: Mapping[str, Any]) -> AsyncIterator[Finding]:
    """What a pod names: the Job would be taken without them, and its pods refused or stuck."""
    pod = _pod(job)
    named = [("serviceaccounts", pod.get("serviceAccountName"))]
    named += [("secrets", secret.get("name")) for secret in pod.get("imagePullSecrets") or ()]
    named += [("priorityclasses", pod.get("priorityClassName"))]
    settings = {
        "serviceaccounts": ("service account", "service_account"),
        "secrets": ("pull secret", "image_pull_secrets"),
        "priorityclasses": ("priority class", "priority_class"),
    }
    for resource, name in named:
        if not name:
            continue
        subject, setting = settings[resource]
        try:
            await api.get(resource, name)
        except KubeError as exc:
            if kind_of(exc) == "not_found":
                yield Finding(
                    subject=subject,
                    status="failed",
                    message=f"{name} does not exist",
                    hint=f"create it, or correct {setting} in [plugins.k8s.job]",
                )
            elif kind_of(exc) == "forbidden":
                yield _skipped(subject, f"{name}: we may not look at it")
            else:
                yield _failed(subject, exc)
        else:
            yield _ok(subject, name)


def _pod(job: Mapping[str, Any]) -> dict[str, Any]:
    return dict(job["spec"]["template"]["spec"])


def _ok(subject: str, message: str) -> Finding:
    return Finding(subject=subject, status="ok", message=message)


def _skipped(subject: str, message: str) -> Finding:
    return Finding(subject=subject, status="skipped", message=message)


def _failed(subject: str, error: AglError) -> Finding:
    hint = error.hint
    if hint is None and isinstance(error, KubeError):
        hint = _hint_of(error)
    return Finding(subject=subject, status="failed", message=error.message, hint=hint)


def _hint_of(error: KubeError) -> str | None:
    kind = kind_of(error)
    if kind == "unreachable":
        for part, hint in _BY_REASON.items():
            if part in error.reason:
                return hint
    return _BY_KIND.get(kind)
