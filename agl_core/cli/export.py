"""``agl export``: rollouts in a trainer's format, to a file or to standard output."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from agl_core.cli.options import make_client, service_options

# What the client takes beside a format's own parameters.
_OURS = frozenset({"format", "ids", "group_id", "policy", "mode", "self"})


def _parameters(
    _context: click.Context, _option: click.Parameter, given: Sequence[str]
) -> dict[str, str]:
    parameters: dict[str, str] = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"{pair!r} is not NAME=VALUE")
        if name in _OURS:
            raise click.BadParameter(f"{name!r} is none of a format's parameters")
        if name in parameters:
            raise click.BadParameter(f"{name!r} is given twice")
        parameters[name] = value
    return parameters


@click.command()
@click.argument("format_name", metavar="FORMAT")
@click.option("--id", "ids", multiple=True, help="This rollout; may be given more than once.")
@click.option("--group", "group_id", help="The rollouts of one group.")
@click.option("--policy", help="Only the calls of one policy.")
@click.option(
    "--mode", type=click.Choice(["train", "val", "all"]), default="train", show_default=True
)
@click.option(
    "--option",
    "parameters",
    metavar="NAME=VALUE",
    multiple=True,
    callback=_parameters,
    help="A parameter of the format, such as max_length=4096; may be given more than once.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write there; a partial file never takes the name.  [default: standard output]",
)
@service_options
def export(
    format_name: str,
    ids: tuple[str, ...],
    group_id: str | None,
    policy: str | None,
    mode: Any,
    parameters: dict[str, str],
    output: Path | None,
    url: str | None,
    key: str | None,
) -> None:
    """Write ended rollouts in FORMAT (triplet, trajectory, or a plugin's)."""
    with make_client(url, key) as client:
        pieces = client.export_bytes(
            format_name,
            ids=list(ids) or None,
            group_id=group_id,
            policy=policy,
            mode=mode,
            **parameters,
        )
        if output is None:
            stream = sys.stdout.buffer
            for piece in pieces:
                stream.write(piece)
            stream.flush()
            return
        partial = output.with_name(f".{output.name}.partial")
        try:
            with partial.open("wb") as file:
                for piece in pieces:
                    file.write(piece)
            partial.replace(output)
        except OSError as exc:
            raise click.FileError(str(output), hint=exc.strerror) from exc
        finally:
            partial.unlink(missing_ok=True)
