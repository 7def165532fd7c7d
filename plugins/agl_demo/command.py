"""The command ``agl demo``."""

from __future__ import annotations

import importlib.util
import json

import click

from agl_core.errors import AglError

_NEEDED = ("numpy", "openai")


class ExtraMissing(AglError):
    """Packages that the demo needs are not installed."""

    default_code = "extra_missing"


def _check_extra() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ExtraMissing(
            f"the demo needs {' and '.join(missing)}",
            hint="run `uv run --extra demo agl demo`, or install with "
            "`pip install 'agl-lite[demo]'` (in a checkout `pip install '.[demo]'`)",
        )


@click.command()
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port of the service.  [default: any that is free]",
)
@click.option(
    "--max-active",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Agents at once; the result does not depend on it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def demo(seed: int, port: int, max_active: int, as_json: bool) -> None:
    """Train a tiny policy through the service, every part real, in a minute or two.

    Starts the service with its controller and a model server, runs agents that bring a robot to
    its charger, and learns from the captured calls. Nothing is left running. The exit status is 1
    when the policy did not learn.
    """
    _check_extra()
    from agl_demo.report import plot, table
    from agl_demo.run import Options, run_demo

    steps, result = run_demo(
        Options(seed=seed, port=port, max_active=max_active),
        lambda line: click.echo(line, err=as_json),
    )
    if as_json:
        click.echo(json.dumps(result))
    else:
        click.echo(f"\n{table(steps)}\n\n{plot(steps)}\n")
        click.echo(
            f"reward {result['reward_first']:.3f} -> {result['reward_last']:.3f} in "
            f"{result['steps']} steps, {result['rollouts']} rollouts, "
            f"{result['model_requests']} model calls "
            f"({result['tokens_incomplete']} with incomplete tokens), {result['seconds']:.0f} s"
        )
    if not result["learned"]:
        click.echo("the policy did not learn", err=True)
        raise SystemExit(1)
