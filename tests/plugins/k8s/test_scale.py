"""Many rollouts: the cluster never has more Jobs than it may, and each costs three calls."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agl_core.client import AsyncAglLiteClient
from agl_core.clock import SystemClock
from agl_k8s.names import rollout_id_of
from agl_k8s.testing import scripts
from agl_k8s.testing.clusters import fake_cluster

CLOCK = SystemClock()
ROLLOUTS = int(os.environ.get("AGL_TEST_ROLLOUTS", "300"))
ACTIVE = max(50, ROLLOUTS // 10)


class Unfinished:
    """Counts the Jobs that exist and are not over, and remembers the most."""

    def __init__(self) -> None:
        self.most = 0
        self.made: Counter[str] = Counter()
        self._live: set[str] = set()

    def hear(self, type_: str, resource: str, item: dict[str, Any]) -> None:
        if resource != "jobs":
            return
        uid = item["metadata"]["uid"]
        conditions = {c["type"] for c in item.get("status", {}).get("conditions", ())}
        if type_ == "ADDED":
            self.made[rollout_id_of(item) or "?"] += 1
        if type_ == "DELETED" or conditions & {"Complete", "Failed"}:
            self._live.discard(uid)
        else:
            self._live.add(uid)
        self.most = max(self.most, len(self._live))


def memory_bytes(pid: int) -> int:
    (line,) = (
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmRSS")
    )
    return int(line.split()[1]) * 1024


@pytest.mark.timeout(600)
async def test_c72_jobs_are_bounded_and_cost_three_calls_each(
    tmp_path: Path, service: Any, controllers: Any
) -> None:
    seen = Unfinished()
    seconds = random.Random(1)
    async with fake_cluster(tmp_path) as cluster:
        fake = cluster.fake
        assert fake is not None
        fake.store.subscribe(seen.hear)
        fake.node.script_for = lambda pod: scripts.exits(0, after_seconds=seconds.uniform(0, 0.5))
        settings = f"max_active = {ACTIVE}\ncreates_per_second = 1000\nlease = false"
        async with (
            AsyncAglLiteClient(service.url) as client,
            controllers(tmp_path, cluster, service.url, 1, settings) as working,
        ):
            for first in range(0, ROLLOUTS, 500):
                count = min(500, ROLLOUTS - first)
                await client.enqueue([{"rollout_id": f"r-{first + n}"} for n in range(count)])
            fake.faults.delay(0.02, "/jobs", method="POST", count=None)
            sizes = []
            async with asyncio.timeout(500):
                while len(seen.made) < ROLLOUTS or fake.store.list("jobs"):
                    await CLOCK.sleep(0.5)
                    sizes.append((len(seen.made), memory_bytes(working.pids()[0])))
            page = await client.rollouts(status=["succeeded"], limit=1)
            assert page.items
            assert not (await client.rollouts(status=["queuing", "running"], limit=1)).items
    assert set(seen.made.values()) == {1}
    assert seen.most <= ACTIVE
    changes = [r for r in fake.requests if r.method != "GET" and "/leases" not in r.path]
    counts = Counter(
        (r.method, r.path.split("/")[-1 if r.method == "POST" else -2]) for r in changes
    )
    # A scripted pod does not wait for its Secret, so its Job may be over before that is made.
    secrets = counts.pop(("POST", "secrets"))
    assert counts == {("POST", "jobs"): ROLLOUTS, ("DELETE", "jobs"): ROLLOUTS}
    assert 0.9 * ROLLOUTS <= secrets <= ROLLOUTS
    reads = [r for r in fake.requests if r.method == "GET" and "/leases" not in r.path]
    assert len(reads) < 20, reads
    # Once places are full it holds as much as it ever will, whatever else waits in the service.
    early = max(size for made, size in sizes if made <= ROLLOUTS * 0.4)
    assert sizes[-1][1] - early < 16 * 2**20, [size // 2**20 for _, size in sizes]
