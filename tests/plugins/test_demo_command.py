"""``agl demo`` as a user runs it: it learns, survives deaths, and leaves nothing running."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agl_core.clock import SystemClock, poll
from agl_demo.processes import MARK, marked

CLOCK = SystemClock()
END_SECONDS = 40.0


class Demo:
    """A running demo whose standard error is read line by line."""

    def __init__(self, folder: Path, *options: str) -> None:
        environment = {key: value for key, value in os.environ.items() if key != MARK}
        # What a demo that was killed could not remove goes with the fixture.
        environment["TMPDIR"] = str(folder)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "agl_core.cli", "demo", "--json", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.lines: list[str] = []
        self.service = self._process_in("service")
        self.model_server = self._process_in("model server")
        variables = Path(f"/proc/{self.service}/environ").read_bytes().decode().split("\0")
        self.run = dict(one.partition("=")[::2] for one in variables)[MARK]

    def wait_for(self, start: str) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if line.startswith(start):
                return line
        raise AssertionError(f"no line {start!r} in {self.lines}")

    def _process_in(self, start: str) -> int:
        found = re.search(r"process (\d+)", self.wait_for(start))
        assert found is not None
        return int(found[1])

    async def agents(self) -> list[int]:
        """The agents that run now; waits until there are some."""
        found: list[int] = []

        def look() -> bool:
            found[:] = [pid for pid in marked(self.run) if _is_agent(pid)]
            return bool(found)

        assert await poll(look, CLOCK, seconds=30)
        return found

    def end(self) -> tuple[int, str, str]:
        """Wait for the end: exit status, standard output, standard error."""
        out, errors = self.process.communicate(timeout=END_SECONDS)
        return self.process.returncode, out, "".join(self.lines) + errors


def _is_agent(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"python" in command[0] and command[1].endswith(b"agent.py")


def is_empty(folder: Path) -> bool:
    return not any(folder.iterdir())


@contextmanager
def running(folder: Path, *options: str) -> Iterator[Demo]:
    demo = Demo(folder, *options)
    try:
        yield demo
    finally:
        demo.process.kill()
        demo.process.communicate()
        for pid in marked(demo.run):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(180)
async def test_demo_learns_the_same_curve_over_http_whatever_is_killed(
    tmp_path: Path, offline_curve: Callable[[int], list[float]]
) -> None:
    with running(tmp_path, "--seed", "2", "--max-active", "3") as demo:
        os.kill((await demo.agents())[0], signal.SIGKILL)
        demo.wait_for("step  1")
        await demo.agents()
        os.kill(demo.model_server, signal.SIGKILL)
        demo.wait_for("the model server died")
        out, errors = demo.process.communicate(timeout=170)
        assert demo.process.returncode == 0, errors
        result = json.loads(out)
        assert out.count("\n") == 1
        assert result["rewards"] == pytest.approx(offline_curve(2), abs=1e-9)
        assert result["steps"] == len(result["rewards"])
        assert result["rollouts"] == 16 * result["steps"]
        assert result["reward_first"] <= 0.3
        assert result["reward_last"] >= 0.9
        assert result["model_requests"] > result["rollouts"]
        assert result["tokens_incomplete"] == 0
        assert result["rollouts_failed"] == []
        assert result["model_server_restarts"] == 1
        assert marked(demo.run) == []


@pytest.mark.timeout(90)
async def test_death_of_the_service_is_told_and_leaves_no_process(tmp_path: Path) -> None:
    with running(tmp_path) as demo:
        await demo.agents()
        os.kill(demo.service, signal.SIGKILL)
        status, out, errors = demo.end()
        assert (status, out) == (1, "")
        assert "the service died" in errors
        assert marked(demo.run) == []


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"]
)
async def test_signal_ends_the_demo_and_leaves_no_process(
    tmp_path: Path, number: int, expected: int
) -> None:
    with running(tmp_path) as demo:
        await demo.agents()
        demo.process.send_signal(number)
        status, out, errors = demo.end()
        assert (status, out) == (expected, "")
        assert "Traceback" not in errors
        assert is_empty(tmp_path)
        assert marked(demo.run) == []


@pytest.mark.timeout(90)
async def test_demo_that_is_killed_takes_everything_with_it(tmp_path: Path) -> None:
    with running(tmp_path) as demo:
        await demo.agents()
        demo.process.kill()
        assert await poll(lambda: not marked(demo.run), CLOCK, seconds=END_SECONDS)


def test_port_in_use_is_told_in_the_services_words() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "agl_core.cli", "demo", "--port", port],
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr


@pytest.mark.parametrize("name", ["openai", "numpy"])
def test_missing_extra_is_told_with_the_command_that_installs_it(name: str) -> None:
    script = (
        f"import sys; sys.modules[{name!r}] = None; sys.argv = ['agl', 'demo', '--json']\n"
        "from agl_core.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert f"the demo needs {name}" in done.stderr
    assert "uv run --extra demo agl demo" in done.stderr
