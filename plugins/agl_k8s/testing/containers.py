"""Containers of the fake cluster: a process on this machine, or a script."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from attrs import frozen

from agl_core.clock import Clock
from agl_k8s.testing.scripts import SIGKILL_CODE, Script
from agl_k8s.testing.survivors import kill_survivors

LAST_BYTES = 2048
LAST_LINES = 80
START_ERROR_CODE = 128


@frozen
class Exit:
    """How a container ended."""

    code: int
    reason: str
    message: str = ""
    has_run: bool = True


class Container(Protocol):
    """One that runs, or could not be started."""

    async def wait(self) -> Exit:
        """Wait for its end; may be called again."""
        ...

    def terminate(self) -> None:
        """SIGTERM to its first process."""
        ...

    def kill(self) -> None:
        """SIGKILL to all of it."""
        ...

    def read_log(self) -> bytes:
        """All that it has written."""
        ...


class ProcessContainer:
    """A process of this machine, in a session of its own.

    As in a container, SIGTERM reaches the first process only, and what that one leaves behind when
    it ends is killed. Unlike there, a first process that does not care for SIGTERM dies of it: it
    is no process 1 of a name space.
    """

    def __init__(self, process: asyncio.subprocess.Process, log: Path, home: Path) -> None:
        self._process = process
        self._log = log
        self._home = home
        self._is_over = False

    async def wait(self) -> Exit:
        code = await self._process.wait()
        self.kill()
        if not self._is_over:
            kill_survivors(self._log, self._home)
        self._is_over = True  # from now on its number may be that of others
        code = code if code >= 0 else 128 - code
        return Exit(code, "Error" if code else "Completed")

    def terminate(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        if self._is_over:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nothing is left of it

    def read_log(self) -> bytes:
        try:
            return self._log.read_bytes()
        except FileNotFoundError:
            return b""  # the pod is gone, and somebody still follows it


class ScriptedContainer:
    """Does what a script says."""

    def __init__(self, script: Script, clock: Clock) -> None:
        self._script = script
        self._end: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._timer: asyncio.Task[None] | None = None
        if script.after_seconds is not None:
            self._timer = asyncio.ensure_future(self._run(clock, script.after_seconds))

    async def wait(self) -> Exit:
        try:
            return await asyncio.shield(self._end)
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def terminate(self) -> None:
        code = self._script.code_on_term
        if code is not None:
            self._set(Exit(code, "Error" if code else "Completed"))

    def kill(self) -> None:
        self._set(Exit(SIGKILL_CODE, "Error"))

    def read_log(self) -> bytes:
        return self._script.log

    async def _run(self, clock: Clock, seconds: float) -> None:
        await clock.sleep(seconds)
        script = self._script
        reason = script.reason or ("Error" if script.exit_code else "Completed")
        self._set(Exit(script.exit_code, reason))

    def _set(self, end: Exit) -> None:
        if not self._end.done():
            self._end.set_result(end)


class UnstartedContainer:
    """One whose command could not be run."""

    def __init__(self, end: Exit, log: bytes = b"") -> None:
        self._end = end
        self._text = log

    async def wait(self) -> Exit:
        return self._end

    def terminate(self) -> None:
        """Nothing runs."""

    def kill(self) -> None:
        """Nothing runs."""

    def read_log(self) -> bytes:
        return self._text


async def start_process(
    command: Sequence[str], variables: Mapping[str, str], *, folder: Path, home: Path, log: Path
) -> Container:
    """Run a command; where that fails, the container has ended as containerd would end it.

    Args:
        command: Program and arguments.
        variables: All that it has.
        folder: Where it starts.
        home: The folder that no other container has as its home.
        log: The file that it writes to.
    """
    with log.open("wb") as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(variables),
                cwd=folder,
                start_new_session=True,
            )
        except OSError as exc:
            if exc.errno == errno.E2BIG:
                text = f"exec {command[0]}: argument list too long\n".encode()
                return UnstartedContainer(Exit(1, "Error"), text)
            why = "executable file not found in $PATH"
            if exc.errno != errno.ENOENT or "/" in command[0]:
                why = (os.strerror(exc.errno) if exc.errno else str(exc)).lower()
            message = (
                "failed to create containerd task: failed to create shim task: OCI runtime create "
                "failed: runc create failed: unable to start container process: error during "
                f'container init: exec: "{command[0]}": {why}'
            )
            return UnstartedContainer(Exit(START_ERROR_CODE, "StartError", message, has_run=False))
    return ProcessContainer(process, log, home)


def last_words(text: bytes) -> str:
    """The end of a log that a container's status keeps."""
    lines = text[-LAST_BYTES:].splitlines(keepends=True)[-LAST_LINES:]
    return b"".join(lines).decode(errors="ignore")
