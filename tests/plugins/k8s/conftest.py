"""A cluster for the tests: the fake one, or with AGL_TEST_CLUSTER=1 that of KUBECONFIG."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agl_core.app import create_app, load
from agl_core.config import RawConfig
from agl_core.testing.servers import serve_asgi
from agl_k8s.testing import FakeCluster
from agl_k8s.testing.clusters import ClusterUnderTest, fake_cluster, real_cluster

IS_REAL = os.environ.get("AGL_TEST_CLUSTER") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A real cluster takes its time, and cannot do what only a fake is told to."""
    if not IS_REAL:
        return
    here = Path(__file__).parent
    for item in items:
        if not item.path.is_relative_to(here):
            continue
        if item.get_closest_marker("cluster") is None:
            item.add_marker(pytest.mark.skip(reason="needs the fake cluster"))
        else:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[ClusterUnderTest]:
    if IS_REAL:
        image = os.environ.get("AGL_TEST_IMAGE")
        async with real_cluster(os.environ["KUBECONFIG"], image) as found:
            yield found
    else:
        async with fake_cluster(tmp_path) as made:
            yield made


@pytest.fixture
def fake(cluster: ClusterUnderTest) -> FakeCluster:
    assert cluster.fake is not None
    return cluster.fake


class Service:
    """A service on a real socket that can be away for a while; its memory outlives that."""

    def __init__(self) -> None:
        tables = {"plugins": {"enabled": ["memory", "vllm"]}}
        self.app = create_app(load(RawConfig(tables=tables)))
        self.is_away = False
        self.url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and self.is_away:
            # Returning without an answer closes the connection, as a death does.
            return
        await self.app.app(scope, receive, send)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    made = Service()
    async with made.app, serve_asgi(made) as url:
        made.url = url
        yield made
        made.app.feed.close()


class Controllers:
    """Controllers as processes; one that is killed is started again, as a Deployment does."""

    def __init__(
        self, folder: Path, cluster: ClusterUnderTest, url: str, count: int, settings: str = ""
    ) -> None:
        self.config = folder / "agl.toml"
        self.config.write_text(
            f"""[plugins]
enabled = ["memory", "vllm", "k8s"]
[controller]
url = "{url}"
poll_seconds = 2
resync_seconds = 3
[plugins.k8s]
kubeconfig = "{cluster.kubeconfig}"
instance = "{cluster.instance}"
infra_retries = 50
{settings}
stop_grace_seconds = 0
[plugins.k8s.job]
image = "{cluster.image}"
"""
        )
        self.log = folder / "controllers.log"
        self.count = count
        self.kills = 0
        self._processes: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> Controllers:
        for _ in range(self.count):
            await self._start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _start(self) -> None:
        with self.log.open("ab") as log:
            self._processes.append(
                await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-m", "agl_core.cli", "controller", "--config", str(self.config)),
                    stdout=log,
                    stderr=log,
                )
            )

    async def revive(self) -> None:
        """Start again those that ended by themselves: a lease is lost on a busy machine."""
        for process in list(self._processes):
            if process.returncode is not None:
                self._processes.remove(process)
                await self._start()

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    async def kill(self, rng: random.Random) -> None:
        """SIGKILL to one of them, whether it leads or waits, and another in its place."""
        process = self._processes.pop(rng.randrange(len(self._processes)))
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()
        self.kills += 1
        await self._start()


@pytest.fixture
def controllers() -> type[Controllers]:
    return Controllers
