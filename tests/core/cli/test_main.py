"""``agl`` itself: help that cannot fail, errors in a line, and statuses that mean something."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agl_core

HEAVY = ("quart", "numpy", "hypercorn", "httpx", "openai", "cattrs", "sqlalchemy", "agl_memory")
COMMANDS = [
    "config",
    "controller",
    "demo",
    "doctor",
    "events",
    "export",
    "logs",
    "models",
    "plugins",
    "rollouts",
]


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []])
def test_help_lists_every_command(agl: Any, arguments: list[str]) -> None:
    ran = agl(*arguments)
    for name in [*COMMANDS, "serve"]:
        assert f"\n  {name} " in ran.out + ran.err


def test_help_works_beside_a_broken_file_and_imports_nothing_heavy() -> None:
    Path("agl.toml").write_text("= broken", encoding="utf-8")
    program = (
        "import sys\n"
        "sys.argv = ['agl', '--help']\n"
        "from agl_core.cli import main\n"
        "try:\n    main()\n"
        "finally:\n"
        f"    print('imported:', [name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    assert "serve" in done.stdout
    assert "imported: []" in done.stdout


@pytest.mark.parametrize(
    "command",
    [
        *COMMANDS,
        "serve",
        "config init",
        "config check",
        "config show",
        "models add",
        "rollouts list",
    ],
)
def test_every_command_has_help_beside_a_broken_file(agl: Any, command: str) -> None:
    Path("agl.toml").write_text("= broken", encoding="utf-8")
    ran = agl(*command.split(), "--help")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith(f"Usage: agl {command}")


def test_the_version_is_told(agl: Any) -> None:
    ran = agl("--version")
    assert ran.status == 0
    assert agl_core.__version__ in ran.out


def test_an_unknown_command_is_a_usage_error(agl: Any) -> None:
    ran = agl("serv")
    assert ran.status == 2
    assert "No such command 'serv'" in ran.err


def test_an_error_goes_to_standard_error_without_a_traceback(agl_process: Any) -> None:
    ran = agl_process("rollouts", "list", "--url", "http://127.0.0.1:1")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith("error: nothing answers at http://127.0.0.1:1")
    assert "hint: " in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rollouts", "list", "--url", "ftp://x"], "is no http or https URL"),
        (["rollouts", "list", "--key", "k\u00e9y"], "no HTTP header may hold"),
        (["config", "check", "--config", "nowhere.toml"], "nowhere.toml: cannot be read"),
        (["serve", "--config", "nowhere.toml"], "nowhere.toml: cannot be read"),
        (["controller", "--config", "nowhere.toml"], "nowhere.toml: cannot be read"),
        (["plugins", "--config", "nowhere.toml"], "nowhere.toml: cannot be read"),
        (["config", "show", "--config", "nowhere.toml"], "nowhere.toml: cannot be read"),
    ],
)
def test_bad_arguments_are_told_with_status_1(agl: Any, arguments: list[str], said: str) -> None:
    ran = agl(*arguments)
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith("error: ")
    assert said in ran.err


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "agl_core.cli", "config", "show"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(30) != 0
    assert "Traceback" not in errors


# --- commands of plugins -------------------------------------------------------------------------

COMMAND = """
import click

@click.command()
def greet():
    \"\"\"Greet.\"\"\"
    click.echo("hello")

@click.command()
def refuse():
    from agl_core.errors import AglError
    raise AglError("not today", hint="tomorrow")
"""


def test_a_plugin_adds_commands(agl: Any, install: Any) -> None:
    install(
        "toy-commands",
        COMMAND,
        group="agl.commands",
        plugins={"greet": "toy_commands:greet", "refuse": "toy_commands:refuse"},
    )
    assert "From toy_commands." in agl("--help").out
    assert agl("greet").out == "hello\n"
    refused = agl("refuse")
    assert (refused.status, refused.err) == (1, "error: not today\nhint: tomorrow\n")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import nowhere_to_be_found", "cannot be imported: ModuleNotFoundError"),
        ("1 / 0", "cannot be imported: ZeroDivisionError"),
        ("", "cannot be imported: AttributeError"),
        ("greet = 5", "is no click command"),
    ],
)
def test_a_broken_command_of_a_plugin_breaks_itself_alone(
    agl: Any, install: Any, source: str, said: str
) -> None:
    install("toy-commands", source, group="agl.commands", plugins={"greet": "toy_commands:greet"})
    assert agl("--help").status == 0
    assert agl("config", "check").status == 0
    ran = agl("greet")
    assert ran.status == 1
    assert f"error: the command 'greet' of toy_commands:greet {said}" in ran.err
