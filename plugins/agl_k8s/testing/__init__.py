"""A fake Kubernetes cluster for tests of this plugin, and of code that runs on it."""

from __future__ import annotations

from agl_k8s.testing.cluster import FakeCluster
from agl_k8s.testing.scripts import Script

__all__ = ["FakeCluster", "Script"]
