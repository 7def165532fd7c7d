"""``agl.toml`` and the environment to ``Settings``: every fault at once, with file, line and key.

Order of precedence: environment (``AGL__SERVER__PORT=9000``), file, defaults. A variable's value is
read as a TOML value, else taken as text; for a secret the value is the secret. TOML has no null, so
a key that may have no value is switched off by writing ``"none"``.
"""

from __future__ import annotations

import collections.abc
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import attrs
import tomli

from agl_core.errors import ConfigError
from agl_core.settings import TABLES, Secret, ServerSettings, Settings
from agl_core.wire import dotted, make_converter, problems_of, unknown_key

# Plugins take from here what their settings are made of; agl_core.settings is the core's own.
__all__ = [
    "DEFAULT_FILE",
    "ENVIRONMENT_PREFIX",
    "NO_VALUE",
    "Problems",
    "RawConfig",
    "Secret",
    "ServerSettings",
    "Settings",
    "build_settings",
    "enabled_plugins",
    "find_file",
    "read_config",
    "structure_table",
]

ENVIRONMENT_PREFIX = "AGL__"
DEFAULT_FILE = "agl.toml"
NO_VALUE = "none"
_HEADER = re.compile(r"^\s*\[{1,2}\s*([^\[\]]+?)\s*\]{1,2}\s*(#.*)?$")
_PART = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_KEY = re.compile(rf"^\s*({_PART}(?:\s*\.\s*{_PART})*)\s*=")

Path_ = tuple[str, ...]


@attrs.frozen(kw_only=True)
class RawConfig:
    """Tables as they were written, and where each key stands."""

    name: str = "the defaults"
    tables: Mapping[str, Any] = attrs.field(factory=dict, repr=False)
    lines: Mapping[Path_, int] = attrs.field(factory=dict)
    variables: Mapping[Path_, str] = attrs.field(factory=dict)
    """Keys that came from the environment or an option, with the name of that."""
    folder: Path = attrs.field(factory=Path.cwd)
    environ: Mapping[str, str] = attrs.field(factory=lambda: os.environ, repr=False)

    def where(self, path: Path_) -> str:
        """What a message about a key begins with: variable, or file and line."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.variables:
                return self.variables[path[:end]]
            if path[:end] in self.lines:
                return f"{self.name}:{self.lines[path[:end]]}"
        return self.name


def find_file(explicit: str | None, environ: Mapping[str, str] | None = None) -> Path | None:
    """The file to read: the one named, ``$AGL_CONFIG``, ``agl.toml`` here, or none."""
    named = explicit or (os.environ if environ is None else environ).get("AGL_CONFIG")
    if named:
        return Path(named)
    default = Path(DEFAULT_FILE)
    return default if default.exists() else None


def read_config(
    path: Path | None,
    environ: Mapping[str, str] | None = None,
    options: Mapping[Path_, tuple[str, str]] | None = None,
) -> RawConfig:
    """Read a file and the environment without judging the keys.

    Args:
        path: The file; None: there is none.
        environ: Instead of the process's own.
        options: What the command line sets: the key, the option's name and its text.

    Raises:
        ConfigError: The file cannot be read or is no TOML.
    """
    environ = os.environ if environ is None else environ
    tables: dict[str, Any] = {}
    lines: dict[Path_, int] = {}
    name, folder = "the defaults", Path.cwd()
    if path is not None:
        name, folder = str(path), path.resolve().parent
        try:
            text = path.read_bytes().decode("utf-8")
            tables = tomli.loads(text)
        except OSError as exc:
            raise ConfigError(
                f"{name}: cannot be read: {exc.strerror}",
                hint="'agl config init' writes a file with every default",
            ) from exc
        except UnicodeDecodeError as exc:
            raise ConfigError(f"{name}: is not UTF-8 (byte {exc.start})") from exc
        except tomli.TOMLDecodeError as exc:
            at = f"{name}:{exc.lineno}"
            raise ConfigError(f"{at}: not TOML: {exc.msg}, column {exc.colno}") from exc
        lines = dict(_line_numbers(text))
    variables: dict[Path_, str] = {}
    for variable, value in sorted(environ.items()):
        if variable.upper().startswith(ENVIRONMENT_PREFIX):
            key = tuple(variable[len(ENVIRONMENT_PREFIX) :].lower().split("__"))
            _override(tables, key, value)
            variables[key] = variable
    for key, (option, value) in (options or {}).items():
        _override(tables, key, value)
        variables[key] = option
    return RawConfig(
        name=name,
        tables=tables,
        lines=lines,
        variables=variables,
        folder=folder,
        environ=environ,
    )


def _override(tables: dict[str, Any], path: Path_, value: str) -> None:
    at = tables
    for part in path[:-1]:
        inner = at.setdefault(part, {})
        if not isinstance(inner, dict):
            return  # no table where one must be: that is said when the settings are made
        at = inner
    at[path[-1]] = _EnvironmentText(value)


class _EnvironmentText(str):
    """Text from the environment, not yet read: what it is depends on its field's type."""

    __slots__ = ()

    def as_toml(self) -> Any:
        try:
            read = tomli.loads(f"value = {self}")
        except tomli.TOMLDecodeError:
            return str(self)
        return read["value"] if len(read) == 1 else str(self)


def _line_numbers(text: str) -> Iterator[tuple[Path_, int]]:
    """Where each table and key stands. Reads well-formed TOML only, line by line."""
    table: Path_ = ()
    depth, quote = 0, ""
    for number, line in enumerate(text.split("\n"), start=1):
        if not depth and not quote:
            header = _HEADER.match(line)
            key = _KEY.match(line)
            if header:
                table = _key_parts(header[1])
                yield table, number
                continue
            if key:
                parts = _key_parts(key[1])
                for end in range(1, len(parts) + 1):
                    yield (*table, *parts[:end]), number
                line = line[key.end() :]
        depth, quote = _scan(line, depth, quote)


def _key_parts(text: str) -> Path_:
    return tuple(
        part.strip().strip("\"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[^.\s]+", text)
    )


_TOKEN = re.compile(r"\"\"\"|'''|\"(?:\\.|[^\"\\])*\"|'[^']*'|[\[\]{}]|#.*|\\.", re.DOTALL)


def _scan(line: str, depth: int, quote: str) -> tuple[int, str]:
    """Bracket depth and open multi-line quote at the end of a line."""
    at = 0
    while at < len(line):
        if quote:
            end = line.find(quote, at)
            if end < 0:
                return depth, quote
            at, quote = end + 3, ""
            continue
        token = _TOKEN.search(line, at)
        if token is None:
            break
        at = token.end()
        if token[0] in ('"""', "'''"):
            quote = token[0]
        elif token[0] in "[{":
            depth += 1
        elif token[0] in "]}":
            depth -= 1
    return depth, quote


class Problems:
    """Collects what is wrong, so that everything is said at once."""

    def __init__(self, raw: RawConfig) -> None:
        self._raw = raw
        self.lines: list[str] = []

    def add(self, path: Path_, message: str, *, key: str | None = None) -> None:
        """Note a fault of the table or key at ``path``; ``key`` places it more exactly."""
        where = self._raw.where((*path, key) if key else path)
        table = dotted(path)
        self.lines.append(f"{where}: {table}: {message}" if table else f"{where}: {message}")

    def raise_any(self) -> None:
        """Raise ``ConfigError`` with all that was noted, if anything was."""
        if self.lines:
            raise ConfigError(self.lines)


def build_settings(
    raw: RawConfig,
    plugin_configs: Mapping[str, type[Any] | None],
    known_plugins: Mapping[str, object] | None = None,
) -> Settings:
    """Make the settings of what was read.

    Args:
        raw: From ``read_config``.
        plugin_configs: The ``Config`` class of each plugin that is used (None: it has none).
        known_plugins: Names of installed plugins: a table for any other is a fault.

    Raises:
        ConfigError: With one line per fault.
    """
    problems = Problems(raw)
    built: dict[str, Any] = {}
    for key in raw.tables:
        if key not in TABLES:
            problems.add((), unknown_key(key, TABLES), key=key)
    for name, kind in TABLES.items():
        table = raw.tables.get(name, {})
        if name == "plugins" and isinstance(table, Mapping):
            table = {k: v for k, v in table.items() if k == "enabled"}
        value = structure_table(raw, (name,), table, kind, problems)
        if value is not None:
            built[name] = value
    tables = _plugin_tables(raw, plugin_configs, known_plugins, problems)
    problems.raise_any()
    built["plugins"] = attrs.evolve(built["plugins"], tables=tables)
    return Settings(**built)


def _plugin_tables(
    raw: RawConfig,
    plugin_configs: Mapping[str, type[Any] | None],
    known_plugins: Mapping[str, object] | None,
    problems: Problems,
) -> dict[str, Any]:
    written = raw.tables.get("plugins", {})
    if not isinstance(written, Mapping):
        return {}
    known = {*(known_plugins if known_plugins is not None else plugin_configs), "enabled"}
    for name, table in written.items():
        if name not in known:
            problems.add(("plugins",), unknown_key(name, known), key=name)
        elif name != "enabled" and plugin_configs.get(name, ()) is None and table:
            problems.add(("plugins", name), "this plugin has no settings")
    built = {}
    for name, kind in plugin_configs.items():
        if kind is not None:
            built[name] = structure_table(
                raw, ("plugins", name), written.get(name, {}), kind, problems
            )
    return built


def enabled_plugins(raw: RawConfig) -> tuple[str, ...]:
    """The names in ``plugins.enabled``, before any plugin is imported."""
    problems = Problems(raw)
    table = raw.tables.get("plugins", {})
    only: Any = table
    if isinstance(table, Mapping):
        only = {key: value for key, value in table.items() if key == "enabled"}
    value = structure_table(raw, ("plugins",), only, TABLES["plugins"], problems)
    problems.raise_any()
    enabled: tuple[str, ...] = value.enabled
    for name in enabled:
        if enabled.count(name) > 1:
            raise ConfigError(f"{raw.where(('plugins', 'enabled'))}: {name!r} is enabled twice")
    return enabled


def structure_table(
    raw: RawConfig, path: Path_, table: Any, kind: type[Any], problems: Problems
) -> Any:
    """One table as its attrs class, or None when ``problems`` were added."""
    if not isinstance(table, Mapping):
        # Without the value: where a whole table is misplaced it may well be a secret.
        problems.add(path, f"must be a table, not {_type_name(table)}")
        return None
    converter = make_converter(json_integers=False)
    converter.register_structure_hook(Secret, lambda value, _: _secret(raw, value))
    try:
        return converter.structure(_read_table(table, kind), kind)
    except Exception as exc:
        for problem in problems_of(exc):
            where = (*path, *problem.path)
            if problem.message.startswith("unknown key"):
                problems.add(where[:-1], problem.message, key=where[-1])
                continue
            quoted = re.match(r"'(\w+)'", problem.message)  # what a validator says of its field
            problems.add(where, problem.message, key=quoted[1] if quoted else None)
        return None


def _type_name(value: Any) -> str:
    if isinstance(value, str):
        return "text"
    return {list: "a list", bool: "true or false"}.get(type(value), "a number")


def _read_table(table: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Read variables' text by the types of the fields it is for, and ``"none"`` as no value."""
    types = get_type_hints(kind)
    return {key: _read_value(value, types.get(key, Any)) for key, value in table.items()}


def _read_value(value: Any, expected: Any) -> Any:
    is_union = get_origin(expected) in (Union, UnionType)
    kinds = get_args(expected) if is_union else (expected,)
    if isinstance(value, _EnvironmentText):
        if Secret in kinds:
            return Secret(str(value))
        if any(get_origin(kind) is tuple and Secret in get_args(kind) for kind in kinds):
            listed = value.as_toml()
            several = listed if isinstance(listed, list) else [str(value)]
            return [Secret(one) if isinstance(one, str) else one for one in several]
        if NoneType in kinds and value == NO_VALUE:
            return None
        return str(value) if str in kinds else value.as_toml()
    if isinstance(value, str) and value == NO_VALUE and NoneType in kinds:
        return None
    for kind in kinds:
        if isinstance(value, Mapping):
            if attrs.has(kind):
                return _read_table(value, kind)
            if get_origin(kind) in (dict, collections.abc.Mapping):
                of_values = get_args(kind)[1]
                return {key: _read_value(item, of_values) for key, item in value.items()}
        elif Secret in get_args(kind) and not isinstance(value, list):
            return Secret(str(value))  # a secret in the wrong place is not shown by the fault
    return _plain(value)


def _plain(value: Any) -> Any:
    """Text of the environment within what nothing is known of."""
    if isinstance(value, _EnvironmentText):
        return value.as_toml()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _secret(raw: RawConfig, value: Any) -> Secret:
    if isinstance(value, Secret):
        text, source = value.reveal(), "the variable"
    elif isinstance(value, Mapping) and set(value) == {"env"}:
        source = f"environment variable {value['env']}"
        text = raw.environ.get(str(value["env"]), "")
    elif isinstance(value, Mapping) and set(value) == {"file"}:
        source = f"file {value['file']}"
        try:
            text = (raw.folder / str(value["file"])).read_text("utf-8").strip()
        except OSError as exc:
            raise ValueError(f"{source} cannot be read: {exc.strerror}") from exc
        except UnicodeDecodeError as exc:
            raise ValueError(f"{source} is not UTF-8") from exc
    else:
        raise ValueError('a secret is written { env = "NAME" } or { file = "PATH" }')
    if not text:
        raise ValueError(f"{source} is unset or empty")
    return Secret(text)
