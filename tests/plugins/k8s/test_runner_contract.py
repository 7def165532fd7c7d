"""The Kubernetes runner keeps the rules of all runners."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from agl_core.clock import SystemClock
from agl_core.interfaces import Runner, Work
from agl_core.testing.contracts import RunnerContract
from agl_core.testing.contracts.runner import Agent
from agl_k8s.names import job_name
from agl_k8s.testing.clusters import ClusterUnderTest, work_of

CLOCK = SystemClock()
AGENTS: dict[str, list[str]] = {
    "succeeds": ["sh", "-c", "echo fine"],
    "fails": ["sh", "-c", "echo about to fail; exit 3"],
    # A shell is process 1 of its container, which no signal ends unless it is caught.
    "hangs": ["sh", "-c", "trap 'exit 143' TERM; echo started; sleep 600 & wait"],
    "hangs_deaf": ["sh", "-c", "trap '' TERM; echo started; sleep 600"],
    "hangs_politely": ["sh", "-c", "trap 'exit 0' TERM; echo started; sleep 600 & wait"],
    "talks": [
        "sh",
        "-c",
        "trap 'exit 143' TERM; echo one; echo two; echo $OPENAI_API_KEY; echo started; "
        "sleep 600 & wait",
    ],
    "is_missing": ["no-such-program"],
}


@pytest.mark.cluster
class TestK8sRunnerContract(RunnerContract):
    @pytest.fixture
    def open_runner(
        self, cluster: ClusterUnderTest
    ) -> Callable[[], AbstractAsyncContextManager[Runner]]:
        self._cluster = cluster
        return cluster.runner

    def make_work(self, rollout_id: str, agent: Agent, **config: Any) -> Work:
        return work_of(rollout_id, AGENTS[agent], **config)

    async def is_started(self, work: Work) -> None:
        name = job_name(work.rollout.rollout_id)
        async with asyncio.timeout(120), self._cluster.api() as api:
            while True:
                for pod in await self._cluster.pods():
                    if not pod["metadata"]["name"].startswith(name):
                        continue
                    if pod["status"].get("phase") != "Running":
                        continue
                    tail = await api.log_tail(
                        pod["metadata"]["name"], "agent", lines=10, size_bytes=1000
                    )
                    if tail and b"started" in tail:
                        return
                await CLOCK.sleep(0.05)
