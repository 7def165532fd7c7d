"""The processes of a demo: the service, the model server, and the certainty that none is left.

Each is a group of its own and carries a mark in its environment that its descendants inherit. So
what a Ctrl-C or a kill leaves behind is found by the mark, whoever started it.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from agl_core.clock import SystemClock, sleep_blocking
from agl_core.errors import AglError
from agl_demo.model_server import weights_to_wire
from agl_demo.policy import Floats

log = logging.getLogger(__name__)

MARK = "DEMO_RUN_ID"
"""Variable that marks every process of a run."""
_START_SECONDS = 30.0
_STOP_SECONDS = 10.0
_SWEEP_SECONDS = 5.0
_MAX_RESTARTS = 10
_LOG_LINES = 15


class DemoFailed(AglError):
    """The demo cannot go on."""

    default_code = "demo_failed"


class Child:
    """A process that ends with us: in a group of its own, tied to us, its errors in a file."""

    def __init__(
        self, name: str, command: Sequence[str], *, run: str, folder: Path, pass_fds: Sequence[int]
    ) -> None:
        self.name = name
        self.log_path = folder / f"{name}.log"
        # Settings of the user's own service are not for this one.
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("AGL_")}
        with self.log_path.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "agl_demo.tether", str(os.getpid()), *command],
                env={**inherited, MARK: run},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=folder,
                start_new_session=True,
                pass_fds=pass_fds,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def first_line(self) -> str:
        """The first line that it prints: it is ready then.

        Raises:
            DemoFailed: It ended before that, or took too long.
        """
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            is_readable = bool(selector.select(_START_SECONDS))
        line = self._process.stdout.readline().decode() if is_readable else ""
        if not line:
            raise DemoFailed(f"the {self.name} did not start", hint=self.last_words())
        return line.strip()

    def last_words(self) -> str:
        """The end of its log, for whoever wants to know why it ended."""
        lines = self.log_path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return "\n".join(["its last words:", *lines]) if lines else "it said nothing"

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the process; it ends its own children."""
        if self._process.poll() is None:
            self._process.terminate()

    def stop(self) -> None:
        """Wait for the end that was asked for, and end the whole group where it does not come."""
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("the %s did not end in time and is killed", self.name)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nothing of the group is left
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class Service:
    """``agl serve --with-runner`` as a child process."""

    def __init__(self, folder: Path, run: str, *, port: int, max_active: int) -> None:
        config = folder / "agl.toml"
        config.write_text(_config(folder, port, max_active))
        command = [sys.executable, "-m", "agl_core.cli", "serve", "--with-runner"]
        command += ["--config", str(config), "--log-level", "warning"]
        self._child = Child("service", command, run=run, folder=folder, pass_fds=())
        self.url = ""

    @property
    def pid(self) -> int:
        return self._child.pid

    def wait_until_ready(self) -> None:
        """Wait until it listens; ``url`` says where.

        Raises:
            DemoFailed: It did not start.
        """
        self.url = self._child.first_line().removeprefix("listening on ")

    def check(self) -> None:
        """Raises DemoFailed when the service has ended."""
        status = self._child.exit_status
        if status is not None:
            raise DemoFailed(
                f"the service died (exit status {status})", hint=self._child.last_words()
            )

    def stop(self) -> None:
        """End the service, its controller and their agents."""
        self._child.ask_to_stop()
        self._child.stop()


def _config(folder: Path, port: int, max_active: int) -> str:
    return f"""\
[server]
port = {port}
grace_seconds = 1.0

[controller]
# Agents of a demo that has ended are of no use to anybody.
stop_agents = true

[plugins]
enabled = ["memory", "vllm", "local", "verl"]

[plugins.local]
max_active = {max_active}
state_dir = {json.dumps(str(folder / "agents"))}
grace_seconds = 1.0
"""


class ModelServer:
    """The model server as a child process that is started again, with its weights, when it dies.

    The listening socket is ours and only lent to it: the port stays the same, and calls that come
    while no process is there wait in the socket's queue.
    """

    def __init__(self, folder: Path, run: str, *, seed: int, say: Callable[[str], None]) -> None:
        self._say = say
        self._folder = folder
        self._run = run
        self._weights = folder / "weights.json"
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.endpoint = f"http://127.0.0.1:{self._listening.getsockname()[1]}/v1"
        self._command = [sys.executable, "-m", "agl_demo.model_server"]
        self._command += ["--fd", str(self._listening.fileno()), "--seed", str(seed)]
        self.restarts = 0
        self._child = self._start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def _start(self) -> Child:
        command = list(self._command)
        if self._weights.exists():
            command += ["--weights", str(self._weights)]
        fds = (self._listening.fileno(),)
        return Child("model server", command, run=self._run, folder=self._folder, pass_fds=fds)

    def wait_until_ready(self) -> None:
        """Wait until it serves.

        Raises:
            DemoFailed: It did not start.
        """
        self._child.first_line()

    def revive(self) -> bool:
        """Start it again if it has died; returns whether that was so.

        Raises:
            DemoFailed: It dies again and again.
        """
        if self._child.exit_status is None:
            return False
        self._child.stop()
        self.restarts += 1
        if self.restarts > _MAX_RESTARTS:
            raise DemoFailed("the model server keeps dying", hint=self._child.last_words())
        self._child = self._start()
        self._child.first_line()
        self._say(f"the model server died and was started again (process {self.pid})")
        return True

    def load(self, weights: Floats, version: int) -> None:
        """Replace the weights, over a death of the process if need be.

        Raises:
            DemoFailed: It does not take them.
        """
        body = json.dumps(weights_to_wire(weights, version))
        # The file first: whatever dies now starts again with these weights.
        scratch = self._weights.with_suffix(".new")
        scratch.write_text(body)
        scratch.replace(self._weights)
        for _ in range(_MAX_RESTARTS):
            self.revive()
            try:
                url = f"{self.endpoint.removesuffix('/v1')}/weights"
                answer = httpx.post(url, content=body, timeout=5, trust_env=False)
            except httpx.TransportError:
                continue
            if answer.is_success:
                return
            raise DemoFailed(f"the model server refused the weights: {answer.text}")
        raise DemoFailed("the model server does not take weights", hint=self._child.last_words())

    def stop(self) -> None:
        """End the process and give the port back."""
        self._child.ask_to_stop()
        self._child.stop()
        self._listening.close()


def marked(run: str) -> list[int]:
    """Ids of the living processes that carry the mark of a run, our own not among them."""
    wanted = f"{MARK}={run}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue  # it has ended, or is another user's
    return [pid for pid in found if pid != os.getpid()]


def sweep(run: str) -> list[int]:
    """Kill what is left of a run; returns what would not go."""
    clock = SystemClock()
    deadline = clock.monotonic() + _SWEEP_SECONDS
    while left := marked(run):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if clock.monotonic() > deadline:
            return left
        sleep_blocking(0.02)
    return []
