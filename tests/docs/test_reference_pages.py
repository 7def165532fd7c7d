"""The pages on hooks, errors and configuration say what the code says, and nothing else."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import tomli

from agl_core import errors
from agl_core.app import load
from agl_core.cli.template import to_toml
from agl_core.config import read_config
from agl_core.plugin_manager import config_class, installed_plugins, load_plugin_class
from agl_core.settings import TABLES, ModeSampling, PluginsSettings, RepeatSettings
from agl_core.testing.hooks import hook_specs
from agl_k8s.config import JobLayer, K8sConfig

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_ROW = re.compile(r"^\| `([a-z_]+)` \| (.+?) \| (.+) \|$", re.MULTILINE)
_BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def sections(page: str) -> dict[str, str]:
    """Text by the code in its heading."""
    parts = re.split(r"^## `([^`]+)`\n", (DOCS / page).read_text("utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


# --- hooks ---------------------------------------------------------------------------------------


def test_every_hook_has_a_section_and_every_section_a_hook() -> None:
    assert list(sections("hooks.md")) == list(hook_specs())


@pytest.mark.parametrize("name", list(hook_specs()))
def test_the_signature_of_a_hook_is_the_specs(name: str) -> None:
    signature = f"def {name}{inspect.signature(hook_specs()[name], eval_str=False)}: ..."
    shown = [text.strip() for _, text in _BLOCK.findall(sections("hooks.md")[name])]
    assert shown == [signature.replace("'", "")]


# --- errors --------------------------------------------------------------------------------------


def codes_in(tree: ast.AST) -> Iterator[str]:
    """Every code that a module's errors may have, where it is written out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            yield from _assigned(node)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called == "RolloutError":
                continue  # the code of a rollout's end, which is its last attempt's reason
            given = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            given += node.args[1:2] if called in ("ApiError", "_wait") else []
            yield from (text for value in given for text in _texts(value))


def _assigned(node: ast.Assign | ast.AnnAssign) -> Iterator[str]:
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Name) and target.id in ("default_code", "CODE"):
            yield from _texts(node.value)
        elif isinstance(target, ast.Name) and target.id == "_CODES":
            assert isinstance(node.value, ast.Dict)
            yield from (text for value in node.value.values for text in _texts(value))
        elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            for name, value in zip(target.elts, node.value.elts, strict=True):
                if ast.unparse(name) == "code":
                    yield from _texts(value)


def _texts(value: ast.AST | None) -> Iterator[str]:
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value


def all_codes() -> set[str]:
    found = set()
    for folder in ("agl_core", "plugins"):
        for path in (ROOT / folder).rglob("*.py"):
            if "testing" not in path.parts:
                found |= set(codes_in(ast.parse(path.read_text("utf-8"))))
    return found


def error_rows() -> dict[str, str]:
    rows = _ROW.findall((DOCS / "errors.md").read_text("utf-8"))
    assert len({code for code, _, _ in rows}) == len(rows), "a code stands twice"
    return {code: status for code, status, _ in rows}


def test_the_page_has_every_code_of_the_code_base_and_no_other() -> None:
    found, told = all_codes(), set(error_rows())
    assert found - told == set(), "codes that docs/errors.md lacks"
    assert told - found == set(), "codes that nothing has any more"


def test_the_search_for_codes_finds_each_way_to_write_one() -> None:
    text = (
        "class E(AglError):\n    default_code = 'a'\n"
        "raise E('m', code='b')\n"
        "raise ApiError(0, 'c', 'm')\n"
        "m, code = f'm', 'd'\n"
        "_CODES = {404: 'e'}\n"
        "RolloutError(code='oom')\n"
    )
    assert set(codes_in(ast.parse(text))) == {"a", "b", "c", "d", "e"}


def test_the_page_has_the_status_of_every_class() -> None:
    told = error_rows()
    start = ("bad_config", "api_error")
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.AglError) and kind.__module__:
            code = kind.default_code
            on_http = not issubclass(kind, errors.PluginError) and code not in start
            wanted = str(kind.default_status) if on_http else "-"
            assert told[code].split(",")[0] == wanted, code


# --- configuration -------------------------------------------------------------------------------


def config_tables() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for table, kind in TABLES.items():
        found[table] = kind
        if table == "gateway":
            found["gateway.sampling.train"] = ModeSampling
            found["gateway.repeats"] = RepeatSettings
    installed = installed_plugins()
    for name in PluginsSettings().enabled:
        config = config_class(load_plugin_class(name, installed))
        if config is not None:
            found[f"plugins.{name}"] = config
    found["plugins.k8s"] = K8sConfig
    found["plugins.k8s.job"] = JobLayer
    return found


def test_every_table_has_a_section() -> None:
    assert list(sections("configuration.md")) == [f"[{name}]" for name in config_tables()]


@pytest.mark.parametrize("table", list(config_tables()))
def test_every_key_is_told_with_its_default(table: str) -> None:
    rows = _ROW.findall(sections("configuration.md")[f"[{table}]"])
    wanted = {}
    for field in attrs.fields(config_tables()[table]):
        if field.name != "tables":
            default: Any = field.default
            value = default.factory() if hasattr(default, "factory") else default
            is_table = attrs.has(type(value))
            wanted[field.name] = "its own table" if is_table else f"`{to_toml(value)}`"
    assert {key: default for key, default, _ in rows} == wanted
    assert len(rows) == len(wanted)


def toml_blocks() -> list[Any]:
    found = []
    for path in [*sorted(DOCS.rglob("*.md")), ROOT / "README.md"]:
        for language, text in _BLOCK.findall(path.read_text("utf-8")):
            if language == "toml" and "project" not in tomli.loads(text):
                found.append(pytest.param(text, id=f"{path.name}-{len(found)}"))
    return found


@pytest.mark.parametrize("text", toml_blocks())
def test_every_configuration_that_is_shown_passes_the_loader(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in re.findall(r'env = "(\w+)"', text):
        monkeypatch.setenv(name, "a-key")
    for name in re.findall(r'file = "([\w.]+)"', text):
        (tmp_path / name).write_text("a-key", encoding="utf-8")
    path = tmp_path / "agl.toml"
    path.write_text(text, encoding="utf-8")
    load(read_config(path))
