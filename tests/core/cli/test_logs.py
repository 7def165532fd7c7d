"""``agl logs`` against a real service whose agents are real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_core.client import AglLiteClient
from agl_core.clock import SystemClock
from agl_core.records import Attempt

SECONDS = 40
CLOCK = SystemClock()


@pytest.fixture
def running(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AglLiteClient]:
    """A service with its controller; commands find both by the environment."""
    monkeypatch.setenv("AGL__PLUGINS__LOCAL__STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("AGL__PLUGINS__LOCAL__RETRY_SECONDS", "0.1")
    started = serve("--with-runner")
    monkeypatch.setenv("AGL_URL", started.url)
    with AglLiteClient(started.url) as client:
        yield client
        for rollout in client.iter_rollouts(status=("queuing", "running")):
            client.cancel(rollout.rollout_id)
            client.wait([rollout.rollout_id], timeout=SECONDS)


def enqueue(client: AglLiteClient, script: str, **config: Any) -> str:
    config = {"command": ["sh", "-c", script], **config}
    [made] = client.enqueue({"config": config})
    return made.rollout_id


def follow(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "agl_core.cli", "logs", "--follow", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ,
    )


def read_until(process: subprocess.Popen[bytes], wanted: bytes) -> bytes:
    assert process.stdout is not None
    text = b""
    while wanted not in text and (piece := os.read(process.stdout.fileno(), 4096)):
        text += piece
    return text


def attempt_when(
    client: AglLiteClient, rollout_id: str, holds: Callable[[Attempt], bool]
) -> Attempt:
    """The latest attempt, as soon as it is as it should be."""
    cursor: str | None = None
    while True:
        page = client.rollouts(ids=[rollout_id], changed_after=cursor, wait=SECONDS)
        assert page.items, "nothing changed"
        attempts = client.rollout(rollout_id).attempts
        if attempts and holds(attempts[-1]):
            return attempts[-1]
        cursor = page.cursor


@pytest.mark.timeout(120)
def test_log_is_followed_from_the_queue_over_a_retry_to_the_end(
    running: AglLiteClient, tmp_path: Path
) -> None:
    marker = tmp_path / "second"
    script = (
        f"if test -e {marker}; then echo second; sleep 3; exit 0; fi; "
        f"echo first; echo key $OPENAI_API_KEY; sleep 3; touch {marker}; exit 1"
    )
    rollout_id = enqueue(running, script, max_retries=1)
    process = follow(rollout_id)
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (0, b"first\nkey [token]\nsecond\n"), err
    first, second = running.rollout(rollout_id).attempts
    assert f"attempt {second.attempt_id}" in err.decode()
    assert f"rollout {rollout_id} has succeeded" in err.decode()
    assert first.attempt_id != second.attempt_id


def test_log_of_what_runs_is_shown_as_far_as_it_has_come(running: AglLiteClient, agl: Any) -> None:
    rollout_id = enqueue(running, "echo one; printf '\\377two\\n'; echo three; sleep 60")
    with follow(rollout_id) as process:
        assert read_until(process, b"three\n") == b"one\n\xfftwo\nthree\n"
        attempt = attempt_when(running, rollout_id, lambda a: not a.is_ended)
        ran = agl("logs", rollout_id, "--tail", "1", "--attempt", attempt.attempt_id[:6])
        assert (ran.status, ran.out, ran.err) == (0, "three\n", "")
        assert agl("logs", rollout_id, "--tail", "0").out == ""
        # Ctrl-C ends the command, not the agent.
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
    assert not running.rollout(rollout_id).is_terminal


def test_reader_that_goes_away_is_no_error(running: AglLiteClient) -> None:
    rollout_id = enqueue(running, "while echo line; do sleep 0.05; done")
    process = follow(rollout_id)
    assert process.stdout is not None
    assert read_until(process, b"line\n")
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        err = process.stderr.read()
    # It may have said before that it waits for the attempt.
    assert [line for line in err.splitlines() if not line.startswith(b"agl: ")] == []
    assert process.wait(SECONDS) == 1


def test_what_was_kept_of_a_failed_attempt_is_shown_afterwards(
    running: AglLiteClient, agl: Any
) -> None:
    rollout_id = enqueue(running, "echo why; echo it failed; exit 3")
    running.wait([rollout_id], timeout=SECONDS)
    ran = agl("logs", rollout_id)
    assert (ran.status, ran.out) == (0, "why\nit failed\n")
    assert "as the service has it" in ran.err
    assert agl("logs", rollout_id, "--tail", "1").out == "it failed\n"


def test_nothing_left_says_what_is_kept(running: AglLiteClient, agl: Any) -> None:
    rollout_id = enqueue(running, "echo fine")
    running.wait([rollout_id], timeout=SECONDS)
    ran = agl("logs", rollout_id)
    assert (ran.status, ran.out) == (1, "")
    assert "nothing is left of the log of attempt" in ran.err
    assert "kept where an attempt fails" in ran.err


def test_kept_files_have_the_whole_log(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agl: Any
) -> None:
    monkeypatch.setenv("AGL__PLUGINS__LOCAL__STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("AGL__PLUGINS__LOCAL__KEEP", "true")
    started = serve("--with-runner")
    monkeypatch.setenv("AGL_URL", started.url)
    with AglLiteClient(started.url) as client:
        rollout_id = enqueue(client, "echo fine")
        client.wait([rollout_id], timeout=SECONDS)
    assert agl("logs", rollout_id).out == "fine\n"


class TestWithoutAController:
    """Rollouts that nobody runs."""

    def test_unknown_rollout(self, service: AglLiteClient, agl: Any) -> None:
        ran = agl("logs", "nobody")
        assert ran.status == 1
        assert "error: " in ran.err
        assert "nobody" in ran.err

    def test_queuing_rollout_has_none_yet(self, service: AglLiteClient, agl: Any) -> None:
        service.enqueue({"rollout_id": "waits-for-ever"})
        ran = agl("logs", "waits-for-ever")
        assert ran.status == 1
        assert "is queuing and has no attempt" in ran.err
        assert "--follow waits for the first one" in ran.err

    def test_unknown_and_ambiguous_attempts(self, service: AglLiteClient, agl: Any) -> None:
        service.enqueue({"rollout_id": "tried"})
        attempts = [
            Attempt(attempt_id=f"ab-{n}", phase="failed", reason="agent", node="n") for n in (1, 2)
        ]
        service.patch("tried", status="running", attempts=attempts)
        ran = agl("logs", "tried", "--attempt", "x")
        assert (ran.status, "it has ab-1, ab-2" in ran.err) == (1, True)
        ran = agl("logs", "tried", "--attempt", "ab")
        assert (ran.status, "several attempts that begin with 'ab'" in ran.err) == (1, True)

    def test_users_own_attempt_has_its_log_elsewhere(
        self, service: AglLiteClient, agl: Any
    ) -> None:
        service.enqueue({"rollout_id": "own"})
        service.patch("own", status="running", attempts=[Attempt(attempt_id="mine")])
        ran = agl("logs", "own")
        assert (ran.status, "started by no controller" in ran.err) == (1, True)

    def test_container_of_a_process_is_refused(self, service: AglLiteClient, agl: Any) -> None:
        service.enqueue({"rollout_id": "process"})
        attempts = [Attempt(attempt_id="a", node="here")]
        service.patch("process", status="running", attempts=attempts)
        ran = agl("logs", "process", "--container", "tool")
        assert (ran.status, "no container 'tool'" in ran.err) == (1, True)
        ran = agl("logs", "process")
        assert (ran.status, "on the controller's machine" in ran.err) == (1, True)

    def test_several_containers_are_told_apart(self, service: AglLiteClient, agl: Any) -> None:
        service.enqueue({"rollout_id": "two"})
        attempts = [Attempt(attempt_id="a", phase="failed", reason="agent", node="n")]
        service.patch("two", status="running", attempts=attempts)
        for data in (
            {"container": "agent", "text": "from agent\n", "truncated": True},
            {"container": "init", "text": "", "problem": "the cluster no longer has the log"},
            {"text": "an agent's own words"},
        ):
            service.post_events("two", "a", [{"event_type": "log", "data": data}])
        ran = agl("logs", "two")
        assert (ran.status, ran.out) == (0, "from agent\n")
        assert "container agent as the service has it, only its end" in ran.err
        assert "the cluster no longer has the log" in ran.err
        assert agl("logs", "two", "--container", "init").out == ""

    def test_service_that_is_not_there(self, agl: Any) -> None:
        ran = agl("logs", "any", "--url", "http://127.0.0.1:9")
        assert ran.status == 1
        assert "Traceback" not in ran.err
