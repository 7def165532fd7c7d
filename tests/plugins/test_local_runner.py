"""The local runner, with real processes: the contract of all runners, and what is its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agl_core.clock import SystemClock, poll
from agl_core.errors import ConfigError, Invalid
from agl_core.interfaces import Runner, Work
from agl_core.records import Rollout, RolloutConfig
from agl_core.testing.contracts import RunnerContract
from agl_core.testing.contracts.runner import Agent, finished, is_running, report_when
from agl_local import LocalConfig, LocalPlugin
from agl_local.runner import LocalRunner

TOKEN = "agl1.k1.ci0x.1750000000.c2lnbmF0dXJl"
AGENTS: dict[str, str] = {
    "succeeds": "echo fine",
    "fails": "echo about to fail; exit 3",
    "hangs": ": >started; exec sleep 60",
    "hangs_deaf": "trap '' TERM; : >started; sleep 60 & wait; sleep 60",
    "talks": "echo one; echo two; echo $OPENAI_API_KEY; echo started; : >started; exec sleep 60",
    "hangs_politely": "trap 'exit 0' TERM; : >started; sleep 60 & wait",
}
CLOCK = SystemClock()


def work_of(rollout_id: str, command: list[str], *, task: Any = None, **config: Any) -> Work:
    rollout = Rollout(
        rollout_id=rollout_id,
        input=task,
        config=RolloutConfig(command=tuple(command), **config),
    )
    return Work(rollout=rollout, agent_url="http://127.0.0.1:9/", token=TOKEN)


def shell(rollout_id: str, script: str, **config: Any) -> Work:
    return work_of(rollout_id, ["sh", "-c", script], **config)


def runner_at(path: Path, **config: Any) -> LocalRunner:
    settings = {"retry_seconds": 0.01, "grace_seconds": 0.3, "max_active": 4} | config
    return LocalRunner(LocalConfig(state_dir=str(path), **settings), CLOCK)


@asynccontextmanager
async def opened(path: Path, **config: Any) -> AsyncIterator[LocalRunner]:
    """A runner whose agents are gone when the test is over."""
    async with runner_at(path, **config) as runner:
        try:
            yield runner
        finally:
            for report in await runner.list():
                await runner.stop(report.rollout_id, "cancelled")
                await finished(runner, report.rollout_id)


def work_dir(state: Path) -> Path:
    """Where the only attempt of the only rollout runs."""
    (directory,) = (state / "rollouts").glob("*/*/work")
    return directory


async def until(condition: Callable[[], bool]) -> None:
    assert await poll(condition, CLOCK, seconds=20)


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat[stat.rindex(")") + 2] != "Z"


class TestLocalRunnerContract(RunnerContract):
    @pytest.fixture
    def state(self, tmp_path: Path) -> Path:
        return tmp_path / "state"

    @pytest.fixture
    def open_runner(self, state: Path) -> Callable[[], AbstractAsyncContextManager[Runner]]:
        self._state = state
        return lambda: runner_at(state)

    def make_work(self, rollout_id: str, agent: Agent, **config: Any) -> Work:
        if agent == "is_missing":
            return work_of(rollout_id, ["no-such-program"], **config)
        return shell(rollout_id, AGENTS[agent], **config)

    async def is_started(self, work: Work) -> None:
        prefix = work.rollout.rollout_id
        await until(lambda: any(self._state.glob(f"rollouts/{prefix}-*/*/work/started")))


async def test_agent_gets_the_contract_and_nothing_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_ALGORITHM_KEY", "secret")
    monkeypatch.setenv("LANG", "C.UTF-8")
    script = (
        "import json, os, sys; json.dump([dict(os.environ), sys.stdin.read(), os.getcwd()], "
        "open('seen.json', 'w')); sys.exit(1)"
    )
    work = work_of("a b/c", [sys.executable, "-c", script], task={"q": "ä"}, env={"MINE": "1"})
    async with opened(tmp_path) as runner:
        await runner.start(work)
        report = await finished(runner, "a b/c")
        seen, stdin, cwd = json.loads((work_dir(tmp_path) / "seen.json").read_text())
        assert cwd == str(work_dir(tmp_path))
    attempt_id = report.attempts[0].attempt_id
    base = f"http://127.0.0.1:9/rollout/a%20b%2Fc/attempt/{attempt_id}"
    assert stdin == ""
    assert "AGL_ALGORITHM_KEY" not in seen
    assert seen["LANG"] == "C.UTF-8"
    assert seen["MINE"] == "1"
    assert json.loads(seen["AGL_TASK_INPUT"]) == {"q": "ä"}
    assert {name: seen[name] for name in seen if name.startswith(("OPENAI", "ANTHR"))} == {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_KEY": TOKEN,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": TOKEN,
    }
    assert {name for name in seen if name.startswith("AGL")} == {
        "AGL_TASK_INPUT",
        "AGL_EVENT_URL",
        "AGL_ROLLOUT_ID",
        "AGL_ATTEMPT_ID",
    }
    assert seen["AGL_EVENT_URL"] == f"{base}/events"
    assert (seen["AGL_ROLLOUT_ID"], seen["AGL_ATTEMPT_ID"]) == ("a b/c", attempt_id)


async def test_c69_large_input_reaches_the_agent_as_a_file_or_an_url(tmp_path: Path) -> None:
    task = {"text": "x" * 300_000}
    check = (
        "import json, os; "
        "assert len(json.load(open(os.environ['AGL_TASK_INPUT_FILE']))['text']) == 300_000; "
        "assert sum(len(k) + len(v) for k, v in os.environ.items()) < 8192; "
        "assert 'AGL_TASK_INPUT' not in os.environ"
    )
    async with opened(tmp_path) as runner:
        command = [sys.executable, "-c", check]
        await runner.start(work_of("file", command, task=task, input_delivery="file"))
        url = 'test "$AGL_TASK_INPUT_URL" = "${AGL_EVENT_URL%/events}/input"'
        await runner.start(work_of("url", ["sh", "-c", url], task=task, input_delivery="url"))
        assert (await finished(runner, "file")).outcome == "succeeded"
        assert (await finished(runner, "url")).outcome == "succeeded"
        with pytest.raises(Invalid, match="input"):
            await runner.start(work_of("env", command, task=task))


async def test_rollout_without_a_command_takes_the_default_or_is_refused(tmp_path: Path) -> None:
    work = Work(
        rollout=Rollout(rollout_id="r", config=RolloutConfig(args=("-c", "exit 0"))),
        agent_url="http://127.0.0.1:9",
        token=TOKEN,
    )
    async with opened(tmp_path / "1") as runner:
        with pytest.raises(Invalid, match="no command"):
            await runner.start(work)
        assert await runner.list() == []
    async with opened(tmp_path / "2", command=("sh",)) as runner:
        await runner.start(work)
        assert (await finished(runner, "r")).outcome == "succeeded"


@pytest.mark.parametrize("kind", ["not_executable", "directory", "interpreter", "arguments", "nul"])
async def test_command_that_cannot_start_is_a_config_fault(tmp_path: Path, kind: str) -> None:
    program = tmp_path / "agent"
    if kind == "directory":
        program.mkdir()
    else:
        program.write_text("#!/no/such/python\n")
        program.chmod(0o755 if kind == "interpreter" else 0o644)
    command = [str(program)]
    if kind == "arguments":
        command = ["echo", "x" * 200_000]
    elif kind == "nul":
        command = ["echo", "a\0b"]
    async with opened(tmp_path / "state") as runner:
        await runner.start(work_of("r", command, max_retries=3))
        report = await finished(runner, "r")
    assert [a.reason for a in report.attempts] == ["config"]
    assert report.error is not None
    assert report.error.message.startswith("cannot start: ")


async def test_killed_agent_counts_as_the_agents_failure(tmp_path: Path) -> None:
    async with opened(tmp_path) as runner:
        await runner.start(shell("r", "kill -9 $$", max_retries=1))
        report = await finished(runner, "r")
    assert [(a.reason, a.exit_code) for a in report.attempts] == [("agent", 137)] * 2


async def test_agent_whose_whole_group_is_killed_counts_as_well(tmp_path: Path) -> None:
    async with opened(tmp_path) as runner:
        await runner.start(shell("r", "kill -9 0"))
        report = await finished(runner, "r")
    assert [(a.reason, a.exit_code) for a in report.attempts] == [("agent", 137)]


@pytest.mark.parametrize("code", [0, 1])
async def test_grandchildren_end_with_the_attempt(tmp_path: Path, code: int) -> None:
    async with opened(tmp_path) as runner:
        script = f"trap '' TERM; sleep 60 & echo $! >child; exit {code}"
        await runner.start(shell("r", script))
        await finished(runner, "r")
        child = int((work_dir(tmp_path) / "child").read_text())
        await until(lambda: not is_alive(child))


async def test_grandchildren_end_with_a_cancelled_attempt(tmp_path: Path) -> None:
    async with opened(tmp_path) as runner:
        await runner.start(shell("r", "(trap '' TERM; sleep 60) & echo $! >child; sleep 60"))
        await until(lambda: any(tmp_path.glob("rollouts/*/*/work/child")))
        await until(lambda: (work_dir(tmp_path) / "child").read_text().endswith("\n"))
        child = int((work_dir(tmp_path) / "child").read_text())
        await runner.stop("r", "cancelled")
        assert (await finished(runner, "r")).outcome == "cancelled"
        await until(lambda: not is_alive(child))


async def test_log_tail_is_bounded_and_shows_no_token(tmp_path: Path) -> None:
    script = 'head -c 5000 /dev/zero | tr "\\0" x; printf "ä\\377 %s" "$OPENAI_API_KEY"; exit 1'
    async with opened(tmp_path, log_tail_bytes=100) as runner:
        await runner.start(shell("r", script))
        report = await finished(runner, "r")
    (draft,) = report.evidence[report.attempts[0].attempt_id]
    assert draft.data["stream"] == "output"
    assert draft.data["truncated"] is True
    assert draft.data["text"].endswith("xä\ufffd [token]")
    assert len(draft.data["text"].encode()) <= 100


async def test_state_is_private_and_released_without_a_trace(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with opened(state) as runner:
        await runner.start(shell("r", "exit 1"))
        await finished(runner, "r")
        (directory,) = (state / "rollouts").iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700
        assert (directory / "token").stat().st_mode & 0o777 == 0o600
        assert TOKEN not in (directory / "work.json").read_text()
        assert TOKEN not in (directory / "state.json").read_text()
        await runner.release("r")
        assert list((state / "rollouts").iterdir()) == []


async def test_kept_files_have_the_output_and_no_token(tmp_path: Path) -> None:
    async with opened(tmp_path, keep=True) as runner:
        await runner.start(shell("r", "echo hello; exit 1"))
        await finished(runner, "r")
        await runner.release("r")
        assert list((tmp_path / "rollouts").iterdir()) == []
        (output,) = (tmp_path / "kept").glob("r-*/*/output")
        assert output.read_text() == "hello\n"
        assert not list((tmp_path / "kept").glob("*/token"))


async def test_release_of_what_runs_ends_it_first(tmp_path: Path) -> None:
    async with opened(tmp_path) as runner:
        await runner.start(shell("r", "sleep 60"))
        await report_when(runner, "r", is_running)
        await runner.release("r")
        await until(lambda: not list((tmp_path / "rollouts").iterdir()))
        assert await runner.list() == []


async def test_retry_gets_the_renewed_token(tmp_path: Path) -> None:
    script = 'echo "$OPENAI_API_KEY" >>"$LOG"; test -e "$LOG.go" || { : >"$LOG.1"; sleep 60; }'
    log, go = tmp_path / "log", tmp_path / "log.go"
    work = shell("r", script, max_retries=1, env={"LOG": str(log)})
    async with opened(tmp_path / "state") as runner:
        await runner.start(work)
        await until((tmp_path / "log.1").exists)
        go.touch()
        await runner.start(Work(rollout=work.rollout, agent_url=work.agent_url, token="second"))
        await runner.stop("r", "timeout")
        assert (await finished(runner, "r")).outcome == "succeeded"
    assert log.read_text().splitlines() == [TOKEN, "second"]


async def test_second_runner_on_one_state_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agl_local.runner.TAKE_OVER_SECONDS", 0.1)
    async with opened(tmp_path):
        with pytest.raises(ConfigError, match="another controller"):
            async with runner_at(tmp_path):
                pass
    async with opened(tmp_path):
        pass


async def test_damaged_files_do_not_stop_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path) as runner:
        for rollout_id in ("good", "bad"):
            await runner.start(shell(rollout_id, "exit 0"))
            await finished(runner, rollout_id)
    (broken,) = (tmp_path / "rollouts").glob("bad-*")
    (broken / "state.json").write_bytes(b"")
    async with opened(tmp_path) as runner:
        assert [r.rollout_id for r in await runner.list()] == ["good"]
    assert "damaged" in caplog.text


RUNNER_PROGRAM = """
import asyncio, json, sys
from agl_core.clock import SystemClock
from agl_core.interfaces import Work
from agl_core.records import Rollout, RolloutConfig
from agl_local import LocalConfig
from agl_local.runner import LocalRunner

async def main():
    state, works = sys.argv[1], json.loads(sys.argv[2])
    config = LocalConfig(state_dir=state, retry_seconds=0.01, max_active=20)
    async with LocalRunner(config, SystemClock()) as runner:
        for rollout_id, script, retries in works:
            rollout = Rollout(rollout_id=rollout_id, config=RolloutConfig(
                command=("sh", "-c", script), max_retries=retries))
            await runner.start(Work(rollout=rollout, agent_url="http://127.0.0.1:9", token="t"))
        print("started", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def runner_process(state: Path, works: list[tuple[str, str, int]]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RUNNER_PROGRAM, str(state), json.dumps(works)],
        stdout=subprocess.PIPE,
        text=True,
    )


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


async def test_c65_killed_runner_leaves_its_attempts_to_the_next(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    works = [
        ("ends-away", f": >{marks}/1; while test ! -e {marks}/go; do sleep 0.02; done", 0),
        ("fails-away", f": >{marks}/2; while test ! -e {marks}/go; do sleep 0.02; done; exit 5", 0),
        ("runs-on", f": >{marks}/3; while test ! -e {marks}/late; do sleep 0.02; done", 0),
        ("is-killed", f"echo $$ >{marks}/4; test -e {marks}/go || sleep 60", 0),
    ]
    state = tmp_path / "state"
    process = runner_process(state, works)
    try:
        await until(lambda: len(list(marks.iterdir())) == 4)
        await until(lambda: (marks / "4").read_text().endswith("\n"))
        before = {
            path.parent.parent.name: path.parent.name for path in state.glob("rollouts/*/*/process")
        }
    finally:
        kill(process)
    (marks / "go").touch()
    # The whole group is gone with its exit code unwritten: nobody knows how it ended.
    os.killpg(os.getpgid(int((marks / "4").read_text())), signal.SIGKILL)
    await until(lambda: len(list(state.glob("rollouts/*/*/exit"))) == 2)
    async with opened(state, max_active=20) as runner:
        ended = await finished(runner, "ends-away")
        assert (ended.outcome, ended.attempts[0].exit_code) == ("succeeded", 0)
        failed = await finished(runner, "fails-away")
        assert (failed.outcome, failed.attempts[0].exit_code) == ("failed", 5)
        killed = await finished(runner, "is-killed")
        assert [(a.phase, a.reason, a.exit_code) for a in killed.attempts] == [
            ("failed", "infra", None),
            ("succeeded", None, 0),
        ]
        runs = await report_when(runner, "runs-on", is_running)
        for report in (ended, failed, runs):
            (name,) = (n for n in before if n.startswith(report.rollout_id))
            assert [a.attempt_id for a in report.attempts] == [before[name]]
        (marks / "late").touch()
        assert (await finished(runner, "runs-on")).outcome == "succeeded"


async def test_what_an_attempt_left_behind_is_killed_before_its_retry(tmp_path: Path) -> None:
    leader = tmp_path / "leader"
    script = (
        f"test -e {tmp_path}/second && exit 0; : >{tmp_path}/second; "
        f"echo $PPID $$ >{leader}; exec sleep 60"
    )
    state = tmp_path / "state"
    process = runner_process(state, [("r", script, 0)])
    try:
        await until(lambda: leader.exists() and leader.read_text().endswith("\n"))
    finally:
        kill(process)
    shell_pid, agent_pid = map(int, leader.read_text().split())
    os.kill(shell_pid, signal.SIGKILL)
    await until(lambda: not is_alive(shell_pid))
    assert is_alive(agent_pid)
    async with opened(state) as runner:
        report = await finished(runner, "r")
        assert not is_alive(agent_pid)
    assert [a.reason for a in report.attempts] == ["infra", None]


async def test_runner_killed_in_the_middle_of_starting_runs_nothing_twice(tmp_path: Path) -> None:
    state, journal = tmp_path / "state", tmp_path / "journal"
    count = 12
    line = f'echo "$AGL_ROLLOUT_ID" >>{journal}'
    works = [
        (f"r{n:02}", f"{line}; while test ! -e {tmp_path}/go; do sleep 0.02; done", 0)
        for n in range(count)
    ]
    for expected in (1, 4, 8):
        process = runner_process(state, works)
        try:
            await until(lambda n=expected: len(list(state.glob("rollouts/*/*/lock"))) >= n)
        finally:
            kill(process)
    process = runner_process(state, works)
    try:
        assert process.stdout is not None
        await asyncio.to_thread(process.stdout.readline)
    finally:
        kill(process)
    (tmp_path / "go").touch()
    async with opened(state, max_active=20) as runner:
        for rollout_id, _, _ in works:
            report = await finished(runner, rollout_id)
            assert report.outcome == "succeeded"
            assert len(report.attempts) == 1
    assert sorted(journal.read_text().split()) == [w[0] for w in works]


async def test_controller_stopped_in_the_grace_still_ends_the_attempt(tmp_path: Path) -> None:
    deaf = "trap '' TERM; : >started; sleep 60 & wait; sleep 60"
    async with runner_at(tmp_path, grace_seconds=60) as runner:
        await runner.start(shell("r", deaf))
        await until(lambda: any(tmp_path.glob("rollouts/*/*/work/started")))
        await runner.stop("r", "cancelled")
    async with opened(tmp_path) as runner:
        assert (await finished(runner, "r")).outcome == "cancelled"


def test_plugin_provides_the_runner() -> None:
    runner = LocalPlugin(LocalConfig(max_active=3)).provide_runner(CLOCK)
    assert isinstance(runner, LocalRunner)
    assert runner.max_active == 3


@pytest.mark.parametrize("cut", [1, 20, len(TOKEN) - 1])
async def test_tail_that_begins_inside_a_token_shows_nothing_of_it(
    tmp_path: Path, cut: int
) -> None:
    script = "printf '%s' \"before $OPENAI_API_KEY after\"; exit 1"
    size = len(TOKEN) - cut + len(" after")
    async with opened(tmp_path, log_tail_bytes=size) as runner:
        await runner.start(shell("r-1", script))
        report = await finished(runner, "r-1")
    (event,) = report.evidence[report.attempts[0].attempt_id]
    assert (event.data["text"], event.data["truncated"]) == ("[token] after", True)
