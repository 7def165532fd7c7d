"""The command ``agl``: commands load one module each, so that ``--help`` is quick and never fails.

Core commands are listed here; plugins add theirs through the entry point group ``agl.commands``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from typing import Any

import click

from agl_core import __version__
from agl_core.errors import AglError, ConfigError, PluginLoadError

COMMAND_GROUP = "agl.commands"
_CORE = {
    "config": ("agl_core.cli.config", "Write, check and show the configuration."),
    "controller": ("agl_core.cli.serve", "Run the controller: start agents for queued rollouts."),
    "doctor": ("agl_core.cli.doctor", "Look whether rollouts could run, before the first one."),
    "events": ("agl_core.cli.rollouts", "Show a rollout's events."),
    "export": ("agl_core.cli.export", "Write rollouts in a trainer's format."),
    "logs": ("agl_core.cli.logs", "Show what a rollout's agent prints."),
    "models": ("agl_core.cli.models", "List, add and remove model servers."),
    "plugins": ("agl_core.cli.config", "List the installed plugins."),
    "rollouts": ("agl_core.cli.rollouts", "List, show and cancel rollouts."),
    "serve": ("agl_core.cli.serve", "Run the service: gateway, store and API."),
}


class Commands(click.Group):
    """Lists commands by name and loads a module when its command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*_CORE, *(entry.name for entry in _entry_points())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        core = _CORE.get(cmd_name)
        if core is not None:
            found: Any = getattr(importlib.import_module(core[0]), cmd_name)
            return found if isinstance(found, click.Command) else None
        for entry in _entry_points():
            if entry.name == cmd_name:
                return _load(entry)
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the core's commands by their one line, and plugins' by where they come from."""
        rows = [(name, text) for name, (_, text) in _CORE.items()]
        rows += [(entry.name, f"From {_package_of(entry)}.") for entry in _entry_points()]
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows))


def _load(entry: importlib.metadata.EntryPoint) -> click.Command:
    origin = f"the command {entry.name!r} of {entry.value}"
    try:
        loaded = entry.load()
    except Exception as exc:
        raise PluginLoadError(f"{origin} cannot be imported: {type(exc).__name__}: {exc}") from exc
    if not isinstance(loaded, click.Command):
        raise PluginLoadError(f"{origin} is no click command")
    return loaded


def _package_of(entry: importlib.metadata.EntryPoint) -> str:
    return entry.value.partition(":")[0].partition(".")[0]


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    return list(importlib.metadata.entry_points(group=COMMAND_GROUP))


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="agl")
def agl() -> None:
    """Capture, store and run LLM agents for reinforcement learning."""


def main() -> None:
    """Run ``agl``; errors of ours are told in a line or two, and the status is 1.

    It is 1 also, without a word, where whoever read our output has gone: click sees to that.
    """
    try:
        status = agl.main(standalone_mode=False, prog_name="agl")
        if isinstance(status, int):  # click returns what ctx.exit() and Exit were given
            sys.exit(status)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as exc:
        exc.show()
        sys.exit(exc.exit_code)
    except AglError as exc:
        tell(exc)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def tell(error: AglError) -> None:
    """Print an error and its way out."""
    problems = error.problems if isinstance(error, ConfigError) else [error.message]
    for problem in problems:
        click.echo(f"error: {problem}", err=True)
    if error.hint:
        click.echo(f"hint: {error.hint}", err=True)
