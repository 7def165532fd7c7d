"""A real service that the programs in the documentation are run against."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MODEL = "my-model"
_WITHOUT_CONTROLLER = "<!-- tests/docs runs this page without a controller -->"
_START_SECONDS = 30
_BLOCK_SECONDS = 120


@contextmanager
def _process(command: list[str], folder: Path, log_name: str) -> Iterator[str]:
    """A process, until it has printed its first line and then as long as the block lasts."""
    log_path = folder / log_name
    with log_path.open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=folder,
            env=_environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    assert child.stdout is not None
    try:
        with child.stdout:
            line = child.stdout.readline().strip()
            assert line, f"{command} did not start: {log_path.read_text()}"
            yield line.split()[-1]
            child.terminate()
            child.wait(_START_SECONDS)
    finally:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the group ended by itself
        child.wait()


def _environ() -> dict[str, str]:
    """Ours without settings of agl-lite, with the programs that are installed beside Python."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AGL_")}
    return {**kept, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"}


@pytest.fixture
def service_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A service, and the demo's model server registered as ``my-model``.

    It has its controller, unless the page under test says that it is run without.
    """
    from agl_core.client import AglLiteClient

    folder = tmp_path / "service"
    folder.mkdir()
    (folder / "agl.toml").write_text(
        "[server]\ngrace_seconds = 1.0\n[controller]\nstop_agents = true\n"
    )
    models = ["agl_demo.model_server", "--port", "0", "--model", MODEL]
    serve = ["agl_core.cli", "serve", "--port", "0"]
    if _WITHOUT_CONTROLLER not in request.getfixturevalue("page").text:
        serve.append("--with-runner")
    with (
        _process(models, folder, "models.log") as endpoint,
        _process(serve, folder, "service.log") as url,
    ):
        with AglLiteClient(url, "") as client:
            client.register_model(model=MODEL, endpoint=endpoint)
        yield url


RunBlock = Callable[[str, str], subprocess.CompletedProcess[str]]


@pytest.fixture
def run_block(service_url: str, page_folder: Path) -> RunBlock:
    """Runs a block, given its language and text, to its end."""
    programs = {"python": [sys.executable, "-"], "bash": ["bash", "-euo", "pipefail"]}
    environ = {**_environ(), "AGL_URL": service_url, "PYTHONPATH": str(page_folder)}

    def run(language: str, text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            programs[language],
            input=text,
            cwd=page_folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=_BLOCK_SECONDS,
            check=False,
        )

    return run


@pytest.fixture
def page_folder(tmp_path: Path) -> Path:
    """A folder that a page has to itself."""
    folder = tmp_path / "page"
    folder.mkdir()
    return folder
