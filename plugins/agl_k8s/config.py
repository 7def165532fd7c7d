"""The table ``[plugins.k8s]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen
from attrs.validators import deep_iterable, ge, gt, matches_re

# The value of a label, and a part of the Lease's name, which has no capitals.
_INSTANCE = matches_re(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?\Z")


@frozen(kw_only=True)
class JobLayer:
    """What a Job is made of: ``[plugins.k8s.job]``, and ``job_defaults`` of resources.

    A rollout's ``config`` is the third layer. Lists and objects are Kubernetes' own, merged as
    it merges them: containers, volumes and variables by name.
    """

    image: str | None = None
    command: tuple[str, ...] | None = None
    args: tuple[str, ...] | None = None
    env: Mapping[str, str] = field(factory=dict)
    resources: Mapping[str, Any] = field(factory=dict)
    """Requests and limits of the agent's container."""
    volumes: tuple[Mapping[str, Any], ...] = ()
    volume_mounts: tuple[Mapping[str, Any], ...] = ()
    """Of the agent's container."""
    service_account: str | None = None
    image_pull_secrets: tuple[str, ...] = ()
    node_selector: Mapping[str, str] = field(factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    affinity: Mapping[str, Any] = field(factory=dict)
    priority_class: str | None = None
    security_context: Mapping[str, Any] = field(factory=dict)
    """Of the agent's container."""
    pod_security_context: Mapping[str, Any] = field(factory=dict)
    sidecars: tuple[Mapping[str, Any], ...] = ()
    """Containers that end with the agent's (native sidecars)."""
    init_containers: tuple[Mapping[str, Any], ...] = ()
    queue_name: str | None = None
    """Kueue's local queue: Jobs are created suspended, and Kueue starts them."""
    labels: Mapping[str, str] = field(factory=dict)
    annotations: Mapping[str, str] = field(factory=dict)
    job_patch: Mapping[str, Any] = field(factory=dict)
    """Merged into the Job after the fields above; null removes."""


@frozen(kw_only=True)
class K8sConfig:
    """Agents as Kubernetes Jobs."""

    kubeconfig: str | None = None
    """Path; null: ``KUBECONFIG``, the user's default file, or the pod's service account."""
    context: str | None = None
    namespace: str | None = None
    """Of the Jobs; null: the context's or the service account's."""
    instance: str = field(default="default", validator=_INSTANCE)
    """Tells the Jobs of several services in one namespace apart."""
    max_active: int = field(default=100, validator=ge(1))
    """Rollouts at once, those that wait for a node among them."""
    creates_per_second: float = field(default=5.0, validator=gt(0))
    """The Job controller carries about 3 Jobs per second from start to end by default."""
    pending_seconds: float = field(default=900.0, validator=gt(0))
    """How long a pod may wait for a node; a Job that Kueue holds back is not counted."""
    start_grace_seconds: float = field(default=60.0, validator=gt(0))
    """How long an image pull, a missing secret or a refused pod may go on."""
    image_failures: int = field(default=3, validator=ge(0))
    """How many pods in a row may lack an image before rollouts with it fail at once; 0: any."""
    image_retry_seconds: float = field(default=300.0, validator=gt(0))
    """How long until one more rollout tries such an image."""
    node_lost_seconds: float = field(default=300.0, validator=gt(0))
    """How long a node may leave a pod Terminating beyond its grace."""
    stop_grace_seconds: int = field(default=10, validator=ge(0))
    """Between SIGTERM and SIGKILL."""
    pause_allowance_seconds: float = field(default=3600.0, validator=ge(0))
    """Added to a rollout's time-out in the pod's own deadline, a backstop: pauses do not count."""
    infra_retries: int = field(default=3, validator=ge(0))
    """Further attempts after ones that ended through no fault of the agent (an eviction, say)."""
    fail_codes: tuple[int, ...] = field(default=(78,), validator=deep_iterable(ge(1)))
    """Exit codes of agents that no retry would mend."""
    ttl_seconds: int = field(default=86400, validator=ge(0))
    """When Kubernetes removes a finished Job that no controller has deleted."""
    log_tail_bytes: int = field(default=16384, validator=gt(0))
    """How much of a failed container's log becomes a ``log`` event."""
    lease: bool = True
    """Several controllers elect one that works; false: there is but one."""
    lease_seconds: float = field(default=15.0, validator=gt(0))
    """How long another controller waits for one that does not answer."""
    allow_privileged: bool = False
    """Let Jobs be privileged, use the host's namespaces or mount its paths."""
    job: JobLayer = field(factory=JobLayer)
    """``[plugins.k8s.job]``: what all Jobs have in common."""
