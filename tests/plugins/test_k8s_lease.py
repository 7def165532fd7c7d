"""Who leads: over HTTP on loopback, and through every bad network on a clock turned by hand."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agl_core.clock import SystemClock, poll
from agl_core.errors import ConfigError
from agl_core.testing.clock import FakeClock
from agl_core.testing.servers import bind_loopback
from agl_k8s.api import KubeApi
from agl_k8s.config import K8sConfig
from agl_k8s.errors import KubeError, no_answer
from agl_k8s.lease import Leadership
from agl_k8s.testing.http import FakeApiServer
from agl_k8s.testing.objects import ObjectStore

SECONDS = 15.0


class LeaseStore:
    """One Lease, changed as the API server would."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.writes: list[dict[str, Any]] = []

    def get(self) -> dict[str, Any]:
        if self.lease is None:
            raise KubeError(404, "NotFound", 'leases.coordination.k8s.io "lead" not found')
        return copy.deepcopy(self.lease)

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.lease is not None:
            raise KubeError(409, "AlreadyExists", 'leases "lead" already exists')
        return self._write(body)

    def replace(self, body: dict[str, Any]) -> dict[str, Any]:
        present = self.get()["metadata"]["resourceVersion"]
        if body["metadata"].get("resourceVersion") != present:
            raise KubeError(409, "Conflict", "the object has been modified")
        return self._write(body)

    def _write(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        metadata = body["metadata"] | {"resourceVersion": str(self.version)}
        self.lease = copy.deepcopy(body | {"metadata": metadata})
        self.writes.append(self.lease)
        return self.get()

    @property
    def holder(self) -> str | None:
        return self.lease["spec"]["holderIdentity"] if self.lease else None


class Line:
    """The way of one controller to the store, good or bad."""

    def __init__(self, store: LeaseStore, clock: FakeClock) -> None:
        self.store = store
        self.clock = clock
        self.is_cut = False
        """Calls hang for ever."""
        self.faults: random.Random | None = None
        self.calls = 0

    async def get(self, resource: str, name: str) -> dict[str, Any]:
        assert (resource, name) == ("leases", "lead")
        return await self._call(self.store.get)

    async def create(self, resource: str, body: dict[str, Any]) -> dict[str, Any]:
        return await self._call(lambda: self.store.create(copy.deepcopy(body)), is_write=True)

    async def replace(self, resource: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        return await self._call(lambda: self.store.replace(copy.deepcopy(body)), is_write=True)

    async def _call(
        self, call: Callable[[], dict[str, Any]], *, is_write: bool = False
    ) -> dict[str, Any]:
        self.calls += 1
        if self.is_cut:
            await asyncio.Event().wait()
        if self.faults is None:
            return call()
        if self.faults.random() < 0.1:
            raise no_answer("lease", "Cut", "before it arrived")
        if is_write and self.faults.random() < 0.2:
            # It arrives however its sender is faring by then.
            delay = self.faults.uniform(0, 12)
            arriving = asyncio.create_task(self._arrive(call, delay))
            return await asyncio.shield(arriving)
        answer = call()
        if self.faults.random() < 0.1:
            raise no_answer("lease", "Cut", "on the way back")
        await self.clock.sleep(self.faults.choice((0, 0, 0, self.faults.uniform(0, 8))))
        return answer

    async def _arrive(self, call: Callable[[], dict[str, Any]], delay: float) -> dict[str, Any]:
        await self.clock.sleep(delay)
        return call()


class OtherClock:
    """A machine whose clocks are all different from others', but as fast."""

    def __init__(self, clock: FakeClock, off: float) -> None:
        self._clock = clock
        self._off = off

    def now(self) -> float:
        return self._clock.now() + self._off

    def monotonic(self) -> float:
        return self._clock.monotonic() + 7 * abs(self._off)

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store() -> LeaseStore:
    return LeaseStore()


def claim(line: Line, identity: str, off: float = 0.0) -> Leadership:
    return Leadership(line, "lead", identity, seconds=SECONDS, clock=OtherClock(line.clock, off))


async def settle() -> None:
    """Let every task run until it waits for the clock."""
    for _ in range(50):
        await SystemClock().sleep(0)


async def pass_time(
    clock: FakeClock, seconds: float, check: Callable[[], None] = lambda: None
) -> None:
    for _ in range(round(seconds / 0.25)):
        clock.advance(0.25)
        await settle()
        check()


@asynccontextmanager
async def acquiring(leadership: Leadership) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(leadership.acquire())
    await settle()
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# --- on a clock turned by hand -------------------------------------------------------------------


async def test_a_lease_is_as_kubernetes_writes_it(store, clock):
    first = claim(Line(store, clock), "first")
    await first.acquire()
    assert first.is_held
    spec = store.lease["spec"]
    assert store.lease["metadata"]["name"] == "lead"
    assert (store.lease["apiVersion"], store.lease["kind"]) == ("coordination.k8s.io/v1", "Lease")
    assert spec == {
        "holderIdentity": "first",
        "leaseDurationSeconds": 15,
        "acquireTime": "2025-06-15T15:06:40.000000Z",
        "renewTime": "2025-06-15T15:06:40.000000Z",
        "leaseTransitions": 0,
    }
    await pass_time(clock, 3.25)
    assert store.lease["spec"] == spec | {"renewTime": "2025-06-15T15:06:43.250000Z"}
    await first.release()


async def test_the_holder_stays_and_others_wait(store, clock):
    first, second = claim(Line(store, clock), "first"), claim(Line(store, clock), "second", -3600)
    await first.acquire()
    async with acquiring(second) as waiting:
        held = []
        await pass_time(clock, 120, lambda: held.append((first.is_held, second.is_held)))
        assert set(held) == {(True, False)}
        assert not waiting.done()
    assert not first.lost.is_set()
    await first.release()


async def test_a_released_lease_is_taken_at_once(store, clock):
    first, second = claim(Line(store, clock), "first"), claim(Line(store, clock), "second", 7200)
    await first.acquire()
    async with acquiring(second) as waiting:
        await first.release()
        assert not first.is_held
        assert store.holder == ""
        await pass_time(clock, 4)
        assert waiting.done()
        assert second.is_held
    assert store.lease["spec"]["leaseTransitions"] == 1
    await second.release()


async def test_a_holder_that_is_cut_off_stops_before_another_starts(store, clock):
    line = Line(store, clock)
    first, second = claim(line, "first", 3600), claim(Line(store, clock), "second", -3600)
    await first.acquire()
    async with acquiring(second) as waiting:
        await pass_time(clock, 30)
        line.is_cut = True
        stopped_at = started_at = None
        start = clock.monotonic()
        while started_at is None:
            await pass_time(clock, 0.25)
            assert clock.monotonic() - start < 60
            if stopped_at is None and not first.is_held:
                stopped_at = clock.monotonic()
                assert first.lost.is_set()
            if waiting.done():
                started_at = clock.monotonic()
        assert stopped_at is not None
        assert stopped_at - start <= SECONDS * 2 / 3
        # Enough for what was under way when it stopped.
        assert started_at - stopped_at >= SECONDS / 3 - 0.25
        # It sees the last renewal a look late and the end of the lease another; a look comes after
        # a fifth of the lease, up to 1.2 times that, and each is a step of the clock late.
        assert started_at - start <= SECONDS + 2 * (1.2 * SECONDS / 5 + 0.25)
        # What it still sends, when the way is free again, changes nothing.
        line.is_cut = False
        await first.release()
        assert store.holder == "second"
    await second.release()


async def test_short_faults_of_the_api_server_do_not_cost_the_lease(store, clock):
    line = Line(store, clock)
    first = claim(line, "first")
    await first.acquire()
    for _ in range(20):
        line.is_cut = True  # a connection that is dead; the next is not
        await pass_time(clock, 4)
        line.is_cut = False
        await pass_time(clock, 4)
        assert first.is_held
    assert not first.lost.is_set()
    await first.release()


async def test_a_renewal_whose_answer_was_lost_does_not_cost_the_lease(store, clock):
    line = Line(store, clock)
    first = claim(line, "first")
    await first.acquire()
    store.lease["metadata"]["resourceVersion"] = "99"  # it was written, unknown to its holder
    before = len(store.writes)
    await pass_time(clock, 9)
    assert first.is_held
    assert len(store.writes) >= before + 2
    await first.release()


async def test_a_lease_that_a_person_gave_to_another_is_lost_at_once(store, clock):
    first = claim(Line(store, clock), "first")
    await first.acquire()
    taken = store.get()
    store.replace(taken | {"spec": taken["spec"] | {"holderIdentity": "other"}})
    await pass_time(clock, 3.25)
    assert not first.is_held
    assert first.lost.is_set()
    await first.release()
    assert store.holder == "other"


async def test_a_lease_that_was_deleted_is_not_taken_from_its_holder(store, clock):
    line = Line(store, clock)
    first, second = claim(line, "first"), claim(Line(store, clock), "second")
    await first.acquire()
    async with acquiring(second) as waiting:
        await pass_time(clock, 10)
        line.is_cut = True
        store.lease = None

        def check() -> None:
            assert not (first.is_held and second.is_held)

        await pass_time(clock, 14, check)
        assert not waiting.done()
        await pass_time(clock, 10, check)
        assert waiting.done()
    await second.release()


async def test_another_holder_s_own_duration_counts(store, clock):
    spec = {"holderIdentity": "slow", "leaseDurationSeconds": 60, "renewTime": "x"}
    store.create({"metadata": {"name": "lead"}, "spec": spec})
    first = claim(Line(store, clock), "first")
    async with acquiring(first) as waiting:
        await pass_time(clock, 59)
        assert not waiting.done()
        await pass_time(clock, 8)
        assert waiting.done()
    await first.release()


async def test_a_wait_that_was_cancelled_leaves_nothing_behind(store, clock):
    line = Line(store, clock)
    first = claim(line, "first")
    line.faults = random.Random()
    line.faults.random = lambda: 0.15  # type: ignore[method-assign] - writes arrive late
    async with acquiring(first) as waiting:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    line.faults = None
    await pass_time(clock, 13)
    assert store.holder == "first"  # the creation that was under way
    await first.release()
    assert store.holder == ""


async def test_a_release_that_meets_a_late_renewal_is_tried_again(store, clock):
    line = Line(store, clock)
    first = claim(line, "first")
    await first.acquire()
    get = store.get

    def get_and_be_overtaken() -> dict[str, Any]:
        store.get = get  # type: ignore[method-assign]
        found = get()
        store.replace(found)  # sent before the release and slower than it
        return found

    store.get = get_and_be_overtaken  # type: ignore[method-assign]
    await first.release()
    assert store.holder == ""


async def test_a_renewal_that_is_answered_during_the_release_does_not_revive_it(store, clock):
    line = Line(store, clock)
    first = claim(line, "first")
    await first.acquire()
    await settle()
    answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def answer_late(resource: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        line.replace = replace  # type: ignore[method-assign]
        written = await replace(resource, name, body)
        await answered
        return written

    replace, line.replace = line.replace, answer_late  # type: ignore[method-assign]
    clock.advance(3)
    await settle()
    assert len(store.writes) == 2
    answered.set_result(None)
    await first.release()
    assert store.holder == ""
    assert not first.is_held


@pytest.mark.parametrize("seed", range(20))
async def test_two_are_never_leading_whatever_the_network_does(seed, store, clock):
    random.seed(seed)  # of the pauses, too
    chance = random.Random(seed)
    lines = [Line(store, clock) for _ in range(3)]
    leading: dict[int, Leadership] = {}
    turns: list[str] = []

    async def live(n: int) -> None:
        """A controller that is started again whenever it ends."""
        for life in range(1000):
            own = claim(lines[n], f"{n}-{life}", chance.uniform(-1e6, 1e6))
            leading[n] = own
            await own.acquire()
            turns.append(f"{n}-{life}")
            wait = asyncio.create_task(clock.sleep(chance.uniform(1, 120)))
            lost = asyncio.create_task(own.lost.wait())
            await asyncio.wait({wait, lost}, return_when=asyncio.FIRST_COMPLETED)
            for task in (wait, lost):
                task.cancel()
            if chance.random() < 0.7:
                await own.release()
            elif own._renewing is not None:
                own._renewing.cancel()  # killed: it says nothing any more
                await asyncio.gather(own._renewing, return_exceptions=True)

    def check() -> None:
        held = [n for n, own in leading.items() if own.is_held]
        assert len(held) <= 1, (held, turns)

    for line in lines:
        line.faults = chance
    lives = [asyncio.create_task(live(n)) for n in range(3)]
    try:
        for _ in range(25):
            for line in lines:
                line.is_cut = chance.random() < 0.2
            await pass_time(clock, 8, check)
            assert not any(task.done() for task in lives)
        assert len(turns) >= 3

        # When the network is well again somebody leads before long.
        for line in lines:
            line.is_cut, line.faults = False, None
        before = len(turns)
        if not any(own.is_held for own in leading.values()):
            await pass_time(clock, 15 + 12 + 7, check)
            assert len(turns) > before
    finally:
        for task in lives:
            task.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        for line in lines:
            line.is_cut, line.faults = False, None
        for own in leading.values():
            releasing = asyncio.create_task(own.release())
            await settle()
            clock.advance(20)
            await releasing
        clock.advance(20)
        await settle()


# --- over HTTP -----------------------------------------------------------------------------------


@asynccontextmanager
async def serve(
    store: LeaseStore, meet: Callable[[Any], Awaitable[Any]] | None = None
) -> AsyncIterator[str]:
    from aiohttp import web

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            if meet is not None and (met := await meet(request)) is not None:
                return met
            if request.method == "GET":
                return web.json_response(store.get())
            body = await request.json()
            if request.method == "POST":
                return web.json_response(store.create(body), status=201)
            return web.json_response(store.replace(body))
        except KubeError as exc:
            said = {"kind": "Status", "code": exc.status, "reason": exc.reason}
            return web.json_response(said | {"message": exc.message}, status=exc.status)

    app = web.Application()
    leases = "/apis/coordination.k8s.io/v1/namespaces/spot/leases"
    app.router.add_post(leases, answer)
    app.router.add_route("*", f"{leases}/lead", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    sock = bind_loopback()
    try:
        await web.SockSite(runner, sock).start()
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        await runner.cleanup()


def connect(folder: Path, url: str) -> KubeApi:
    path = folder / "kubeconfig"
    context = {"cluster": "c", "user": "u", "namespace": "spot"}
    path.write_text(
        json.dumps(
            {
                "current-context": "x",
                "clusters": [{"name": "c", "cluster": {"server": url}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
                "contexts": [{"name": "x", "context": context}],
            }
        )
    )
    return KubeApi(K8sConfig(kubeconfig=str(path)), SystemClock())


async def test_controllers_take_turns_over_http(store, tmp_path):
    leading: list[str] = []
    turns: list[str] = []

    async def take_turn(api: KubeApi, identity: str) -> None:
        own = Leadership(api, "lead", identity, seconds=1.5, clock=SystemClock())
        async with asyncio.timeout(40):
            await own.acquire()
            leading.append(identity)
            assert leading == [identity]
            renewed = len(store.writes) + 1
            assert await poll(lambda: len(store.writes) >= renewed, SystemClock(), seconds=5)
            assert own.is_held
            assert leading == [identity]
            leading.clear()
            turns.append(identity)
            await own.release()

    async with serve(store) as url, connect(tmp_path, url) as api:
        await asyncio.gather(*(take_turn(api, f"c{n}") for n in range(5)))
    assert sorted(turns) == [f"c{n}" for n in range(5)]
    assert store.holder == ""
    for lease in store.writes:
        for time in (lease["spec"]["renewTime"], lease["spec"]["acquireTime"]):
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", time)


async def test_a_creation_whose_answer_was_lost_is_recognised_as_ours(store, tmp_path):
    async def lose_the_answer(request: Any) -> Any:
        if request.method != "POST":
            return None
        store.create(await request.json())
        request.transport.abort()
        return None

    async with serve(store, lose_the_answer) as url, connect(tmp_path, url) as api:
        own = Leadership(api, "lead", "me", seconds=1.0, clock=SystemClock())
        async with asyncio.timeout(5):
            await own.acquire()
        assert own.is_held
        assert store.holder == "me"
        assert store.lease["spec"]["leaseTransitions"] == 0
        await own.release()


@pytest.mark.parametrize(
    ("code", "reason", "message"),
    [
        (403, "Forbidden", 'leases is forbidden: User "x" cannot get resource "leases"'),
        (404, "NotFound", 'namespaces "spot" not found'),
    ],
)
async def test_what_no_waiting_mends_is_told_at_once(code, reason, message, store, tmp_path):
    async def refuse(request: Any) -> Any:
        if request.method == "POST" or code == 403:
            raise KubeError(code, reason, message)
        return None

    async with serve(store, refuse) as url, connect(tmp_path, url) as api:
        own = Leadership(api, "lead", "me", seconds=1.0, clock=SystemClock())
        with pytest.raises(ConfigError, match=re.escape(message)) as caught:
            await own.acquire()
        assert "plugins.k8s.lease = false" in caught.value.hint
        await own.release()


async def test_the_lease_outlives_restarts_of_the_api_server(tmp_path):
    cluster = ObjectStore(SystemClock())
    async with (
        FakeApiServer(cluster, SystemClock(), namespaces=("spot",)) as server,
        connect(tmp_path, server.url) as api,
        asyncio.timeout(40),
    ):
        first = Leadership(api, "lead", "first", seconds=6.0, clock=SystemClock())
        second = Leadership(api, "lead", "second", seconds=6.0, clock=SystemClock())
        await first.acquire()
        waiting = asyncio.create_task(second.acquire())

        def version() -> str:
            return str(cluster.get("leases", "spot", "lead")["metadata"]["resourceVersion"])

        for _ in range(2):
            await server.restart()
            before = version()
            assert await poll(lambda: version() != before, SystemClock(), seconds=6.0)  # noqa: B023
            assert first.is_held
        assert not waiting.done()
        await first.release()
        await waiting
        assert second.is_held
        found = cluster.get("leases", "spot", "lead")["spec"]
        assert (found["holderIdentity"], found["leaseTransitions"]) == ("second", 1)
        await second.release()
