"""Everything at once: controllers killed, connections cut, servers away; nothing lost or twice."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agl_core.client import AsyncAglLiteClient
from agl_core.clock import SystemClock
from agl_core.errors import ApiError
from agl_core.records import Rollout
from agl_k8s.names import rollout_id_of
from agl_k8s.testing import FakeCluster, Script, scripts
from agl_k8s.testing.clusters import fake_cluster

CLOCK = SystemClock()
SEED = int(os.environ.get("AGL_TEST_SEED", "1"))
ROLLOUTS = 200


def behaviours(rng: random.Random) -> Any:
    """What pods do, by chance but the same for each seed and rollout."""
    tries: Counter[str] = Counter()

    def choose(pod: dict[str, Any]) -> Script:
        name = rollout_id_of(pod) or ""
        tries[name] += 1
        mine = random.Random(f"{SEED} {name} {tries[name]}")
        seconds = mine.uniform(0.0, 1.5)
        code = mine.choice([0, 0, 0, 0, 1, 78])
        return scripts.exits(code, after_seconds=seconds, log=f"try {tries[name]}\n".encode())

    return choose


async def trouble(rng: random.Random, made: Any, working: Any, fake: FakeCluster) -> None:
    """One fault after the other, for ever."""
    while True:
        await CLOCK.sleep(rng.uniform(0.4, 1.6))
        kinds = ["controller", "service", "watches", "api", "manager", "evict", "evict", "busy"]
        kind = rng.choice(kinds)
        if kind == "controller":
            await working.kill(rng)
        elif kind == "service":
            made.is_away = True
            await CLOCK.sleep(rng.uniform(0.2, 1.0))
            made.is_away = False
        elif kind == "watches":
            fake.faults.cut_watches(count=2)
        elif kind == "api":
            await fake.restart_api_server()
        elif kind == "manager":
            fake.job_controller.stop()
            await CLOCK.sleep(rng.uniform(0.2, 0.8))
            fake.job_controller.start()
        elif kind == "evict":
            running = fake.store.list("pods", fields="status.phase=Running")
            if running:
                fake.evict(rng.choice(running))
        else:
            fake.faults.clear()
            fake.faults.busy(count=3)
            fake.faults.bad_gateway(count=2)
            fake.faults.lose_reply(method="POST", count=2)


class Ends:
    """Watches the service: each rollout ends once and stays as it ended."""

    def __init__(self) -> None:
        self.ended: dict[str, Rollout] = {}

    def see_all(self, rollouts: list[Rollout]) -> None:
        for rollout in rollouts:
            before = self.ended.get(rollout.rollout_id)
            if before is not None:
                assert rollout.status == before.status, rollout.rollout_id
            if rollout.is_terminal:
                self.ended[rollout.rollout_id] = rollout


async def pages(client: AsyncAglLiteClient) -> list[Rollout]:
    """All rollouts."""
    found: list[Rollout] = []
    for first in range(0, ROLLOUTS, 100):
        ids = [f"r-{number}" for number in range(first, first + 100)]
        page = await client.rollouts(ids=ids, limit=100)
        found += [item for item in page.items if isinstance(item, Rollout)]
    return found


@pytest.mark.timeout(240)
async def test_200_rollouts_survive_everything(
    tmp_path: Path, service: Any, controllers: Any
) -> None:
    rng = random.Random(SEED)
    made_jobs: Counter[str] = Counter()

    def count(type_: str, resource: str, item: dict[str, Any]) -> None:
        if type_ == "ADDED" and resource == "jobs":
            made_jobs[rollout_id_of(item) or "?"] += 1

    async with fake_cluster(tmp_path, backoff_scale=0.02) as cluster:
        fake = cluster.fake
        assert fake is not None
        fake.node.script_for = behaviours(rng)
        fake.store.subscribe(count)
        async with (
            AsyncAglLiteClient(service.url) as client,
            controllers(
                tmp_path,
                cluster,
                service.url,
                2,
                "max_active = 50\ncreates_per_second = 200\nlease_seconds = 3.0",
            ) as working,
        ):
            items = [
                {"rollout_id": f"r-{number}", "config": {"max_retries": number % 3}}
                for number in range(ROLLOUTS)
            ]
            await client.enqueue(items)
            ends = Ends()
            troubling = asyncio.create_task(trouble(rng, service, working, fake))
            try:
                async with asyncio.timeout(100):
                    while len(ends.ended) < ROLLOUTS:
                        await CLOCK.sleep(0.3)
                        await working.revive()
                        if service.is_away:
                            continue
                        with suppress(ApiError):  # away since
                            ends.see_all(await pages(client))
                        if len(ends.ended) > ROLLOUTS * 0.8:
                            troubling.cancel()  # the rest is to be cleaned up in peace
                            service.is_away = False
                            fake.job_controller.start()
            finally:
                troubling.cancel()
                await asyncio.gather(troubling, return_exceptions=True)
            async with asyncio.timeout(30):
                while fake.store.list("jobs") or fake.store.list("pods"):
                    await CLOCK.sleep(0.1)
            assert working.kills > 0
    assert set(made_jobs) == {f"r-{number}" for number in range(ROLLOUTS)}
    assert set(made_jobs.values()) == {1}, made_jobs.most_common(3)
    statuses = Counter(rollout.status for rollout in ends.ended.values())
    assert set(statuses) == {"succeeded", "failed"}
    for rollout in ends.ended.values():
        phases = [attempt.phase for attempt in rollout.attempts]
        assert "running" not in phases
        assert phases.count("succeeded") <= 1
        if rollout.status == "failed":
            assert rollout.error is not None
            assert rollout.error.code in ("agent", "infra"), rollout.error
