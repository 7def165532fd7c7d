"""The examples work as they stand: the plugin template is installed and the service uses it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tomli
from mypy import api as mypy

from agl_core.client import AglLiteClient
from agl_core.testing.distributions import write_distribution

ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / "examples" / "plugin_template"
SECONDS = 30.0


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment in which the template is installed, by its own pyproject.toml."""
    project = tomli.loads((TEMPLATE / "pyproject.toml").read_text("utf-8"))["project"]
    modules = {
        str(path.relative_to(TEMPLATE / "src")): path.read_text("utf-8")
        for path in (TEMPLATE / "src").rglob("*.py")
    }
    site = write_distribution(
        tmp_path / "site",
        project["name"],
        version=project["version"],
        modules=modules,
        entry_points=project["entry-points"],
        requires=project["dependencies"],
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AGL")}
    return {**kept, "PYTHONPATH": str(site)}


def agl(folder: Path, environ: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "agl_core.cli", *arguments],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def serve(folder: Path, environ: dict[str, str]) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "agl_core.cli", "serve", "--port", "0"],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        with process.stdout:
            yield process.stdout.readline().split()[-1]
            process.send_signal(signal.SIGTERM)
            assert process.wait(SECONDS) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(SECONDS)


def test_the_template_is_installed_listed_and_used_by_the_service(
    environ: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    readme = (TEMPLATE / "README.md").read_text("utf-8")
    [settings] = re.findall(r"^```toml\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    (folder / "agl.toml").write_text(settings, encoding="utf-8")
    assert "jsonl-sink" in agl(folder, environ, "config", "check")
    plugins = json.loads(agl(folder, environ, "plugins", "--json"))["plugins"]
    [row] = [plugin for plugin in plugins if plugin["name"] == "jsonl-sink"]
    assert (row["enabled"], row["distribution"], row["problem"]) == (True, "agl-jsonl-sink", None)
    assert row["hooks"] == ["provide_capture_sink"]
    with serve(folder, environ) as url, AglLiteClient(url) as client:
        [made] = client.enqueue({"input": 1})
        client.post_events(made.rollout_id, "a", {"event_type": "note", "data": {}})
        client.post_reward(made.rollout_id, "a", 0.5)
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [(line["event_type"], line["rollout_id"]) for line in lines] == [
        ("reward", made.rollout_id)
    ]
    assert lines[0]["data"]["value"] == 0.5


def test_the_templates_own_tests_pass(environ: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TEMPLATE / "tests")],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


def test_the_template_is_typed_strictly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MYPYPATH", f"{TEMPLATE / 'src'}{os.pathsep}{ROOT / 'plugins'}")
    options = [
        "--strict",
        "--explicit-package-bases",
        "--no-error-summary",
        "--cache-dir",
        os.devnull,
    ]
    options += ["--follow-imports", "silent"]
    out, err, status = mypy.run([*options, str(TEMPLATE / "src" / "agl_jsonl_sink")])
    assert (status, out, err) == (0, "", "")
