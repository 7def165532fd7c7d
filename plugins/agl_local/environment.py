"""What an agent is started with: its variables and its command."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from agl_core.errors import Invalid
from agl_core.records import MAX_ENV_INPUT_BYTES, Rollout
from agl_core.wire import to_json


class CannotStart(Exception):
    """The command can never run as it is asked for."""


def build_environment(
    rollout: Rollout,
    attempt_id: str,
    *,
    agent_url: str,
    token: str,
    allowed: Iterable[str],
    input_file: Path,
) -> dict[str, str]:
    """The agent's whole environment: of ours only what is allowed, lest keys of ours leak."""
    base = f"{agent_url}/rollout/{quote(rollout.rollout_id, safe='')}/attempt/{attempt_id}"
    environment = {name: os.environ[name] for name in allowed if name in os.environ}
    environment.update(rollout.config.env)
    environment.update(
        OPENAI_BASE_URL=f"{base}/v1",
        OPENAI_API_KEY=token,
        ANTHROPIC_BASE_URL=base,
        ANTHROPIC_API_KEY=token,
        AGL_EVENT_URL=f"{base}/events",
        AGL_ROLLOUT_ID=rollout.rollout_id,
        AGL_ATTEMPT_ID=attempt_id,
    )
    delivery = rollout.config.input_delivery
    if delivery == "env":
        environment["AGL_TASK_INPUT"] = to_json(rollout.input).decode()
    elif delivery == "url":
        environment["AGL_TASK_INPUT_URL"] = f"{base}/input"
    else:
        environment["AGL_TASK_INPUT_FILE"] = str(input_file)
    return environment


def check_work(rollout: Rollout, default_command: Sequence[str] | None) -> None:
    """Refuse what can be seen to be wrong before anything is started.

    Raises:
        Invalid: There is no command, or an input too large for a variable.
    """
    if not (rollout.config.command or default_command):
        raise Invalid(
            f"rollout {rollout.rollout_id!r} has no command",
            hint="set config.command of the rollout, or 'command' in [plugins.local]",
        )
    if rollout.config.input_delivery == "env" and len(to_json(rollout.input)) > MAX_ENV_INPUT_BYTES:
        raise Invalid(
            f"the input of rollout {rollout.rollout_id!r} is larger than {MAX_ENV_INPUT_BYTES} "
            "bytes",
            hint='set config.input_delivery to "url" or "file"',
        )


def resolve_command(command: Sequence[str], environment: Mapping[str, str], cwd: Path) -> list[str]:
    """The command with the full path of its program, found as ``execvp`` would in the agent.

    The shell that keeps the exit code would turn a missing program into code 127, which an agent
    may also end with; so it is looked for first.

    Raises:
        CannotStart: There is no such program, or it may not be run.
    """
    program = command[0]
    if "/" in program:
        path = cwd / program
    else:
        found = shutil.which(program, path=environment.get("PATH", os.defpath))
        if found is None:
            raise CannotStart(f"{program!r} is not in the agent's PATH")
        path = Path(found)
    if not path.exists():
        raise CannotStart(f"{program!r} does not exist")
    if path.is_dir() or not os.access(path, os.X_OK):
        raise CannotStart(f"{program!r} may not be executed")
    _check_interpreter(path, program)
    return [str(path), *command[1:]]


def _check_interpreter(path: Path, program: str) -> None:
    """A script whose interpreter is gone (a moved virtual environment, say) cannot start either."""
    try:
        with path.open("rb") as file:
            first = file.readline(512)
    except OSError:
        return  # may be run but not read
    if not first.startswith(b"#!"):
        return
    words = os.fsdecode(first[2:]).split()
    if words and not Path(words[0]).exists():
        raise CannotStart(f"{program!r} needs {words[0]!r}, which does not exist")
