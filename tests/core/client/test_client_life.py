"""One client: many calls, threads, forks, event loops and copies of it."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from agl_core.client import AglLiteClient, AsyncAglLiteClient
from agl_core.client.connection import CALLS_AT_ONCE, http_options, make_settings

HEALTHY = {"status": "ok", "version": "1"}


@pytest.fixture
def healthy(server, answer):
    server.script = lambda _: answer(json=HEALTHY)
    return server


def test_c85_a_thousand_calls_share_one_connection(shell, healthy) -> None:
    for _ in range(1000):
        shell.call("health")
    assert len(healthy.seen) == 1000
    assert healthy.connections <= 2


def test_c85_calls_at_once_stay_within_the_pool(healthy) -> None:
    client = AsyncAglLiteClient(healthy.url)

    async def run() -> None:
        async with client:
            await asyncio.gather(*[client.health() for _ in range(300)])

    asyncio.run(run())
    assert len(healthy.seen) == 300
    assert healthy.connections <= CALLS_AT_ONCE


def test_calls_do_not_queue_behind_long_polls(server, answer) -> None:
    released = threading.Event()
    all_held = threading.Barrier(121)

    def script(seen):
        if "wait" not in dict(seen.query):
            return answer(json=HEALTHY)
        all_held.wait(20)
        released.wait(20)
        return answer(json={"items": [], "cursor": "c"})

    server.script = script

    async def run() -> None:
        async with AsyncAglLiteClient(server.url) as client:
            polls = [asyncio.create_task(client.rollouts(wait=30)) for _ in range(120)]
            await asyncio.to_thread(all_held.wait, 20)
            assert (await client.health()).status == "ok"
            assert not any(poll.done() for poll in polls)
            released.set()
            await asyncio.gather(*polls)

    asyncio.run(run())


def test_threads_share_a_client(healthy) -> None:
    with AglLiteClient(healthy.url) as client, ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(lambda _: client.health().status, range(200))]
    assert answers == ["ok"] * 200
    assert healthy.connections <= 16


def test_a_client_that_nobody_closed_leaves_no_warning(healthy) -> None:
    AglLiteClient(healthy.url).health()

    async def run() -> None:
        await AsyncAglLiteClient(healthy.url).health()

    asyncio.run(run())
    gc.collect()


def test_an_async_client_works_in_one_event_loop_after_another(healthy) -> None:
    client = AsyncAglLiteClient(healthy.url)
    for _ in range(3):
        assert asyncio.run(client.health()).status == "ok"
        gc.collect()
    assert healthy.connections == 3


def test_an_async_client_works_in_event_loops_of_several_threads(healthy) -> None:
    client = AsyncAglLiteClient(healthy.url)

    async def run() -> set[str]:
        return {(await client.health()).status for _ in range(20)}

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(lambda _: asyncio.run(run()), range(4))] == [{"ok"}] * 4


def test_a_closed_client_opens_again_when_it_is_used(shell, healthy) -> None:
    shell.call("health")
    shell.close() if shell.kind == "blocking" else shell._runner.run(shell.client.close())
    assert shell.call("health").status == "ok"
    assert healthy.connections == 2


def test_a_client_is_pickled_and_copied_with_its_settings_alone(make_shell, healthy) -> None:
    shell = make_shell(key="k", timeout_seconds=7, retries=1)
    shell.call("health")
    for twin in (
        pickle.loads(pickle.dumps(shell.client)),
        copy.copy(shell.client),
        copy.deepcopy(shell.client),
    ):
        assert twin._settings == shell.client._settings
        assert len(twin._https) == 0
        shell.client = twin
        assert shell.call("health").status == "ok"
        assert healthy.seen[-1].headers["authorization"] == "Bearer k"


def test_no_method_hides_behind_a_plugin_name(shell) -> None:
    with pytest.raises(AttributeError, match=r"'nonsense'.*installed: .*verl"):
        _ = shell.client.nonsense
    assert not hasattr(shell.client, "__array__")


def python(source: str, url: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(source)],
        env={**os.environ, "AGL_URL": url},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_forked_child_opens_connections_of_its_own(healthy) -> None:
    source = """
        import os
        from agl_core.client import AglLiteClient

        client = AglLiteClient()
        client.health()
        children = []
        for _ in range(4):
            pid = os.fork()
            if pid == 0:
                wrong = sum(client.health().status != "ok" for _ in range(50))
                client.close()
                os._exit(wrong)
            children.append(pid)
        wrong = sum(client.health().status != "ok" for _ in range(50))
        print(wrong, [os.waitpid(pid, 0)[1] for pid in children])
    """
    assert python(source, healthy.url) == "0 [0, 0, 0, 0]\n"
    assert len(healthy.seen) == 251
    assert healthy.connections == 5


def test_a_forked_child_runs_an_async_client_in_its_own_loop(healthy) -> None:
    source = """
        import asyncio, os
        from agl_core.client import AsyncAglLiteClient

        client = AsyncAglLiteClient()
        asyncio.run(client.health())
        pid = os.fork()
        if pid == 0:
            os._exit(asyncio.run(client.health()).status != "ok")
        print(os.waitpid(pid, 0)[1])
    """
    assert python(source, healthy.url) == "0\n"


def test_importing_the_client_brings_no_web_server(healthy) -> None:
    source = """
        import sys
        import agl_core.client

        heavy = {"quart", "hypercorn", "werkzeug", "uvloop", "numpy", "agl_verl"}
        print(sorted(heavy & set(sys.modules)))
    """
    assert python(source, healthy.url) == "[]\n"


@pytest.mark.parametrize(
    ("url", "obeys_proxies"),
    [
        ("http://127.0.0.1:1", False),
        ("http://127.8.8.8", False),
        ("http://[::1]:1", False),
        ("https://localhost", False),
        ("http://service.localhost", False),
        ("http://10.0.0.1", True),
        ("http://localhost.example", True),
    ],
)
def test_proxies_of_the_environment_are_for_other_hosts(url, obeys_proxies) -> None:
    settings = make_settings(url, None, 60, 4)
    assert http_options(settings, is_waiting=False)["trust_env"] is obeys_proxies


def test_loopback_is_reached_past_a_proxy_of_the_environment(
    make_shell, healthy, monkeypatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert make_shell(retries=0).call("health").status == "ok"
