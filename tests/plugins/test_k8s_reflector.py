"""The copy of the cluster, over HTTP on loopback, while the API server does what real ones do."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agl_core.clock import SystemClock, poll
from agl_core.testing.servers import bind_loopback
from agl_k8s.api import KubeApi
from agl_k8s.config import K8sConfig
from agl_k8s.reflector import Reflector
from agl_k8s.testing.http import FakeApiServer
from agl_k8s.testing.objects import ObjectStore


class HastyClock(SystemClock):
    """Waits for nothing, but its monotonic time has passed as if it had."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def monotonic(self) -> float:
        return super().monotonic() + sum(self.waits)

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        await super().sleep(0)


class Cluster:
    """The jobs of one namespace, with lists and watches as the API server has them."""

    def __init__(self) -> None:
        self.url = ""
        self.objects: dict[str, dict[str, Any]] = {}
        self.log: list[tuple[int, str, dict[str, Any]]] = []
        self.version = 10
        self.oldest = 0
        """Watches from before it are answered with 410."""
        self.changed = asyncio.Event()
        self.requests: list[str] = []
        self.is_deaf = False
        """Watches say nothing any more."""
        self.meets_watch: Callable[[Any], Any] | None = None
        self.meets_list: Callable[[Any], Any] | None = None

    def put(self, name: str, uid: str | None = None, **status: Any) -> None:
        self.version += 1
        kind = "MODIFIED" if name in self.objects else "ADDED"
        metadata = {
            "name": name,
            "uid": uid or f"uid-{name}",
            "resourceVersion": str(self.version),
        }
        self.objects[name] = {"kind": "Job", "metadata": metadata, "status": status}
        self._record(kind, self.objects[name])

    def delete(self, name: str) -> None:
        self.version += 1
        last = self.objects.pop(name)
        gone = last | {"metadata": last["metadata"] | {"resourceVersion": str(self.version)}}
        self._record("DELETED", gone)

    def compact(self) -> None:
        """Open watches are told at once, which real servers do when they are restarted."""
        self.version += 1
        self.oldest = self.version
        self._wake()

    def _record(self, kind: str, item: dict[str, Any]) -> None:
        self.log.append((self.version, kind, item))
        self._wake()

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def answer(self, request: Any) -> Any:
        from aiohttp import web

        is_watch = "watch" in request.query
        self.requests.append("watch" if is_watch else "list")
        fault = self.meets_watch if is_watch else self.meets_list
        if fault is not None:
            return await fault(request)
        if is_watch:
            return await self.watch(request)
        items = [{k: v for k, v in item.items() if k != "kind"} for item in self.objects.values()]
        return web.json_response(
            {
                "kind": "JobList",
                "apiVersion": "batch/v1",
                "metadata": {"resourceVersion": str(self.version)},
                "items": items,
            }
        )

    async def watch(self, request: Any, seconds: float | None = None) -> Any:
        from aiohttp import web

        response = web.StreamResponse()
        await response.prepare(request)
        seen = int(request.query["resourceVersion"])
        ends_at = SystemClock().monotonic() + (seconds or float(request.query["timeoutSeconds"]))
        while (left := ends_at - SystemClock().monotonic()) > 0:
            changed = self.changed
            if seen < self.oldest:
                gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
                await write_line(response, "ERROR", gone)
                return response
            if not self.is_deaf:
                for version, kind, item in list(self.log):
                    if version > seen:
                        seen = version
                        await write_line(response, kind, item)
            try:
                await asyncio.wait_for(changed.wait(), left)
            except TimeoutError:
                break
        await write_line(response, "BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}})
        return response


async def write_line(response: Any, kind: str, item: dict[str, Any]) -> None:
    await response.write(json.dumps({"type": kind, "object": item}).encode() + b"\n")


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    from aiohttp import web

    cluster = Cluster()
    app = web.Application()
    app.router.add_get("/apis/batch/v1/namespaces/spot/jobs", cluster.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    sock = bind_loopback()
    await web.SockSite(runner, sock).start()
    cluster.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    yield cluster
    await runner.cleanup()


class Seen:
    """What a reflector has told, and the reflector."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, str]] = []
        self.reflector: Reflector = None  # type: ignore[assignment]

    def take(self, kind: str, item: dict[str, Any]) -> None:
        uids = self.reflector.objects
        assert (item["metadata"]["uid"] in uids) == (kind != "DELETED")
        assert item["kind"] == "Job"
        word = item.get("status", {}).get("word")
        name = item["metadata"]["name"]
        self.changes.append((kind, f"{name}:{word}" if word else name))

    @property
    def names(self) -> set[str]:
        return {item["metadata"]["name"] for item in self.reflector.objects.values()}

    async def until(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        assert await poll(condition, SystemClock(), seconds=seconds), self.changes


@asynccontextmanager
async def reflecting(
    cluster: Cluster | FakeApiServer, folder: Path, clock: Any = None, **options: Any
) -> AsyncIterator[Seen]:
    path = folder / "kubeconfig"
    context = {"cluster": "c", "user": "u", "namespace": "spot"}
    path.write_text(
        json.dumps(
            {
                "current-context": "x",
                "clusters": [{"name": "c", "cluster": {"server": cluster.url}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
                "contexts": [{"name": "x", "context": context}],
            }
        )
    )
    clock = clock or SystemClock()
    seen = Seen()
    async with KubeApi(K8sConfig(kubeconfig=str(path)), clock) as api:
        seen.reflector = Reflector(
            api, "jobs", label_selector="a=b", on_change=seen.take, clock=clock, **options
        )
        running = asyncio.create_task(seen.reflector.run())
        try:
            yield seen
            assert not running.done()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_objects_follow_the_cluster_and_each_change_is_told_once(cluster, tmp_path):
    cluster.put("old")
    async with reflecting(cluster, tmp_path) as seen:
        async with asyncio.timeout(5):
            await seen.reflector.synced.wait()
        assert seen.changes == [("ADDED", "old")]
        cluster.put("new")
        cluster.put("new", word="running")
        cluster.delete("old")
        await seen.until(lambda: len(seen.changes) == 4)
        assert seen.changes[1:] == [
            ("ADDED", "new"),
            ("MODIFIED", "new:running"),
            ("DELETED", "old"),
        ]
        assert seen.names == {"new"}
    assert cluster.requests == ["list", "watch"]


async def test_c52_what_happened_while_a_version_expired_is_told_from_the_next_list(
    cluster, tmp_path
):
    cluster.put("job-1", word="running")
    cluster.put("doomed")
    async with reflecting(cluster, tmp_path) as seen:
        await seen.until(lambda: len(seen.changes) == 2 and "watch" in cluster.requests)
        cluster.is_deaf = True
        cluster.put("job-1", word="complete")
        cluster.delete("doomed")
        cluster.put("doomed", uid="another", word="reborn")
        cluster.is_deaf = False
        cluster.compact()
        await seen.until(lambda: len(seen.changes) >= 5, 2.0)
        # Who has the name now comes after it was given up; nothing is told twice.
        assert seen.changes[2:] == [
            ("DELETED", "doomed"),
            ("MODIFIED", "job-1:complete"),
            ("ADDED", "doomed:reborn"),
        ]
        cluster.put("job-1", word="after")
        await seen.until(lambda: seen.changes[-1] == ("MODIFIED", "job-1:after"))
        assert seen.reflector.objects["uid-job-1"]["kind"] == "Job"


async def test_c52_a_410_as_an_http_status_leads_to_a_list_too(cluster, tmp_path):
    from aiohttp import web

    async def refuse(request: Any) -> Any:
        cluster.meets_watch = None
        cluster.put("while-away")
        gone = {"kind": "Status", "code": 410, "reason": "Gone", "message": "x"}
        return web.json_response(gone, status=410)

    cluster.meets_watch = refuse
    async with reflecting(cluster, tmp_path) as seen:
        await seen.until(lambda: seen.changes == [("ADDED", "while-away")], 2.0)
        await seen.until(lambda: cluster.requests == ["list", "watch", "list", "watch"])


async def test_c54_watches_that_are_closed_at_once_do_not_become_a_storm(cluster, tmp_path):
    from aiohttp import web

    async def close_at_once(request: Any) -> Any:
        return web.Response(text="")

    clock = HastyClock()
    cluster.meets_watch = close_at_once
    async with reflecting(cluster, tmp_path, clock) as seen:
        await seen.until(lambda: sum(clock.waits) > 600)
        in_thirty_seconds = next(n for n in range(99) if sum(clock.waits[: n + 1]) > 30)
        # Each failure costs a watch, and from the third on a list.
        assert in_thirty_seconds * 2 <= 15
        assert all(wait >= 1.0 for wait in clock.waits)
        assert max(clock.waits) <= 30.0
        assert len(set(clock.waits[-10:])) > 5  # many controllers do not come back as one
        cluster.put("meanwhile")
        cluster.meets_watch = None
        cluster.put("later")
        await seen.until(lambda: seen.names == {"meanwhile", "later"})
        cluster.put("later", word="followed")
        await seen.until(lambda: seen.changes[-1] == ("MODIFIED", "later:followed"))


async def test_c54_watches_that_are_cut_after_each_event_do_not_become_a_storm(cluster, tmp_path):
    async def one_event(request: Any) -> Any:
        from aiohttp import web

        cluster.put("busy", word=str(cluster.version))
        response = web.StreamResponse()
        await response.prepare(request)
        await write_line(response, "MODIFIED", cluster.objects["busy"])
        request.transport.abort()
        return response

    clock = HastyClock()
    cluster.put("busy")
    cluster.meets_watch = one_event
    async with reflecting(cluster, tmp_path, clock) as seen:
        await seen.until(lambda: len(clock.waits) > 20)
        assert sum(clock.waits[:20]) / 20 >= 1.5
        assert seen.changes[-1][1].startswith("busy:")


async def test_c54_a_watch_that_ended_in_good_order_goes_on_from_its_bookmark(cluster, tmp_path):
    versions: list[str] = []

    async def end_soon(request: Any) -> Any:
        versions.append(request.query["resourceVersion"])
        cluster.version += 100  # of other kinds, so a bookmark alone tells
        return await cluster.watch(request, seconds=1.2)

    cluster.meets_watch = end_soon
    cluster.put("a")
    async with reflecting(cluster, tmp_path) as seen:
        await seen.until(lambda: len(versions) == 3)
    assert versions == ["11", "111", "211"]
    assert cluster.requests == ["list", "watch", "watch", "watch"]
    assert seen.changes == [("ADDED", "a")]


async def test_c55_what_ends_in_the_dark_is_seen_when_the_idle_limit_has_passed(cluster, tmp_path):
    for name in ("a", "b", "c"):
        cluster.put(name)
    async with reflecting(cluster, tmp_path, idle_seconds=0.5) as seen:
        await seen.until(lambda: "watch" in cluster.requests)
        cluster.put("d")
        await seen.until(lambda: ("ADDED", "d") in seen.changes)
        cluster.is_deaf = True
        cluster.put("a", word="done")
        cluster.put("b", word="done")
        cluster.delete("c")
        await seen.until(lambda: len(seen.changes) == 7, 2.0)
        assert {("MODIFIED", "a:done"), ("MODIFIED", "b:done"), ("DELETED", "c")} == set(
            seen.changes[4:]
        )
        assert seen.names == set(cluster.objects)


async def test_c55_everything_is_listed_again_even_where_a_watch_seems_well(cluster, tmp_path):
    async with reflecting(cluster, tmp_path, resync_seconds=1.0) as seen:
        await seen.until(lambda: "watch" in cluster.requests)
        cluster.log.clear()
        cluster.put("missed-by-every-watch")
        cluster.log.clear()
        await seen.until(lambda: seen.names == {"missed-by-every-watch"})


async def test_c55_a_version_from_the_future_is_left_for_the_present_one(cluster, tmp_path):
    cluster.version = 1000
    cluster.put("kept")
    cluster.put("lost")

    async def restore_backup(request: Any) -> Any:
        cluster.meets_watch = None
        cluster.version = 500
        cluster.log.clear()
        cluster.objects.pop("lost")
        return await cluster.watch(request)  # from a version that is far away

    cluster.meets_watch = restore_backup
    async with reflecting(cluster, tmp_path, idle_seconds=0.3) as seen:
        await seen.until(lambda: seen.changes[-1:] == [("DELETED", "lost")])
        cluster.put("new")
        await seen.until(lambda: seen.changes[-1] == ("ADDED", "new"))


async def test_c59_losing_sight_of_the_cluster_ends_nothing(cluster, tmp_path):
    from aiohttp import web

    async def fail(request: Any) -> Any:
        return web.Response(status=502, text="<html>Bad Gateway</html>")

    clock = HastyClock()
    cluster.put("job-1", word="running")
    async with reflecting(cluster, tmp_path, clock) as seen:
        await seen.until(lambda: "watch" in cluster.requests)
        cluster.meets_watch = cluster.meets_list = fail
        cluster.compact()
        await seen.until(lambda: sum(clock.waits) > 600)
        assert seen.changes == [("ADDED", "job-1:running")]
        assert seen.names == {"job-1"}
        cluster.put("job-1", word="succeeded")
        cluster.meets_watch = cluster.meets_list = None
        await seen.until(lambda: len(seen.changes) == 2)
        assert seen.changes[1] == ("MODIFIED", "job-1:succeeded")


async def test_c70_half_a_list_says_nothing_of_the_rest(cluster, tmp_path):
    from aiohttp import web

    for n in range(4):
        cluster.put(f"j{n}")

    async def break_off(request: Any) -> Any:
        if "continue" in request.query:
            cluster.meets_list = None
            return web.Response(status=500, text="etcd")
        first = list(cluster.objects.values())[:2]
        metadata = {"resourceVersion": str(cluster.version), "continue": "more"}
        return web.json_response({"kind": "JobList", "metadata": metadata, "items": first})

    async with reflecting(cluster, tmp_path, HastyClock()) as seen:
        await seen.until(lambda: "watch" in cluster.requests)
        cluster.meets_list = break_off
        cluster.delete("j3")
        cluster.compact()
        await seen.until(lambda: cluster.meets_list is None)
        await seen.until(lambda: seen.names == {"j0", "j1", "j2"})
    assert [change for change in seen.changes if change[0] == "DELETED"] == [("DELETED", "j3")]


async def test_an_object_that_its_reader_cannot_take_hides_no_other(cluster, tmp_path):
    told: list[str] = []

    def take(kind: str, item: dict[str, Any]) -> None:
        if item["metadata"]["name"] == "odd":
            raise KeyError("annotations")
        told.append(item["metadata"]["name"])

    async with reflecting(cluster, tmp_path) as seen:
        await seen.until(lambda: "watch" in cluster.requests)
        seen.reflector._on_change = take
        cluster.put("odd")
        cluster.put("even")
        await seen.until(lambda: told == ["even"])
        assert seen.names == {"odd", "even"}
    assert cluster.requests == ["list", "watch"]


async def test_an_object_of_no_known_form_is_looked_at_again(cluster, tmp_path):
    async def odd(request: Any) -> Any:
        from aiohttp import web

        cluster.meets_watch = None
        cluster.put("a")
        response = web.StreamResponse()
        await response.prepare(request)
        await write_line(response, "ADDED", {"metadata": {"name": "no-uid"}})
        return response

    cluster.meets_watch = odd
    async with reflecting(cluster, tmp_path, HastyClock()) as seen:
        await seen.until(lambda: seen.changes == [("ADDED", "a")])


async def test_c71_watches_without_end_need_no_more_than_one_connection(cluster, tmp_path):
    from aiohttp import web

    connections: set[Any] = set()

    async def close_at_once(request: Any) -> Any:
        connections.add(request.transport.get_extra_info("peername"))
        return web.Response(text="")

    clock = HastyClock()
    cluster.meets_watch = close_at_once
    async with reflecting(cluster, tmp_path, clock) as seen:
        await seen.until(lambda: cluster.requests.count("watch") >= 500, 15.0)
        assert len(cluster.requests) >= 990  # from the third on each comes with a list
    assert len(connections) <= 10


def job(name: str) -> dict[str, Any]:
    agent = {"name": "agent", "image": "busybox:stable"}
    return {
        "metadata": {"name": name, "labels": {"a": "b"}},
        "spec": {"template": {"spec": {"restartPolicy": "Never", "containers": [agent]}}},
    }


@pytest.mark.parametrize("seed", range(4))
async def test_the_copy_becomes_the_cluster_s_whatever_went_wrong(seed: int, tmp_path: Path):
    chance = random.Random(seed)
    clock = HastyClock()
    store = ObjectStore(SystemClock())
    async with FakeApiServer(store, SystemClock(), namespaces=("spot",)) as server:
        for n in range(1200):  # three pages
            store.create("jobs", "spot", job(f"j{n}"))
        foreign = job("foreign") | {"metadata": {"name": "foreign", "labels": {"a": "other"}}}
        store.create("jobs", "spot", foreign)
        faults = server.faults
        troubles: list[Callable[[], None]] = [
            lambda: faults.cut_watches(after_events=2, count=2),
            lambda: faults.close_watches(count=2),
            lambda: faults.silence_watches(after_events=1, count=1),
            lambda: faults.expire_watches(after_events=1, count=2),
            lambda: faults.bad_gateway(count=3),
            lambda: faults.busy(count=2),
            lambda: faults.black_hole("watch=true", count=1),
            store.compact,
        ]
        async with reflecting(server, tmp_path, clock, idle_seconds=0.2) as seen:
            await seen.until(seen.reflector.synced.is_set)
            assert len(seen.reflector.objects) == 1200

            def change(item: dict[str, Any]) -> None:
                item["status"] = {"word": str(chance.random())}

            for turn in range(12):
                chance.choice(troubles)()
                for _ in range(5):
                    store.update("jobs", "spot", f"j{chance.randrange(100, 1200)}", change)
                store.delete("jobs", "spot", f"j{turn}", propagation="Background")
                store.create("jobs", "spot", job(f"new-{turn}"))
                if turn % 4 == 3:
                    await server.restart()
                await clock.sleep(0)
            faults.clear()
            store.create("jobs", "spot", job("last"))

            def theirs() -> dict[str, str]:
                items = store.list("jobs", "spot", labels="a=b")
                return {i["metadata"]["uid"]: i["metadata"]["resourceVersion"] for i in items}

            def ours() -> dict[str, str]:
                items = seen.reflector.objects.items()
                return {uid: item["metadata"]["resourceVersion"] for uid, item in items}

            await seen.until(lambda: ours() == theirs(), 15.0)
            told = [change for change in seen.changes if change[0] != "MODIFIED"]
            assert len(told) == len(set(told))  # nothing came or went twice
            assert sum(kind == "DELETED" for kind, _ in told) == 12
            assert sum(kind == "ADDED" for kind, _ in told) == 1200 + 12 + 1
