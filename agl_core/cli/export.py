"""``agl export``: rollouts in a trainer's format, to a file or to standard output."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from agl_core.cli.options import make_client, service_options


@click.command()
@click.argument("format_name", metavar="FORMAT")
@click.option("--id", "ids", multiple=True, help="This rollout; may be given more than once.")
@click.option("--group", "group_id", help="The rollouts of one group.")
@click.option("--policy", help="Only the calls of one policy.")
@click.option(
    "--mode", type=click.Choice(["train", "val", "all"]), default="train", show_default=True
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
    output: Path | None,
    url: str | None,
    key: str | None,
) -> None:
    """Write ended rollouts in FORMAT (triplet, trajectory, or a plugin's)."""
    with make_client(url, key) as client:
        pieces = client.export_bytes(
            format_name, ids=list(ids) or None, group_id=group_id, policy=policy, mode=mode
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
