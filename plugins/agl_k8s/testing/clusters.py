"""A cluster to test against: the fake one, or one that a kubeconfig names."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from attrs import frozen

from agl_core.clock import SystemClock
from agl_core.interfaces import Work
from agl_core.records import Rollout, RolloutConfig
from agl_k8s.api import KubeApi
from agl_k8s.config import JobLayer, K8sConfig
from agl_k8s.names import selector
from agl_k8s.runner import K8sRunner
from agl_k8s.testing.cluster import FakeCluster

CLOCK = SystemClock()
TOKEN = "agl1.k1.ci0x.1750000000.c2lnbmF0dXJl"
DEFAULT_IMAGE = "busybox:stable"


@frozen(kw_only=True)
class ClusterUnderTest:
    """Where a test's Jobs run."""

    kubeconfig: str
    image: str
    instance: str
    fake: FakeCluster | None

    def config(self, **changes: Any) -> K8sConfig:
        """Settings for this cluster; each test has an instance, and so a lease, of its own."""
        values: dict[str, Any] = {
            "kubeconfig": self.kubeconfig,
            "instance": self.instance,
            "max_active": 4,
            "creates_per_second": 50.0,
            "stop_grace_seconds": 1,
            "lease_seconds": 4.0,
            "job": JobLayer(image=self.image),
        }
        return K8sConfig(**(values | changes))

    def runner(self, **changes: Any) -> K8sRunner:
        return K8sRunner(self.config(**changes), CLOCK)

    def api(self, **changes: Any) -> KubeApi:
        return KubeApi(self.config(**changes), CLOCK)

    async def jobs(self) -> list[dict[str, Any]]:
        """The Jobs that exist, read apart from any runner."""
        async with self.api() as api:
            return list((await api.list("jobs", label_selector=selector(self.instance))).items)

    async def pods(self) -> list[dict[str, Any]]:
        async with self.api() as api:
            return list((await api.list("pods", label_selector=selector(self.instance))).items)

    async def evict(self, pod: dict[str, Any]) -> None:
        """What a drained node does to a pod."""
        name = pod["metadata"]["name"]
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": pod["metadata"]["namespace"]},
        }
        async with self.api() as api:
            await api.create("pods", body, name=name, subresource="eviction")

    async def steal_lease(self) -> None:
        """Write another holder into the lease, as a second controller might by mistake."""
        name = f"agl-lite-{self.instance}"
        async with self.api() as api:
            lease = await api.get("leases", name)
            lease["spec"]["holderIdentity"] = "a thief"
            await api.replace("leases", name, lease)

    async def sweep(self) -> None:
        """Leave nothing behind on a cluster that is not ours alone."""
        async with self.api() as api:
            for job in (await api.list("jobs", label_selector=selector(self.instance))).items:
                await api.delete("jobs", job["metadata"]["name"], propagation="Background")


@asynccontextmanager
async def fake_cluster(folder: Path, **options: Any) -> AsyncIterator[ClusterUnderTest]:
    """A fake of its own; ``options`` are ``FakeCluster``'s."""
    async with FakeCluster(**options) as fake:
        yield ClusterUnderTest(
            kubeconfig=str(fake.write_kubeconfig(folder / "kubeconfig")),
            image=DEFAULT_IMAGE,
            instance=_instance(),
            fake=fake,
        )


@asynccontextmanager
async def real_cluster(kubeconfig: str, image: str | None) -> AsyncIterator[ClusterUnderTest]:
    """A cluster that others may use too: what a test leaves is deleted."""
    cluster = ClusterUnderTest(
        kubeconfig=kubeconfig, image=image or DEFAULT_IMAGE, instance=_instance(), fake=None
    )
    try:
        yield cluster
    finally:
        await cluster.sweep()


def _instance() -> str:
    return f"test-{uuid.uuid4().hex[:8]}"


def work_of(rollout_id: str, command: Sequence[str], *, task: Any = None, **config: Any) -> Work:
    """Work for a runner whose agents call nobody."""
    rollout = Rollout(
        rollout_id=rollout_id, input=task, config=RolloutConfig(command=tuple(command), **config)
    )
    return Work(rollout=rollout, agent_url="http://127.0.0.1:9", token=TOKEN)
