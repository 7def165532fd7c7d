"""The controller, between the real service over HTTP and real processes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from agl_core.app import create_app, load
from agl_core.client import AsyncAglLiteClient
from agl_core.clock import SystemClock, poll
from agl_core.config import RawConfig
from agl_core.controller import Controller
from agl_core.errors import ApiError, Unavailable
from agl_core.interfaces import Runner, RunReport, Work
from agl_core.records import Attempt, Event, EventDraft
from agl_core.settings import ControllerSettings
from agl_core.testing.servers import serve_asgi
from agl_local import LocalConfig
from agl_local.runner import LocalRunner

CLOCK = SystemClock()
WAIT_SECONDS = 30.0

Client = AsyncAglLiteClient


@pytest.fixture
async def url() -> AsyncIterator[str]:
    service = create_app(load(RawConfig(tables={"plugins": {"enabled": ["memory", "vllm"]}})))
    async with service, serve_asgi(service.app) as url:
        yield url
        service.feed.close()


@pytest.fixture
async def client(url: str) -> AsyncIterator[Client]:
    async with AsyncAglLiteClient(url) as client:
        yield client


@pytest.fixture
async def state(tmp_path: Path) -> AsyncIterator[Path]:
    """A runner's state directory; nothing that was started from it outlives the test."""
    path = tmp_path / "state"
    yield path
    for pid in living(path):
        kill_group(pid)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def living(state: Path) -> list[int]:
    """The shells of attempts that live, whose command lines name their directories."""
    names = [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [int(name) for name in names if f"\0{state}/rollouts/" in command_line(int(name))]


def kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


async def until(condition: Callable[[], bool]) -> None:
    assert await poll(condition, CLOCK, seconds=20)


def runner_at(state: Path, **config: Any) -> LocalRunner:
    settings = {"retry_seconds": 0.01, "grace_seconds": 1.0, "max_active": 4} | config
    return LocalRunner(LocalConfig(state_dir=str(state), **settings), CLOCK)


@asynccontextmanager
async def controlling(
    url: str,
    runner: LocalRunner,
    *,
    through: Callable[[LocalRunner], Runner] | None = None,
    kind: type[AsyncAglLiteClient] = AsyncAglLiteClient,
    **settings: Any,
) -> AsyncIterator[Runner]:
    """A controller at work; leaving stops it as SIGTERM does."""
    stop = asyncio.Event()
    async with kind(url, retries=0) as client, runner:
        seen: Runner = through(runner) if through else runner
        controller = Controller(client, seen, ControllerSettings(url=url, **settings), CLOCK)
        running = asyncio.create_task(controller.run(stop))
        try:
            yield seen
            assert not running.done()
        finally:
            stop.set()
            await running


def shell(script: str, **fields: Any) -> dict[str, Any]:
    config = {"command": ["sh", "-c", script]} | fields.pop("config", {})
    return {"config": config, **fields}


async def test_rollout_runs_and_its_agent_reaches_the_service(
    url: str, client: Client, state: Path
) -> None:
    script = (
        "import json, os, urllib.request\n"
        "body = json.dumps({'event_type': 'reward', 'data': {'value': 0.5}}).encode()\n"
        "request = urllib.request.Request(os.environ['AGL_EVENT_URL'], data=body, headers={\n"
        "  'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'],\n"
        "  'Content-Type': 'application/json'})\n"
        "urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request).read()\n"
    )
    async with controlling(url, runner_at(state)) as runner:
        (rollout,) = await client.enqueue({"config": {"command": [sys.executable, "-c", script]}})
        (rollout,) = await client.wait([rollout.rollout_id], timeout=WAIT_SECONDS)
        assert rollout.status == "succeeded", await client.events(rollout.rollout_id)
        (attempt,) = rollout.attempts
        assert rollout.succeeded_attempt_id == attempt.attempt_id
        assert (attempt.phase, attempt.exit_code, attempt.node) == (
            "succeeded",
            0,
            socket.gethostname(),
        )
        (event,) = await client.events(rollout.rollout_id)
        assert event.data["value"] == 0.5
        await until(lambda: not list(state.glob("rollouts/*")))
        assert await runner.list() == []


async def test_higher_priority_starts_first_then_the_older(
    url: str, client: Client, state: Path, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    script = f'echo "$AGL_ROLLOUT_ID" >>{journal}'
    items = [
        shell(script, rollout_id=f"r{number}", priority=priority)
        for number, priority in enumerate((0, 5, 0, 7, 5))
    ]
    await client.enqueue(items)
    async with controlling(url, runner_at(state, max_active=1)):
        await client.wait([f"r{n}" for n in range(5)], timeout=WAIT_SECONDS)
    assert journal.read_text().split() == ["r3", "r1", "r4", "r0", "r2"]


async def test_c72_never_more_than_max_active_run(
    url: str, client: Client, state: Path, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    script = f"echo + >>{journal}; sleep 0.05; echo - >>{journal}"
    rollouts = await client.enqueue([shell(script) for _ in range(20)])
    async with controlling(url, runner_at(state, max_active=3)):
        ended = await client.wait([r.rollout_id for r in rollouts], timeout=WAIT_SECONDS)
    assert {r.status for r in ended} == {"succeeded"}
    running, most = 0, 0
    for mark in journal.read_text().split():
        running += 1 if mark == "+" else -1
        most = max(most, running)
    assert most == 3


async def test_c74_log_of_each_failed_attempt_is_stored_before_the_end(
    url: str, client: Client, state: Path
) -> None:
    async with controlling(url, runner_at(state)):
        (rollout,) = await client.enqueue(
            shell('echo "trying $OPENAI_API_KEY"; exit 4', config={"max_retries": 1})
        )
        (rollout,) = await client.wait([rollout.rollout_id], timeout=WAIT_SECONDS)
        events = await client.events(rollout.rollout_id, all_attempts=True)
    assert rollout.status == "failed"
    assert rollout.error is not None
    assert rollout.error.code == "agent"
    assert [(a.phase, a.reason, a.exit_code) for a in rollout.attempts] == [
        ("failed", "agent", 4)
    ] * 2
    assert [(e.event_type, e.attempt_id) for e in events] == [
        ("log", a.attempt_id) for a in rollout.attempts
    ]
    assert {e.data["text"] for e in events} == {"trying [token]\n"}


@pytest.mark.parametrize("config", [{}, {"command": ["no-such-program"]}])
async def test_what_cannot_start_fails_by_config(
    url: str, client: Client, state: Path, config: dict[str, Any]
) -> None:
    async with controlling(url, runner_at(state)):
        (rollout,) = await client.enqueue({"config": config})
        (rollout,) = await client.wait([rollout.rollout_id], timeout=WAIT_SECONDS)
    assert rollout.status == "failed"
    assert rollout.error is not None
    assert rollout.error.code == "config"
    assert rollout.error.message


async def test_c77_cancelled_rollout_ends_with_its_processes(
    url: str, client: Client, state: Path, tmp_path: Path
) -> None:
    async with controlling(url, runner_at(state)):
        (rollout,) = await client.enqueue(shell(f": >{tmp_path}/started; sleep 60"))
        await until((tmp_path / "started").exists)
        # One whose attempt has not been reported yet is cancelled at once, and ends a little later.
        await until_running(client, rollout.rollout_id)
        await client.cancel(rollout.rollout_id)
        (rollout,) = await client.wait([rollout.rollout_id], timeout=WAIT_SECONDS)
        assert living(state) == []
    assert rollout.status == "cancelled"
    assert [(a.phase, a.reason) for a in rollout.attempts] == [("cancelled", "cancelled")]


@pytest.mark.parametrize("how", ["delete", "patch"])
async def test_c61_what_the_service_has_ended_is_ended(
    url: str, client: Client, state: Path, tmp_path: Path, how: str
) -> None:
    async with controlling(url, runner_at(state)) as runner:
        (rollout,) = await client.enqueue(shell(f": >{tmp_path}/started; sleep 60"))
        await until((tmp_path / "started").exists)
        if how == "delete":
            await client.delete(rollout.rollout_id)
        else:
            await client.patch(rollout.rollout_id, status="failed")
        await until(lambda: not list(state.glob("rollouts/*")))
        assert await runner.list() == []
        assert living(state) == []


async def test_users_own_rollouts_are_left_alone(url: str, client: Client, state: Path) -> None:
    await client.enqueue({"rollout_id": "mine"})
    await client.patch("mine", attempts=[Attempt(attempt_id="a-1")])
    async with controlling(url, runner_at(state), resync_seconds=0.05):
        (other,) = await client.enqueue(shell("sleep 0.5"))
        await client.wait([other.rollout_id], timeout=WAIT_SECONDS)
        assert (await client.rollout("mine")).status == "running"
        await client.patch("mine", status="succeeded")
    assert (await client.rollout("mine")).succeeded_attempt_id == "a-1"


async def test_c58_rollout_that_the_runner_has_lost_fails_by_infra(
    url: str, client: Client, state: Path, tmp_path: Path
) -> None:
    (rollout,) = await client.enqueue(shell("sleep 60"))
    async with controlling(url, runner_at(state)):
        await until_running(client, rollout.rollout_id)
    async with controlling(url, runner_at(tmp_path / "other")):
        (rollout,) = await client.wait([rollout.rollout_id], timeout=WAIT_SECONDS)
    assert rollout.status == "failed"
    assert rollout.error is not None
    assert (rollout.error.code, rollout.error.message[:4]) == ("infra", "lost")
    assert [(a.phase, a.reason) for a in rollout.attempts] == [("failed", "infra")]


async def until_running(client: Client, rollout_id: str) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        async for item in client.watch([rollout_id]):
            if getattr(item, "attempts", ()):
                return


async def test_attempts_that_run_too_long_end_by_timeout(
    url: str, client: Client, state: Path
) -> None:
    config = {"timeout_seconds": 0.3, "max_retries": 1}
    async with controlling(url, runner_at(state)):
        (rollout,) = await client.enqueue(shell("exec sleep 60", config=config))
        (rollout,) = await client.wait([rollout.rollout_id], timeout=WAIT_SECONDS)
    assert rollout.status == "failed"
    assert rollout.error is not None
    assert rollout.error.code == "timeout"
    assert [a.reason for a in rollout.attempts] == ["timeout", "timeout"]
    for attempt in rollout.attempts:
        assert attempt.started_at is not None
        assert attempt.finished_at is not None
        assert 0.3 <= attempt.finished_at - attempt.started_at < 5


async def test_paused_time_does_not_count(url: str, client: Client, state: Path) -> None:
    await client.register_model(model="actor", endpoint="http://127.0.0.1:9/v1")
    async with controlling(url, runner_at(state), timeout_seconds=0.3):
        await client.pause("actor", mode="drain")
        (rollout,) = await client.enqueue(shell("sleep 1.2"))
        (rollout,) = await client.wait([rollout.rollout_id], timeout=WAIT_SECONDS)
        assert rollout.status == "succeeded"
        await client.resume("actor")
        (rollout,) = await client.enqueue(shell("exec sleep 60"))
        (rollout,) = await client.wait([rollout.rollout_id], timeout=WAIT_SECONDS)
        assert rollout.error is not None
        assert rollout.error.code == "timeout"


async def test_stopped_controller_leaves_agents_to_the_next(
    url: str, client: Client, state: Path, tmp_path: Path
) -> None:
    script = f"while test ! -e {tmp_path}/go; do sleep 0.02; done; echo no; exit 7"
    (rollout,) = await client.enqueue(shell(script))
    async with controlling(url, runner_at(state)):
        await until_running(client, rollout.rollout_id)
    (before,) = (await client.rollout(rollout.rollout_id)).attempts
    assert len(living(state)) == 1
    (tmp_path / "go").touch()
    await until(lambda: living(state) == [])
    async with controlling(url, runner_at(state)):
        (rollout,) = await client.wait([rollout.rollout_id], timeout=WAIT_SECONDS)
        assert len(await client.events(rollout.rollout_id, type="log")) == 1
    (after,) = rollout.attempts
    assert (after.attempt_id, after.reason, after.exit_code) == (before.attempt_id, "agent", 7)


async def test_controller_that_stops_its_agents_waits_for_their_end(
    url: str, client: Client, state: Path
) -> None:
    (rollout, waiting) = await client.enqueue([shell("sleep 60"), shell("sleep 60")])
    async with controlling(url, runner_at(state, max_active=1), stop_agents=True):
        await until_running(client, rollout.rollout_id)
    assert living(state) == []
    assert (await client.rollout(rollout.rollout_id)).status == "cancelled"
    assert (await client.rollout(waiting.rollout_id)).status == "queuing"


class Reluctant:
    """A runner that refuses the first starts, and that is out of sight now and then."""

    def __init__(self, runner: LocalRunner, refusals: int = 0, blind: int = 0) -> None:
        self._runner = runner
        self._refusals = refusals
        self._blind = blind
        self.max_active = runner.max_active

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    async def start(self, work: Work) -> None:
        if self._refusals > 0:
            self._refusals -= 1
            raise Unavailable("no place", retry_after_seconds=0.01)
        await self._runner.start(work)

    async def list(self) -> Sequence[RunReport]:
        return await self._runner.list()

    async def watch(self) -> AsyncIterator[RunReport]:
        async for report in self._runner.watch():
            if self._blind > 0:
                self._blind -= 1
                raise ConnectionError("the runner is out of sight")
            yield report


async def test_c67_runner_that_is_full_is_asked_again(
    url: str, client: Client, state: Path
) -> None:
    def through(runner: LocalRunner) -> Any:
        return Reluctant(runner, refusals=3)

    async with controlling(url, runner_at(state), through=through):
        (rollout,) = await client.enqueue(shell("exit 0"))
        (rollout,) = await client.wait([rollout.rollout_id], timeout=WAIT_SECONDS)
    assert rollout.status == "succeeded"
    assert len(rollout.attempts) == 1


async def test_c59_losing_sight_of_the_runner_ends_nothing(
    url: str, client: Client, state: Path
) -> None:
    def through(runner: LocalRunner) -> Any:
        return Reluctant(runner, blind=3)

    async with controlling(url, runner_at(state), through=through):
        rollouts = await client.enqueue([shell("sleep 0.2") for _ in range(4)])
        ended = await client.wait([r.rollout_id for r in rollouts], timeout=WAIT_SECONDS)
    assert [(r.status, len(r.attempts)) for r in ended] == [("succeeded", 1)] * 4


class Forgetful(AsyncAglLiteClient):
    """Loses the reply to every other change, after the service has made it."""

    calls: ClassVar[Counter[str]] = Counter()

    def _lose(self, name: str) -> None:
        self.calls[name] += 1
        if self.calls[name] % 2:
            raise ApiError(0, "unreachable", "the reply was lost")

    async def patch(self, rollout_id: str, **fields: Any) -> Any:
        after = await super().patch(rollout_id, **fields)
        self._lose("patch")
        return after

    async def post_events(self, rollout_id: str, attempt_id: str, drafts: Any) -> list[Event]:
        events = await super().post_events(rollout_id, attempt_id, drafts)
        self._lose("post_events")
        return events


async def test_lost_replies_double_nothing(url: str, client: Client, state: Path) -> None:
    async with controlling(url, runner_at(state), kind=Forgetful):
        items = [shell("echo no; exit 1", config={"max_retries": 1}) for _ in range(4)]
        rollouts = await client.enqueue(items)
        ended = await client.wait([r.rollout_id for r in rollouts], timeout=WAIT_SECONDS)
        for rollout in ended:
            events = await client.events(rollout.rollout_id, all_attempts=True)
            assert sorted(e.attempt_id for e in events) == sorted(
                a.attempt_id for a in rollout.attempts
            )
    assert [(r.status, len(r.attempts)) for r in ended] == [("failed", 2)] * 4


async def test_agents_own_log_events_do_not_replace_the_evidence(
    url: str, client: Client, state: Path, tmp_path: Path
) -> None:
    script = f"while test ! -e {tmp_path}/go; do sleep 0.02; done; echo ours; exit 1"
    async with controlling(url, runner_at(state)):
        (rollout,) = await client.enqueue(shell(script))
        await until_running(client, rollout.rollout_id)
        (attempt,) = (await client.rollout(rollout.rollout_id)).attempts
        draft = EventDraft(event_type="log", data={"text": "the agent's"})
        await client.post_events(rollout.rollout_id, attempt.attempt_id, [draft])
        (tmp_path / "go").touch()
        await client.wait([rollout.rollout_id], timeout=WAIT_SECONDS)
        events = await client.events(rollout.rollout_id)
    assert [e.data["text"] for e in events] == ["the agent's", "ours\n"]


async def test_refused_resources_fail_one_rollout_and_no_other(
    url: str, client: Client, state: Path
) -> None:
    bad = await client.add_resources({"job_defaults": "none"})
    good = await client.add_resources({"job_defaults": {"spec": {}}})
    async with controlling(url, runner_at(state)):
        rollouts = await client.enqueue(
            [shell("exit 0", resources_id=bundle.resources_id) for bundle in (bad, good)]
        )
        ended = await client.wait([r.rollout_id for r in rollouts], timeout=WAIT_SECONDS)
    assert [r.status for r in ended] == ["failed", "succeeded"]
    assert ended[0].error is not None
    assert ended[0].error.code == "config"


# --- processes that are killed -------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def service_process(folder: Path, port: int) -> subprocess.Popen[bytes]:
    config = folder / "agl.toml"
    config.write_text(f'[server]\nport = {port}\n[plugins]\nenabled = ["memory", "vllm"]\n')
    return subprocess.Popen(
        [sys.executable, "-m", "agl_core.cli", "serve", "--config", str(config)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
    )


async def until_healthy(url: str) -> None:
    async with asyncio.timeout(WAIT_SECONDS), httpx.AsyncClient(trust_env=False) as http:
        while True:
            try:
                if (await http.get(f"{url}/healthz")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await CLOCK.sleep(0.05)


async def test_service_that_is_killed_and_comes_back_empty(state: Path, tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = service_process(tmp_path, port)
    try:
        await until_healthy(url)
        async with AsyncAglLiteClient(url) as client, controlling(url, runner_at(state)):
            await client.enqueue([shell("sleep 60"), shell("sleep 60")])
            await until(lambda: len(living(state)) == 2)
            process.kill()
            await asyncio.to_thread(process.wait)
            assert len(living(state)) == 2
            process = service_process(tmp_path, port)
            await until_healthy(url)
            (rollout,) = await client.enqueue(shell("exit 0"))
            (rollout,) = await client.wait([rollout.rollout_id], timeout=WAIT_SECONDS)
            assert rollout.status == "succeeded"
            await until(lambda: living(state) == [])
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


def controller_process(folder: Path, url: str, state: Path) -> subprocess.Popen[bytes]:
    config = folder / "controller.toml"
    config.write_text(
        f'[controller]\nurl = "{url}"\n[plugins]\nenabled = ["local"]\n'
        f'[plugins.local]\nstate_dir = "{state}"\nmax_active = 4\nretry_seconds = 0.01\n'
        "infra_retries = 50\n"
    )
    return subprocess.Popen(
        [sys.executable, "-m", "agl_core.cli", "controller", "--config", str(config)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
    )


@pytest.mark.timeout(150)  # six starts of the interpreter, however busy the machine is
async def test_chaos_each_rollout_ends_once_and_none_runs_twice(
    url: str, client: Client, state: Path, tmp_path: Path
) -> None:
    dice = random.Random(7)
    journals = tmp_path / "journals"
    journals.mkdir()
    # Each attempt leaves its process id, by which the next one tells whether it is dead.
    script = (
        f'j={journals}/"$AGL_ROLLOUT_ID"; '
        "test -e $j.pid && read -r p <$j.pid && test -e /proc/$p/stat && "
        "read -r _ _ s _ </proc/$p/stat && test $s != Z && echo overlap >>$j; "
        "echo $$ >$j.pid; sleep 0.3; echo end >>$j"
    )
    rollouts = await client.enqueue([shell(script, config={"max_retries": 50}) for _ in range(16)])
    ids = [r.rollout_id for r in rollouts]
    waiting = asyncio.create_task(client.wait(ids, timeout=120))
    process = controller_process(tmp_path, url, state)
    try:
        for _ in range(5):
            await until(lambda: waiting.done() or len(living(state)) > 0)
            await CLOCK.sleep(dice.uniform(0.1, 0.5))
            for pid in living(state):
                if dice.random() < 0.4:
                    kill_group(pid)
            process.kill()
            await asyncio.to_thread(process.wait)
            process = controller_process(tmp_path, url, state)
        ended = await waiting
        await until(lambda: not list(state.glob("rollouts/*")))
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)
    assert {r.status for r in ended} == {"succeeded"}
    for rollout in ended:
        phases = Counter(a.phase for a in rollout.attempts)
        assert phases["succeeded"] == 1
        assert phases["running"] == 0
        marks = (journals / rollout.rollout_id).read_text().split()
        assert "overlap" not in marks
        # An agent that was killed after its last line is run again, never beside the other.
        assert 1 <= marks.count("end") <= len(rollout.attempts)
    assert sum(len(r.attempts) for r in ended) > len(ended)
