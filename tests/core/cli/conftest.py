"""``agl`` as it is run: in this process where that is the same, else as a real one."""

from __future__ import annotations

import logging
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from attrs import define, frozen

from agl_core.cli import main
from agl_core.client import AglLiteClient

SECONDS = 30.0


@frozen
class Ran:
    """How a command ended and what it said."""

    status: int
    out: str
    err: str


Agl = Callable[..., Ran]


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder and no settings of ours in the environment."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith("AGL")]:
        monkeypatch.delenv(name)


@pytest.fixture
def agl(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Agl]:
    """Run ``agl`` with arguments in this process, as its script does."""
    root = logging.getLogger()
    before = (root.handlers[:], root.level)

    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["agl", *arguments])
        capfd.readouterr()
        status: object = 0
        try:
            main()
        except SystemExit as exc:
            status = exc.code
        sys.stdout.flush()
        out, err = capfd.readouterr()
        return Ran(status if isinstance(status, int) else 1, out, err)

    yield run
    # A command logs to the standard error that this test has captured, which is closed by now.
    root.handlers[:], level = before
    root.setLevel(level)


def run_process(*arguments: str, environ: Mapping[str, str] | None = None) -> Ran:
    """Run ``agl`` in a process of its own, to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "agl_core.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, **(environ or {})},
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def agl_process() -> Agl:
    """Run ``agl`` as a process to its end."""
    return run_process


@define
class Started:
    """A long-running ``agl`` process."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def end(self) -> int:
        """SIGTERM, and the status that it ends with."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(SECONDS)


def _first_line(stream: IO[str]) -> str:
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        lines.put(stream.readline())

    threading.Thread(target=read, daemon=True).start()
    return lines.get(timeout=SECONDS)


@contextmanager
def serving(
    folder: Path, *arguments: str, environ: Mapping[str, str] | None = None
) -> Iterator[Started]:
    """``agl serve --port 0`` until the end of the block."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "serve.log"
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "agl_core.cli", "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=folder,
            env={**os.environ, **(environ or {})},
        )
        assert process.stdout is not None
        try:
            line = _first_line(process.stdout)
            found = re.fullmatch(r"listening on (http://127\.0\.0\.1:\d+)\n", line)
            assert found, (line, log.read_text(encoding="utf-8"))
            yield Started(process, found[1], log)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(SECONDS)
            process.stdout.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Start services of one's own; they are gone after the test."""
    with_ends = []

    def run(*arguments: str, environ: Mapping[str, str] | None = None) -> Started:
        context = serving(tmp_path / f"service{len(with_ends)}", *arguments, environ=environ)
        with_ends.append(context)
        return context.__enter__()

    yield run
    for context in with_ends:
        context.__exit__(None, None, None)


@pytest.fixture(scope="session")
def service_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One service for all commands that talk to one; tests name their rollouts apart."""
    environ = {name: "" for name in os.environ if name.startswith("AGL")}
    with serving(tmp_path_factory.mktemp("service"), environ=environ) as started:
        yield started.url


@pytest.fixture
def service(service_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[AglLiteClient]:
    """A client of that service; commands find it by ``AGL_URL``."""
    monkeypatch.setenv("AGL_URL", service_url)
    with AglLiteClient(service_url) as client:
        yield client
