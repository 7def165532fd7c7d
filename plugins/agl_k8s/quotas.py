"""Do the namespace's quotas leave room for agents? Compared as the API server compares them."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from agl_core.interfaces import Finding
from agl_k8s.api import KubeApi
from agl_k8s.errors import KubeError, kind_of


async def look_at_quotas(api: KubeApi, pod: Mapping[str, Any], max_active: int) -> Finding:
    """Whether quotas leave room for one pod, and for as many as the settings allow at once.

    Args:
        api: Of the cluster.
        pod: The ``spec`` of a rollout's pod.
        max_active: How many rollouts there may be at once.
    """
    try:
        quotas = (await api.list("resourcequotas")).items
    except KubeError as exc:
        is_forbidden = kind_of(exc) == "forbidden"
        return Finding(
            subject="quota",
            status="skipped" if is_forbidden else "failed",
            message="we may not look at quotas" if is_forbidden else exc.message,
        )
    if not quotas:
        return Finding(subject="quota", status="ok", message="none is set")
    needs = _needs_of(pod)
    defaults = await _defaults(api)
    tight: list[str] = []
    for quota in quotas:
        spec = quota.get("spec") or {}
        if spec.get("scopes") or spec.get("scopeSelector"):
            continue  # it may not be about these pods
        status = quota.get("status") or {}
        hard, used = status.get("hard") or {}, status.get("used") or {}
        for resource, limit in hard.items():
            if _is_unset(pod, resource, defaults):
                return Finding(
                    subject="quota",
                    status="failed",
                    message=f"{quota['metadata']['name']} refuses pods that do not set {resource}",
                    hint="set it for each container, in [plugins.k8s.job] resources",
                )
            need = needs.get(resource)
            if need is None:
                continue
            free = _quantity(limit) - _quantity(used.get(resource, "0"))
            name = f"{quota['metadata']['name']}: {resource}"
            if _quantity(limit) < need:
                return Finding(
                    subject="quota",
                    status="failed",
                    message=f"{name} is {limit}, and one pod needs {need.normalize():f}",
                    hint="raise the quota, or ask for less in [plugins.k8s.job] resources",
                )
            if free < need * max_active:
                fitting = max(0, int(free // need))
                tight.append(f"{name} leaves room for {fitting}")
    if tight:
        return Finding(
            subject="quota",
            status="warning",
            message=f"fewer than max_active = {max_active} fit: {'; '.join(tight)}",
            hint="the others wait, which counts against no time-out",
        )
    return Finding(subject="quota", status="ok", message=f"{max_active} rollouts at once fit")


async def _defaults(api: KubeApi) -> set[str] | None:
    """What the namespace sets for containers that say nothing; None: we may not know."""
    try:
        ranges = (await api.list("limitranges")).items
    except KubeError:
        return None
    limits = [limit for found in ranges for limit in (found.get("spec") or {}).get("limits") or ()]
    found = set()
    for limit in limits:
        if limit.get("type") == "Container":
            found |= {f"limits.{name}" for name in limit.get("default") or ()}
            # A default limit is the default request where there is no other.
            for part in ("default", "defaultRequest"):
                found |= {f"requests.{name}" for name in limit.get(part) or ()}
    return found


def _is_unset(pod: Mapping[str, Any], resource: str, defaults: set[str] | None) -> bool:
    """Whether a quota for this resource refuses the pod because a container says nothing of it."""
    part, _, name = resource.rpartition(".")
    if name not in ("cpu", "memory") or part not in ("", "requests", "limits"):
        return False
    part = part or "requests"
    if defaults is None or f"{part}.{name}" in defaults:
        return False
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        resources = container.get("resources") or {}
        parts = ("limits",) if part == "limits" else ("requests", "limits")
        if not any(name in (resources.get(one) or {}) for one in parts):
            return True
    return False


def _needs_of(pod: Mapping[str, Any]) -> dict[str, Decimal]:
    """What one rollout takes of a quota, by the quota's names."""
    needs = {name: Decimal(1) for name in ("pods", "count/pods", "count/jobs.batch")}
    needs["secrets"] = needs["count/secrets"] = Decimal(1)
    inits = [c for c in pod.get("initContainers", ()) if c.get("restartPolicy") == "Always"]
    for container in (*pod["containers"], *inits):
        resources = container.get("resources") or {}
        limits = resources.get("limits") or {}
        # What only has a limit asks for as much.
        requests = {**limits, **(resources.get("requests") or {})}
        for prefix, amounts in (("requests.", requests), ("limits.", limits)):
            for name, amount in amounts.items():
                full = f"{prefix}{name}"
                needs[full] = needs.get(full, Decimal(0)) + _quantity(amount)
    for name in ("cpu", "memory", "ephemeral-storage"):
        if f"requests.{name}" in needs:
            needs[name] = needs[f"requests.{name}"]
    return {name: need for name, need in needs.items() if need > 0}


def _quantity(text: Any) -> Decimal:
    from kubernetes.utils.quantity import parse_quantity

    try:
        return Decimal(parse_quantity(text))
    except (ValueError, ArithmeticError):
        return Decimal(0)  # the API server says what is wrong with it
