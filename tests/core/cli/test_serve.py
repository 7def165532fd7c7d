"""``agl serve`` and ``agl controller`` as processes: how they start, fail to start, and end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agl_core.client import AglLiteClient
from agl_core.testing.distributions import write_distribution

NO_STORE = '[plugins]\nenabled = ["vllm"]\n'


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


def test_serve_says_where_it_listens_answers_and_ends_with_0(serve: Any) -> None:
    started = serve()
    health = httpx.get(f"{started.url}/healthz", trust_env=False).json()
    assert health["status"] == "ok"
    assert [plugin["name"] for plugin in health["plugins"]] == ["memory", "vllm", "local", "verl"]
    assert started.end() == 0
    assert "Traceback" not in started.log.read_text()


def test_serve_takes_its_settings_from_the_file(serve: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        '[auth]\nalgorithm_key = { env = "MY_KEY" }\n[server]\nport = 1\n', encoding="utf-8"
    )
    started = serve("--config", str(path), environ={"MY_KEY": "hunter2"})
    assert httpx.get(f"{started.url}/api/rollouts", trust_env=False).status_code == 401
    with AglLiteClient(started.url, "hunter2") as client:
        assert client.rollouts().items == ()
    assert started.end() == 0
    assert "hunter2" not in started.log.read_text()


def test_serve_tells_that_a_port_is_taken(agl_process: Any, taken_port: int) -> None:
    ran = agl_process("serve", "--port", str(taken_port))
    assert (ran.status, ran.out) == (1, "")
    assert f"error: cannot listen on 127.0.0.1:{taken_port}: it is taken" in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "99999"], "error: --port: server: 'port' must be <= 65535: 99999"),
        (["--port", "-1"], "error: --port: server: 'port' must be >= 0: -1"),
        (["--host", "no-such-host.invalid"], "'no-such-host.invalid' is no address"),
        (["--host", "0.0.0.0"], "is open to the network, but no key is set"),
    ],
)
def test_serve_tells_what_is_wrong_with_an_option(
    agl: Any, arguments: list[str], said: str
) -> None:
    ran = agl("serve", *({"--host": ["--port", "0"]}.get(arguments[0], [])), *arguments)
    assert (ran.status, ran.out) == (1, "")
    assert said in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (NO_STORE, "no enabled plugin implements provide_store (enabled: vllm)"),
        (
            '[plugins]\nenabled = ["memory"]\n',
            "no enabled plugin implements provide_route_resolver",
        ),
        ('[plugins]\nenabled = ["nowhere"]\n', "unknown plugin 'nowhere'"),
        ('[server]\ncertificate = "no.pem"\n', "server.certificate 'no.pem' cannot be used"),
        ('[server]\nclient_ca = "no.pem"\n', "server.client_ca needs server.certificate"),
        ("[server\n", "agl.toml:1: not TOML"),
    ],
)
def test_serve_tells_what_is_wrong_with_the_file(agl: Any, text: str, said: str) -> None:
    Path("agl.toml").write_text(text, encoding="utf-8")
    ran = agl("serve", "--port", "0")
    assert (ran.status, ran.out) == (1, "")
    assert said in ran.err
    assert "Traceback" not in ran.err


def test_serve_tells_which_extra_a_plugin_needs(agl_process: Any, tmp_path: Path) -> None:
    site = write_distribution(
        tmp_path / "site",
        "agl-heavy",
        modules={"agl_heavy.py": "raise ImportError('no heavy', name='heavy.part')"},
        entry_points={"agl.plugins": {"heavy": "agl_heavy:HeavyPlugin"}},
        requires=['heavy>=2; extra == "gpu"'],
    )
    environ = {
        "PYTHONPATH": str(site),
        "AGL__PLUGINS__ENABLED": '["memory", "vllm", "heavy"]',
    }
    ran = agl_process("serve", "--port", "0", environ=environ)
    assert ran.status == 1
    assert "plugin 'heavy' of agl-heavy 1.0 (agl_heavy:HeavyPlugin) cannot be imported" in ran.err
    assert "hint: pip install 'agl-heavy[gpu]'" in ran.err
    assert "Traceback" not in ran.err


def test_serve_tells_which_hook_of_which_plugin_failed(agl: Any, install: Any) -> None:
    source = (
        "from agl_core.hookspecs import hookimpl\n"
        "class Plugin:\n"
        "    @hookimpl\n"
        "    def provide_capture_sink(self):\n"
        "        raise OSError('disk is gone')\n"
    )
    install("broken-sink", source)
    Path("agl.toml").write_text(
        '[plugins]\nenabled = ["memory", "vllm", "broken-sink"]', encoding="utf-8"
    )
    ran = agl("serve", "--port", "0")
    assert ran.status == 1
    assert ran.err.startswith(
        "error: provide_capture_sink of plugin 'broken-sink' of broken-sink 1.0 "
        "(broken_sink:Plugin) raised OSError: disk is gone"
    )


def test_the_controller_needs_a_runner(agl: Any) -> None:
    Path("agl.toml").write_text('[plugins]\nenabled = ["memory"]\n', encoding="utf-8")
    ran = agl("controller")
    assert ran.status == 1
    assert "no enabled plugin implements provide_runner" in ran.err


TEN_LINE_RUNNER = """
import asyncio
from agl_core.hookspecs import hookimpl
from agl_core.interfaces import Finding, RunReport
from agl_core.records import Attempt

class Runner:
    max_active = 2
    def __init__(self):
        self.reports = asyncio.Queue()
        self.known = {}
    async def __aenter__(self): return self
    async def __aexit__(self, *exc_info): pass
    async def start(self, work):
        if work.rollout.rollout_id in self.known:
            return
        report = RunReport(
            rollout_id=work.rollout.rollout_id,
            attempts=(Attempt(attempt_id="only", phase="succeeded", exit_code=0, node="here"),),
            is_finished=True, outcome="succeeded", succeeded_attempt_id="only",
        )
        self.known[report.rollout_id] = report
        self.reports.put_nowait(report)
    async def stop(self, rollout_id, reason): pass
    async def release(self, rollout_id): self.known.pop(rollout_id, None)
    async def list(self): return list(self.known.values())
    async def watch(self):
        while True:
            yield await self.reports.get()
    async def examine(self, work, with_probe): yield Finding(subject="x", status="ok", message="y")
    async def logs(self, rollout_id, attempt_id, **options): yield b"done"
    async def until_ready(self): pass
    async def until_lost(self): await asyncio.Event().wait()

class RunnerPlugin:
    @hookimpl
    def provide_runner(self): return Runner()
"""


def test_a_plugins_runner_is_what_the_controller_runs_rollouts_with(
    serve: Any, tmp_path: Path
) -> None:
    site = write_distribution(
        tmp_path / "site",
        "ten-line-runner",
        modules={"ten_line_runner.py": TEN_LINE_RUNNER},
        entry_points={"agl.plugins": {"ten": "ten_line_runner:RunnerPlugin"}},
    )
    environ = {
        "PYTHONPATH": str(site),
        "AGL__PLUGINS__ENABLED": '["memory", "vllm", "ten"]',
        "AGL__AUTH__ALGORITHM_KEY": "hunter2",
    }
    started = serve("--with-runner", environ=environ)
    with AglLiteClient(started.url, "hunter2") as client:
        [made] = client.enqueue({"input": "x"})
        [ended] = client.wait([made.rollout_id], timeout=30)
    assert (ended.status, ended.succeeded_attempt_id) == ("succeeded", "only")
    assert ended.attempts[0].node == "here"
    assert started.end() == 0
    assert "hunter2" not in started.log.read_text()


def test_serve_with_runner_runs_an_agent_that_needs_nothing_of_ours(
    serve: Any, tmp_path: Path
) -> None:
    agent = (
        "import json, os, urllib.request\n"
        "told = json.loads(os.environ['AGL_TASK_INPUT'])\n"
        "body = json.dumps({'event_type': 'reward', 'data': {'value': told['value']}}).encode()\n"
        "head = {'content-type': 'application/json',\n"
        "        'authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "ask = urllib.request.Request(os.environ['AGL_EVENT_URL'], body, head)\n"
        "urllib.request.build_opener(urllib.request.ProxyHandler({})).open(ask).read()\n"
    )
    started = serve("--with-runner")
    with AglLiteClient(started.url) as client:
        config = {"command": [sys.executable, "-c", agent]}
        [made] = client.enqueue({"input": {"value": 0.75}}, config=config)
        [ended] = client.wait([made.rollout_id], timeout=40)
        assert ended.status == "succeeded", (ended, started.log.read_text())
        [reward] = client.events(made.rollout_id, type="reward")
    assert reward.data["value"] == 0.75
    assert reward.data["source"] == "agent"
    assert started.end() == 0


STANDBY_RUNNER = TEN_LINE_RUNNER.replace(
    "async def __aenter__(self): return self",
    "async def __aenter__(self): print('waiting', flush=True); await asyncio.Event().wait()",
)


def test_controller_that_waits_for_its_turn_shows_that_it_lives_and_ends_when_told(
    tmp_path: Path,
) -> None:
    assert STANDBY_RUNNER != TEN_LINE_RUNNER
    site = write_distribution(
        tmp_path / "site",
        "standby-runner",
        modules={"standby_runner.py": STANDBY_RUNNER},
        entry_points={"agl.plugins": {"standby": "standby_runner:RunnerPlugin"}},
    )
    environ = {**os.environ, "PYTHONPATH": str(site)}
    environ["AGL__PLUGINS__ENABLED"] = '["memory", "vllm", "standby"]'
    alive = tmp_path / "alive"
    command = [sys.executable, "-m", "agl_core.cli", "controller", "--heartbeat", str(alive)]
    with subprocess.Popen(
        command, env=environ, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
            process.terminate()
            assert process.wait(20) == 0
        finally:
            process.kill()
    assert alive.exists()
