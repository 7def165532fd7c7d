"""What several commands share: options, output, and a client for the service."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from agl_core.client import AglLiteClient

F = TypeVar("F", bound=Callable[..., Any])


def config_option(command: F) -> F:
    """``--config``: the file to read."""
    return click.option(
        "--config",
        "config_path",
        type=click.Path(dir_okay=False),
        help="Configuration file  [default: $AGL_CONFIG, else agl.toml where it exists]",
    )(command)


def service_options(command: F) -> F:
    """``--url`` and ``--key``: which service to talk to, and as whom."""
    for option in (
        click.option("--key", envvar="AGL_KEY", help="Key of a role  [env: AGL_KEY]"),
        click.option(
            "--url",
            envvar="AGL_URL",
            help="The service  [env: AGL_URL; default: http://127.0.0.1:8080]",
        ),
    ):
        command = option(command)
    return command


def json_option(command: F) -> F:
    """``--json``: print JSON for programs instead of a table for people."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def make_client(url: str | None, key: str | None) -> AglLiteClient:
    """A client of the service that the options name."""
    from agl_core.client import AglLiteClient

    return AglLiteClient(url, key)


def print_json(value: Any) -> None:
    """Print a value, or a record, as one line of JSON."""
    from agl_core.wire import to_json

    click.echo(to_json(value))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows under headings, as wide as they need; nothing at all says so."""
    texts = [[_cell(value) for value in row] for row in rows]
    if not texts:
        click.echo("none")
        return
    widths = [max(len(row[i]) for row in [list(columns), *texts]) for i in range(len(columns))]
    for row in [[column.upper() for column in columns], *texts]:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    # A value from outside must not steer the terminal.
    return "".join(char if char.isprintable() else "?" for char in str(value))


def age(seconds_since_epoch: float | None) -> str:
    """How long ago that was, in one unit."""
    from agl_core.clock import SystemClock

    if seconds_since_epoch is None:
        return "-"
    passed = max(0.0, SystemClock().now() - seconds_since_epoch)
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if passed >= size:
            return f"{passed / size:.0f}{unit}"
    return f"{passed:.0f}s"


def config_path_of(explicit: str | None) -> Path | None:
    """The file that ``--config`` names, else the one found, else None."""
    from agl_core.config import find_file

    return find_file(explicit)


class _IdFormatter(logging.Formatter):
    """Puts the ids that a record carries behind its message."""

    _STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        extras = [
            f"{name}={value}" for name, value in vars(record).items() if name not in self._STANDARD
        ]
        if not extras:
            return text
        first, newline, rest = text.partition("\n")
        return f"{first}  {' '.join(extras)}{newline}{rest}"


def set_up_logging(level: str) -> None:
    """Log to standard error: time, level, module, message, ids."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_IdFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "asyncio", "hypercorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def log_level_option(command: F) -> F:
    """``--log-level``: how much is logged."""
    return click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        show_default=True,
    )(command)
