"""Runs agents as Kubernetes Jobs, one per rollout."""

from __future__ import annotations

from agl_core.clock import Clock
from agl_core.hookspecs import hookimpl
from agl_core.interfaces import Runner
from agl_k8s.config import K8sConfig

__all__ = ["K8sConfig", "K8sPlugin"]


class K8sPlugin:
    """One Job per rollout; a pod is an attempt, and its UID the attempt's id."""

    Config = K8sConfig

    def __init__(self, config: K8sConfig) -> None:
        self._config = config

    @hookimpl
    def provide_runner(self, clock: Clock) -> Runner:
        from agl_k8s.runner import K8sRunner  # the client library is large, and an extra

        return K8sRunner(self._config, clock)
