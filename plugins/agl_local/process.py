"""Attempts as process groups that outlive the controller.

A small shell around each agent writes down who it is (its line of ``/proc``) before the agent
starts, and the agent's exit code after it has ended. It holds a lock on a file of the attempt as
long as it lives: a new controller tells from the files alone what runs, what has ended and what
never began, also when the old one was killed in the middle of a launch.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from agl_core.clock import Clock, poll
from agl_local.state import OUTPUT

ADOPT_SECONDS = 5.0
GONE_SECONDS = 1.0

# The shell's own stdin is the lock, so that the agent, which reads /dev/null, does not hold it.
# It catches the signals that end a group, because the exit code is yet to be written; a caught
# signal is back at its default in the agent. Only builtins: the agent's PATH may have nothing.
_SHELL = (
    "trap : HUP INT TERM; "
    'read -r line </proc/$$/stat && printf "%s\\n" "$line" >"$0/process" || exit 125; '
    '"$@" </dev/null; s=$?; echo $s >"$0/exit"; exit $s'
)


class Process:
    """A process group that is ours, started by this controller or by one before it."""

    def __init__(self, pid: int, pidfd: int, directory: Path) -> None:
        self._pid = pid
        self._pidfd: int | None = pidfd
        self._directory = directory
        self.is_ended = False

    def watch(self, on_end: Callable[[], None]) -> None:
        """Call ``on_end`` in the running loop when the leader of the group has ended."""
        assert self._pidfd is not None
        loop = asyncio.get_running_loop()
        pidfd = self._pidfd

        def ended() -> None:
            loop.remove_reader(pidfd)
            self.is_ended = True
            on_end()

        loop.add_reader(pidfd, ended)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole group; one that is gone is no error."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, number)

    async def finish(self, clock: Clock) -> int | None:
        """Kill what is left of an ended group; returns the agent's exit code where it is known.

        It returns when nothing of the group is left, so that a retry never meets the attempt
        before it. Whatever cannot die (a hanging disk) is waited for a second only.
        """
        code = self._reap()
        await poll(self._is_gone, clock, seconds=GONE_SECONDS)
        return code

    def _reap(self) -> int | None:
        # A child keeps its number as a zombie until it is waited for, so the group is killed first.
        assert self._pidfd is not None
        self.signal(signal.SIGKILL)
        waited: int | None = None
        with suppress(ChildProcessError):  # adopted: somebody else's child
            result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
            if result is not None:
                by_exit = result.si_code == os.CLD_EXITED
                waited = result.si_status if by_exit else 128 + result.si_status
        self._close()
        written = read_exit_code(self._directory)
        return waited if written is None else written

    def _is_gone(self) -> bool:
        with suppress(ChildProcessError):
            # Orphans are ours to bury where this is the first process of a container.
            os.waitid(os.P_PGID, self._pid, os.WEXITED | os.WNOHANG)
        try:
            os.killpg(self._pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False

    def leave(self) -> None:
        """Stop watching a group that goes on without this controller."""
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            self._close()

    def _close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def launch(
    directory: Path, command: Sequence[str], *, environment: Mapping[str, str], cwd: Path
) -> Process:
    """Start an attempt in a session of its own. Blocks: call it in a thread.

    Raises:
        OSError: It cannot be started.
        ValueError: A zero byte in an argument or variable.
    """
    with _open_lock(directory) as lock, (directory / OUTPUT).open("ab") as output:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        child = subprocess.Popen(
            ["/bin/sh", "-c", _SHELL, str(directory), *command],
            stdin=lock,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=dict(environment),
            start_new_session=True,
        )
    try:
        pidfd = os.pidfd_open(child.pid)
    except OSError:  # too many open files: what cannot be watched must not run
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise
    # It is waited for through the pidfd, as adopted ones are; Popen must not do it as well.
    child.returncode = 0
    return Process(child.pid, pidfd, directory)


async def adopt(directory: Path, clock: Clock) -> Process | None:
    """The group of an attempt that was launched by an earlier controller; None: it is dead."""
    if not is_locked(directory):
        return None
    # The lock is taken before the shell writes its line: that is a matter of milliseconds.
    await poll(
        lambda: _read_identity(directory) is not None or not is_locked(directory),
        clock,
        seconds=ADOPT_SECONDS,
    )
    identity = _read_identity(directory)
    if identity is None:
        return None
    pid, started = identity
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    stat = _read_stat(pid)
    if stat is None or stat[1] != started:
        os.close(pidfd)
        return None
    return Process(pid, pidfd, directory)


def has_begun(directory: Path) -> bool:
    """Whether the agent of an attempt ever started."""
    return _read_identity(directory) is not None


def read_exit_code(directory: Path) -> int | None:
    """The exit code that an attempt left behind."""
    try:
        text = (directory / "exit").read_text()
    except FileNotFoundError:
        return None
    return int(text) if text.endswith("\n") else None


def kill_survivors(directory: Path, marker: str) -> None:
    """Kill what an attempt left behind when it ended unseen, and wait for its death.

    Its number may have been given to others since, so its session counts only together with
    ``marker`` in the environment (``NAME=value``). Blocks: call it in a thread.
    """
    identity = _read_identity(directory)
    if identity is None:
        return
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        stat = _read_stat(pid)
        if stat is None or stat[0] != identity[0]:
            continue
        with suppress(OSError):
            if marker.encode() in (entry / "environ").read_bytes().split(b"\0"):
                _kill_and_wait(pid)


def _kill_and_wait(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        waiter = select.poll()
        waiter.register(pidfd, select.POLLIN)
        waiter.poll(ADOPT_SECONDS * 1000)
    finally:
        os.close(pidfd)


def _open_lock(directory: Path) -> IO[bytes]:
    return (directory / "lock").open("ab+")


def is_locked(directory: Path) -> bool:
    if not (directory / "lock").exists():
        return False
    with _open_lock(directory) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def _read_identity(directory: Path) -> tuple[int, int] | None:
    """Process id and start time, as the attempt's shell wrote them."""
    try:
        line = (directory / "process").read_text()
    except FileNotFoundError:
        return None
    if not line.endswith("\n"):
        return None
    return int(line.split(" ", 1)[0]), _parse_stat(line)[1]


def _read_stat(pid: int) -> tuple[int, int] | None:
    """Session and start time of a living process."""
    try:
        return _parse_stat(Path(f"/proc/{pid}/stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None


def _parse_stat(line: str) -> tuple[int, int]:
    # The second field is the name in brackets, with any character in it; proc(5) counts from 1:
    # field 6 is the session, field 22 the start time in ticks since boot.
    fields = line[line.rindex(")") + 2 :].split()
    return int(fields[3]), int(fields[19])
