"""The commented configuration file, made from the settings classes so that it stays true."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from agl_core.config import NO_VALUE
from agl_core.settings import TABLES, PluginsSettings, Secret, Settings


def commented_defaults() -> str:
    """A file in which every key stands with its default and what it means."""
    from agl_core.errors import PluginError
    from agl_core.plugin_manager import installed_plugins, load_plugin_class

    lines = [
        "# Every key has a default, and the lines below show them: uncomment what is to differ.",
        "# Environment variables override a key: AGL__SERVER__PORT=9000.",
        '# A secret is written { env = "NAME" } or { file = "PATH" }; "none" stands for no value.',
    ]
    for name, kind in TABLES.items():
        lines += ["", f"[{name}]", *_table_lines(kind, commented=True)]
    installed = installed_plugins()
    for name in PluginsSettings().enabled:
        try:
            config = getattr(load_plugin_class(name, installed), "Config", None)
        except PluginError:
            continue  # a plugin that cannot be loaded has no settings to show
        if config is not None:
            lines += ["", f"[plugins.{name}]", *_table_lines(config, commented=True)]
    return "\n".join(lines) + "\n"


def settings_as_toml(settings: Settings) -> str:
    """The settings in force as TOML, secrets masked."""
    lines: list[str] = []
    for name in TABLES:
        table = getattr(settings, name)
        lines += [f"[{name}]", *_values(table), ""]
    for name, table in settings.plugins.tables.items():
        lines += [f"[plugins.{name}]", *_values(table), ""]
    return "\n".join(lines)


def _values(table: Any) -> Iterator[str]:
    for field in attrs.fields(type(table)):
        value = getattr(table, field.name)
        if field.name != "tables":
            yield f"{field.name} = {to_toml(value)}"


def _table_lines(kind: type[Any], *, commented: bool) -> Iterator[str]:
    documents = _attribute_docs(kind)
    mark = "# " if commented else ""
    for field in attrs.fields(kind):
        if field.name == "tables":
            continue
        for line in textwrap.wrap(documents.get(field.name, ""), 96):
            yield f"# {line}"
        default: Any = field.default
        if default is attrs.NOTHING:
            yield f"# {field.name} has no default"
            continue
        if hasattr(default, "factory"):
            default = default.factory()
        yield f"{mark}{field.name} = {to_toml(default)}"


def _attribute_docs(kind: type[Any]) -> dict[str, str]:
    """The string below each attribute of a class; none where its source is not at hand."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    found: dict[str, str] = {}
    for statement, following in itertools.pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            found[statement.target.id] = " ".join(following.value.value.split())
    return found


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else to_toml(name)


def to_toml(value: Any) -> str:
    """A value as TOML writes it, None as ``"none"``; a secret as stars."""
    if value is None:
        return f'"{NO_VALUE}"'
    if isinstance(value, Secret):
        return '"****"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
    if attrs.has(type(value)):
        value = {field.name: getattr(value, field.name) for field in attrs.fields(type(value))}
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_key(key)} = {to_toml(item)}" for key, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    return f"[{', '.join(map(to_toml, value))}]"
