"""``agl models``: the registry of model servers."""

from __future__ import annotations

from typing import Any

import click

from agl_core.cli.options import (
    json_option,
    make_client,
    print_json,
    print_table,
    service_options,
)


@click.group(invoke_without_command=True)
@click.pass_context
def models(ctx: click.Context) -> None:
    """List, add and remove model servers."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_, url=None, key=None, as_json=False)


@models.command("list")
@service_options
@json_option
def list_(url: str | None, key: str | None, as_json: bool) -> None:
    """List the registered model servers."""
    with make_client(url, key) as client:
        found = client.models()
    if as_json:
        print_json({"items": [_view(view) for view in found]})
        return
    print_table(
        ("model", "endpoint", "policy", "trained", "version", "healthy", "in flight", "aliases"),
        [
            (
                view.server.model,
                view.server.endpoint,
                view.server.policy,
                view.server.trained,
                view.server.version,
                view.healthy,
                view.inflight,
                ", ".join(view.server.aliases) or None,
            )
            for view in found
        ],
    )


def _view(view: Any) -> dict[str, Any]:
    from agl_core.wire import to_builtins

    return {**to_builtins(view.server), "healthy": view.healthy, "inflight": view.inflight}


@models.command()
@click.argument("model")
@click.argument("endpoint")
@click.option("--version", type=click.IntRange(0), default=0, help="Training step it serves.")
@click.option("--policy", help="Policy it serves  [default: the model's name]")
@click.option("--alias", "aliases", multiple=True, help="Another name, such as 'gpt-*'.")
@click.option("--served-model", help="The name that the server knows it by.")
@click.option("--helper", is_flag=True, help="Not trained: a judge, an outside API.")
@click.option("--credential", help="Name in [gateway.credentials] of the key to send.")
@service_options
@json_option
def add(
    model: str,
    endpoint: str,
    version: int,
    policy: str | None,
    aliases: tuple[str, ...],
    served_model: str | None,
    helper: bool,
    credential: str | None,
    url: str | None,
    key: str | None,
    as_json: bool,
) -> None:
    """Register MODEL at ENDPOINT (a URL that ends in /v1), or change what is registered."""
    fields: dict[str, Any] = {
        "model": model,
        "endpoint": endpoint,
        "version": version,
        "aliases": aliases,
        "trained": not helper,
        "served_model": served_model,
        "credential": credential,
    }
    if policy is not None:
        fields["policy"] = policy
    with make_client(url, key) as client:
        view = client.register_model(**fields)
    if as_json:
        print_json(_view(view))
    else:
        click.echo(f"{view.server.model} at {view.server.endpoint}: version {view.server.version}")


@models.command()
@click.argument("model")
@click.argument("endpoint", required=False)
@service_options
@json_option
def remove(
    model: str, endpoint: str | None, url: str | None, key: str | None, as_json: bool
) -> None:
    """Remove MODEL, at one ENDPOINT or at all."""
    with make_client(url, key) as client:
        removed = client.remove_model(model, endpoint)
    if as_json:
        print_json({"items": [_view(view) for view in removed]})
    else:
        for view in removed:
            click.echo(f"removed {view.server.model} at {view.server.endpoint}")
