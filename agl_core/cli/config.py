"""``agl config`` and ``agl plugins``: what is configured and what is installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import click

from agl_core.cli.options import config_option, config_path_of, json_option, print_json, print_table


@click.group()
def config() -> None:
    """Write, check and show the configuration."""


@config.command()
@click.argument("path", default="agl.toml", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Overwrite a file that is there.")
def init(path: Path, force: bool) -> None:
    """Write a file with every setting at its default, commented."""
    from agl_core.cli.template import commented_defaults
    from agl_core.errors import ConfigError

    text = commented_defaults()
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as exc:
        raise ConfigError(f"{path} exists already", hint="--force overwrites it") from exc
    except OSError as exc:
        raise ConfigError(f"{path} cannot be written: {exc.strerror}") from exc
    click.echo(f"wrote {path}")


@config.command()
@config_option
@json_option
def check(config_path: str | None, as_json: bool) -> None:
    """Say whether the configuration is right, or everything that is wrong with it."""
    from agl_core.app import load_asgi_server, load_file
    from agl_core.errors import AglError, ConfigError

    path = config_path_of(config_path)
    try:
        loaded = load_file(path)
        load_asgi_server(loaded)
    except AglError as exc:
        if not as_json:
            raise
        problems = exc.problems if isinstance(exc, ConfigError) else [str(exc)]
        print_json({"ok": False, "problems": problems})
        raise click.exceptions.Exit(1) from exc
    names = [plugin.name for plugin in loaded.plugins.loaded]
    if as_json:
        print_json({"ok": True, "file": str(path) if path else None, "plugins": names})
    else:
        click.echo(f"{path or 'the defaults'}: right (plugins: {', '.join(names)})")


@config.command()
@config_option
@json_option
def show(config_path: str | None, as_json: bool) -> None:
    """Show the settings in force: defaults, file and environment together; no secret."""
    from agl_core.app import load_file
    from agl_core.cli.template import settings_as_toml

    loaded = load_file(config_path_of(config_path))
    if as_json:
        print_json(_masked(loaded.settings))
    else:
        click.echo(settings_as_toml(loaded.settings), nl=False)


def _masked(value: Any) -> Any:
    from agl_core.settings import Secret

    if isinstance(value, Secret):
        return "****"
    if attrs.has(type(value)):
        return {f.name: _masked(getattr(value, f.name)) for f in attrs.fields(type(value))}
    if isinstance(value, Mapping):
        return {key: _masked(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(item) for item in value]
    return value


@click.command()
@config_option
@json_option
def plugins(config_path: str | None, as_json: bool) -> None:
    """List the installed plugins: where they come from, what they do, whether they are enabled."""
    from agl_core.config import enabled_plugins, read_config
    from agl_core.errors import AglError
    from agl_core.hookspecs import ServiceHooks
    from agl_core.plugin_manager import CLIENT_GROUP, installed_plugins, load_plugin_class

    enabled = enabled_plugins(read_config(config_path_of(config_path)))
    hook_names = {name for name in vars(ServiceHooks) if not name.startswith("_")}
    rows: list[dict[str, Any]] = []
    for name, plugin in sorted(installed_plugins().items()):
        problem = None
        try:
            kind = load_plugin_class(name, {name: plugin})
            hooks = sorted(hook_names & set(dir(kind)))
        except AglError as exc:
            hooks, problem = [], str(exc)
        rows.append(
            {
                "name": name,
                "enabled": name in enabled,
                "distribution": plugin.distribution,
                "version": plugin.version,
                "hooks": hooks,
                "problem": problem,
            }
        )
    clients = [
        {"name": name, "distribution": plugin.distribution, "version": plugin.version}
        for name, plugin in sorted(installed_plugins(CLIENT_GROUP).items())
    ]
    if as_json:
        print_json({"plugins": rows, "client_plugins": clients})
        return
    print_table(
        ("plugin", "enabled", "distribution", "hooks"),
        [
            (
                row["name"],
                row["enabled"],
                f"{row['distribution']} {row['version']}",
                row["problem"] or ", ".join(row["hooks"]),
            )
            for row in rows
        ],
    )
    names = ", ".join(client["name"] for client in clients)
    click.echo(f"client plugins: {names or 'none'}")
