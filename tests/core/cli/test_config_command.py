"""``agl config`` and ``agl plugins``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import attrs
import pytest
import tomli

from agl_core.app import load_file
from agl_core.cli.template import commented_defaults, settings_as_toml, to_toml
from agl_core.settings import TABLES, Secret, Settings


def write(text: str) -> None:
    Path("agl.toml").write_text(text, encoding="utf-8")


def test_the_file_that_init_writes_passes_check(agl: Any) -> None:
    ran = agl("config", "init")
    assert (ran.status, ran.out) == (0, "wrote agl.toml\n")
    checked = agl("config", "check")
    assert (checked.status, checked.err) == (0, "")
    assert checked.out == "agl.toml: right (plugins: memory, vllm, local, verl)\n"


def test_the_file_that_init_writes_gives_the_defaults() -> None:
    without = load_file(None).settings
    write(commented_defaults())
    assert load_file(Path("agl.toml")).settings == without


def test_every_key_of_that_file_uncommented_gives_the_defaults_too() -> None:
    without = load_file(None).settings
    text = re.sub(r"^# (?=[a-z_]+ = )", "", commented_defaults(), flags=re.MULTILINE)
    write(text)
    assert load_file(Path("agl.toml")).settings == without
    written = tomli.loads(text)
    for name, kind in TABLES.items():
        wanted = {field.name for field in attrs.fields(kind)} - {"tables"}
        tables = {"memory", "vllm", "local"} if name == "plugins" else set()
        assert set(written[name]) == wanted | tables


def test_init_overwrites_only_by_force(agl: Any) -> None:
    write("mine")
    refused = agl("config", "init")
    assert refused.status == 1
    assert refused.err == "error: agl.toml exists already\nhint: --force overwrites it\n"
    assert Path("agl.toml").read_text() == "mine"
    assert agl("config", "init", "--force").status == 0
    assert "[server]" in Path("agl.toml").read_text()


def test_init_writes_where_it_is_told_and_says_so_where_it_cannot(agl: Any) -> None:
    assert agl("config", "init", "other.toml").out == "wrote other.toml\n"
    ran = agl("config", "init", "no/such/folder/agl.toml")
    assert ran.status == 1
    assert "cannot be written: No such file or directory" in ran.err


FAULTY = """
[server]
port = "x"
[plugins.memory]
max_rolouts = 1
"""


def test_check_tells_every_fault_with_status_1(agl: Any) -> None:
    write(FAULTY)
    ran = agl("config", "check")
    assert (ran.status, ran.out) == (1, "")
    lines = ran.err.splitlines()
    assert lines[0] == "error: agl.toml:3: server.port: must be a whole number, not 'x'"
    assert lines[1].startswith("error: agl.toml:5: plugins.memory: unknown key 'max_rolouts', did")
    assert len(lines) == 2


def test_check_tells_every_fault_as_json_with_status_1(agl: Any) -> None:
    write(FAULTY)
    ran = agl("config", "check", "--json")
    assert ran.status == 1
    told = json.loads(ran.out)
    assert told["ok"] is False
    assert len(told["problems"]) == 2


def test_check_as_json_says_what_was_read(agl: Any) -> None:
    assert json.loads(agl("config", "check", "--json").out) == {
        "ok": True,
        "file": None,
        "plugins": ["memory", "vllm", "local", "verl"],
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[server]\nport = 1 2", "agl.toml:2: not TOML"),
        ('[plugins]\nenabled = ["memori"]', "unknown plugin 'memori', did you mean 'memory'?"),
        ('[server]\nuse = "nginx"', "unknown plugin 'nginx'"),
        ('[auth]\nviewer_key = "clear"', "auth.viewer_key: a secret is written"),
        ("[server]\nport = 99999", "server: 'port' must be <= 65535"),
    ],
)
def test_check_finds_what_would_stop_the_service(agl: Any, text: str, said: str) -> None:
    write(text)
    ran = agl("config", "check")
    assert ran.status == 1
    assert said in ran.err
    assert "Traceback" not in ran.err


def test_check_reads_the_file_that_it_is_told(agl: Any, monkeypatch: Any) -> None:
    write("= broken")
    Path("good.toml").write_text("[server]\nport = 1\n", encoding="utf-8")
    assert agl("config", "check", "--config", "good.toml").status == 0
    monkeypatch.setenv("AGL_CONFIG", "good.toml")
    assert agl("config", "check").status == 0


def test_show_tells_what_is_in_force_and_no_secret(agl: Any, monkeypatch: Any) -> None:
    write('[auth]\nalgorithm_key = { env = "MY_KEY" }\ntoken_keys = [{ env = "MY_KEY" }]\n')
    monkeypatch.setenv("MY_KEY", "hunter2")
    monkeypatch.setenv("AGL__GATEWAY__CREDENTIALS__JUDGE", "hunter2")
    monkeypatch.setenv("AGL__SERVER__PORT", "9001")
    for arguments in (["config", "show"], ["config", "show", "--json"]):
        ran = agl(*arguments)
        assert ran.status == 0
        assert "hunter2" not in ran.out + ran.err
        assert "****" in ran.out
        assert "9001" in ran.out


def test_show_is_toml_and_with_json_json(agl: Any) -> None:
    write("[server]\nport = 9001\n[plugins.local]\nmax_active = 3\n")
    shown = tomli.loads(agl("config", "show").out)
    assert shown["server"]["port"] == 9001
    assert shown["plugins"]["local"]["max_active"] == 3
    as_json = json.loads(agl("config", "show", "--json").out)
    assert as_json["server"]["port"] == 9001
    assert as_json["plugins"]["tables"]["local"]["max_active"] == 3


def test_what_show_prints_can_be_read_again() -> None:
    write(settings_as_toml(Settings()))
    assert load_file(Path("agl.toml")).settings.server == Settings().server


@attrs.frozen
class Pair:
    """A table in a table."""

    a: int = 1
    b: str | None = None


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ('q"uo\\te', 'q"uo\\te'),
        ("line\nend\ttab\x7f", "line\nend\ttab\x7f"),
        ("日本 😀 \U000e0001", "日本 😀 \U000e0001"),
        (True, True),
        (1.5, 1.5),
        ((), []),
        (("a", 1), ["a", 1]),
        ({"a b": [1], "c": {"d": False}}, {"a b": [1], "c": {"d": False}}),
        ({}, {}),
        (None, "none"),
        (Secret("hunter2"), "****"),
        (Pair(), {"a": 1, "b": "none"}),
        ([Pair(a=2, b="x")], [{"a": 2, "b": "x"}]),
    ],
    ids=repr,
)
def test_any_value_of_a_setting_is_written_as_toml(value: Any, read: Any) -> None:
    assert tomli.loads(f"x = {to_toml(value)}")["x"] == read


# --- agl plugins ---------------------------------------------------------------------------------


def test_plugins_are_listed_with_where_they_come_from_and_what_they_do(agl: Any) -> None:
    write('[plugins]\nenabled = ["memory"]\n')
    ran = agl("plugins")
    assert ran.status == 0
    rows = {line.split()[0]: line for line in ran.out.splitlines() if line}
    assert re.search(r"yes +agl-lite \S+ +provide_store", rows["memory"])
    assert re.search(r"no +agl-lite \S+ +provide_runner", rows["local"])
    assert "client plugins: verl" in ran.out


def test_plugins_as_json(agl: Any) -> None:
    told = json.loads(agl("plugins", "--json").out)
    by_name = {row["name"]: row for row in told["plugins"]}
    assert by_name["vllm"]["enabled"] is True
    assert by_name["hypercorn"]["enabled"] is False
    assert by_name["verl"]["hooks"] == ["provide_exporter"]
    assert [row["name"] for row in told["client_plugins"]] == ["verl"]


def test_a_broken_plugin_is_listed_with_what_is_wrong(agl: Any, install: Any) -> None:
    install("toy-plugin", "import heavy_part", requires=['heavy-part; extra == "heavy"'])
    ran = agl("plugins")
    assert ran.status == 0
    assert "pip install 'toy-plugin[heavy]'" in ran.out


def test_two_distributions_with_one_plugin_name_stop_every_command_that_loads_plugins(
    agl: Any, install: Any
) -> None:
    install("other-memory", "", plugins={"memory": "other_memory:Plugin"})
    for arguments in (["config", "check"], ["serve", "--port", "0"], ["plugins"]):
        ran = agl(*arguments)
        assert ran.status == 1
        assert "plugin 'memory' is offered by" in ran.err
