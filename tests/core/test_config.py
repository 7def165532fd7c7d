"""Files and variables become settings; whatever is wrong is told with its place, all at once."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from attrs import field, frozen
from attrs.validators import ge

from agl_core.config import RawConfig, build_settings, enabled_plugins, find_file, read_config
from agl_core.errors import ConfigError
from agl_core.settings import Secret, Settings


@frozen(kw_only=True)
class Inner:
    """A table in a plugin's table."""

    size: int = field(default=1, validator=ge(1))
    names: tuple[str, ...] = ()


@frozen(kw_only=True)
class ToyConfig:
    """The table of a plugin."""

    port: int = field(default=1, validator=ge(1))
    mode: Literal["fast", "slow"] = "fast"
    key: Secret | None = None
    inner: Inner = field(factory=Inner)
    wait_seconds: float | None = 5.0


Make = Callable[..., Settings]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Settings of a file's text and variables."""

    def run(text: str | None = None, environ: Mapping[str, str] | None = None) -> Settings:
        return build(raw(tmp_path, text, environ))

    return run


def raw(
    folder: Path, text: str | None = None, environ: Mapping[str, str] | None = None
) -> RawConfig:
    path = None
    if text is not None:
        path = folder / "agl.toml"
        path.write_text(text, encoding="utf-8")
    return read_config(path, environ or {})


def build(read: RawConfig) -> Settings:
    return build_settings(read, {"toy": ToyConfig, "plain": None}, {"toy": 1, "plain": 1, "off": 1})


@pytest.fixture
def faults(make: Make, tmp_path: Path) -> Callable[..., list[str]]:
    """The lines of a ConfigError, without the folder."""

    def run(text: str | None = None, environ: Mapping[str, str] | None = None) -> list[str]:
        with pytest.raises(ConfigError) as refused:
            make(text, environ)
        return [line.replace(f"{tmp_path}/", "") for line in refused.value.problems]

    return run


Faults = Callable[..., list[str]]


def test_without_a_file_the_defaults_hold(make: Make) -> None:
    assert make() == Settings(plugins=make().plugins)
    assert make().plugins.tables == {"toy": ToyConfig()}


def test_a_file_overrides_the_defaults_and_a_variable_overrides_the_file(make: Make) -> None:
    text = "[server]\nport = 9000\nbacklog = 7\n[plugins.toy]\nport = 5\n"
    environ = {"AGL__SERVER__PORT": "9001", "AGL__PLUGINS__TOY__MODE": "slow", "OTHER": "x"}
    settings = make(text, environ)
    assert (settings.server.port, settings.server.backlog) == (9001, 7)
    assert settings.plugins.tables["toy"] == ToyConfig(port=5, mode="slow")


@pytest.mark.parametrize(
    ("variable", "text", "table", "key", "value"),
    [
        ("AGL__SERVER__INSECURE", "true", "server", "insecure", True),
        ("AGL__SERVER__HOST", "0", "server", "host", "0"),
        ("AGL__GATEWAY__HOLD_SECONDS", "3", "gateway", "hold_seconds", 3.0),
        ("AGL__CONTROLLER__AGENT_URL", "http://x", "controller", "agent_url", "http://x"),
        ("AGL__GATEWAY__IDLE_SECONDS", "none", "gateway", "idle_seconds", None),
        ("agl__server__port", "5", "server", "port", 5),
    ],
)
def test_a_variable_is_read_by_the_type_of_its_field(
    make: Make, variable: str, text: str, table: str, key: str, value: Any
) -> None:
    assert getattr(getattr(make(environ={variable: text}), table), key) == value


def test_a_variable_may_hold_a_list_or_a_table(tmp_path: Path) -> None:
    read = raw(tmp_path, None, {"AGL__PLUGINS__ENABLED": '["a", "b"]'})
    assert enabled_plugins(read) == ("a", "b")
    toy = build(raw(tmp_path, None, {"AGL__PLUGINS__TOY__INNER": '{ size = 3, names = ["n"] }'}))
    assert toy.plugins.tables["toy"].inner == Inner(size=3, names=("n",))


@pytest.mark.parametrize("key", ["first_byte_seconds", "idle_seconds", "heartbeat_seconds"])
def test_none_switches_off_what_may_have_no_value(make: Make, key: str) -> None:
    assert getattr(make(f'[gateway]\n{key} = "none"').gateway, key) is None


def test_none_is_no_value_where_one_is_needed(faults: Faults) -> None:
    assert faults('[server]\nport = "none"') == [
        "agl.toml:2: server.port: must be a whole number, not 'none'"
    ]


# --- faults --------------------------------------------------------------------------------------


def test_bad_toml_is_told_with_file_line_and_column(faults: Faults) -> None:
    [line] = faults("[server]\nport = \n")
    assert line.startswith("agl.toml:2: not TOML: ")
    assert line.endswith("column 8")


def test_a_missing_file_is_told_with_the_way_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"nowhere\.toml: cannot be read: No such file"
    ) as refused:
        read_config(tmp_path / "nowhere.toml", {})
    assert "agl config init" in (refused.value.hint or "")


def test_a_file_that_is_not_utf8_is_told_with_the_place(tmp_path: Path) -> None:
    path = tmp_path / "agl.toml"
    path.write_bytes(b"[server]\nhost = '\xff'")
    with pytest.raises(ConfigError, match=r"is not UTF-8 \(byte 17\)"):
        read_config(path, {})


def test_c88_an_unknown_key_of_a_plugin_is_told_with_its_line_and_the_nearest(
    faults: Faults,
) -> None:
    assert faults("\n[plugins.toy]\n\nprot = 9000\n") == [
        "agl.toml:4: plugins.toy: unknown key 'prot', did you mean 'port'? "
        "(allowed: inner, key, mode, port, wait_seconds)"
    ]


def test_an_unknown_table_is_told_with_the_nearest(faults: Faults) -> None:
    assert faults("[sever]\nport = 1\n") == [
        "agl.toml:1: unknown key 'sever', did you mean 'server'? "
        "(allowed: auth, capture, controller, gateway, plugins, server)"
    ]


def test_a_table_of_a_plugin_that_nobody_installed_is_told(faults: Faults) -> None:
    [line] = faults("[plugins.toi]\n")
    assert line.startswith("agl.toml:1: plugins: unknown key 'toi', did you mean 'toy'?")


def test_a_table_of_an_installed_plugin_that_is_not_enabled_may_stay(make: Make) -> None:
    assert "off" not in make("[plugins.off]\nanything = 1\n").plugins.tables


def test_settings_for_a_plugin_that_has_none_are_told(faults: Faults) -> None:
    assert faults("[plugins.plain]\nx = 1\n") == [
        "agl.toml:1: plugins.plain: this plugin has no settings"
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[server]\nport = "80"', "agl.toml:2: server.port: must be a whole number, not '80'"),
        ("[server]\nport = 80.0", "agl.toml:2: server.port: must be a whole number, not 80.0"),
        ("[server]\nport = true", "agl.toml:2: server.port: must be a whole number, not True"),
        ("[server]\nhost = 1", "agl.toml:2: server.host: must be a string, not 1"),
        (
            '[auth]\nagent_rewards = "no"',
            "agl.toml:2: auth.agent_rewards: must be true or false, not 'no'",
        ),
        ("[gateway]\nretries = -1", "agl.toml:2: gateway: 'retries' must be >= 0: -1"),
        ("[server]\nport = 99999", "agl.toml:2: server: 'port' must be <= 65535: 99999"),
        (
            "[gateway]\nhold_seconds = inf",
            "agl.toml:2: gateway.hold_seconds: must be a finite number",
        ),
        (
            '[plugins.toy]\nmode = "quick"',
            "agl.toml:2: plugins.toy.mode: must be one of 'fast', 'slow', not 'quick'",
        ),
        (
            "[plugins.toy.inner]\n\nsize = 0",
            "agl.toml:3: plugins.toy.inner: 'size' must be >= 1: 0",
        ),
        (
            "[plugins.toy]\ninner = { siez = 0 }",
            "agl.toml:2: plugins.toy.inner: unknown key 'siez', did you mean 'size'? "
            "(allowed: names, size)",
        ),
        (
            "[plugins.toy]\ninner.names = ['a', 5]",
            "agl.toml:2: plugins.toy.inner.names[1]: must be a string, not 5",
        ),
        ("server = 5", "agl.toml:1: server: must be a table, not a number"),
        ("[[server]]\nport = 1", "agl.toml:1: server: must be a table, not a list"),
        ("plugins = 'x'", "agl.toml:1: plugins: must be a table, not text"),
        ("[plugins]\ntoy = 5", "agl.toml:2: plugins.toy: must be a table, not a number"),
        ("[plugins]\nenabled = 'toy'", "agl.toml:2: plugins.enabled: must be a list, not 'toy'"),
    ],
    ids=lambda value: value.replace("\n", " ")[:40],
)
def test_a_wrong_value_is_told_with_file_line_key_and_what_is_allowed(
    faults: Faults, text: str, said: str
) -> None:
    assert faults(text) == [said]


def test_all_faults_of_a_file_and_the_environment_are_told_at_once(faults: Faults) -> None:
    text = """
[server]
port = "x"
hots = "a"

[gateway]
retries = -1

[plugins.toy]
mode = 5
colour = "red"

[surplus]
"""
    assert [
        line.partition(": ")[0] for line in faults(text, {"AGL__AUTH__AGENT_REWARDS": "7"})
    ] == [
        "agl.toml:13",
        "agl.toml:3",
        "agl.toml:4",
        "AGL__AUTH__AGENT_REWARDS",
        "agl.toml:7",
        "agl.toml:10",
        "agl.toml:11",
    ]


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("AGL__SERVER__PORT", "many", "server.port: must be a whole number, not 'many'"),
        ("AGL__SERVER__PORT", "5\nx = 1", "server.port: must be a whole number, not '5\\nx = 1'"),
        ("AGL__SERVER__PORT", "-1", "server: 'port' must be >= 0: -1"),
        ("AGL__SERVER__PROT", "1", "server: unknown key 'prot', did you mean 'port'?"),
        ("AGL__SERVER", "x", "server: must be a table, not text"),
        ("AGL__PLUGINS__TOY__PORT", "0", "plugins.toy: 'port' must be >= 1: 0"),
        ("AGL__PLUGINS__TOY__INNER__SIZE", "0", "plugins.toy.inner: 'size' must be >= 1: 0"),
        ("AGL__PLUGINS__ENABLED", "a,b", "plugins.enabled: must be a list, not 'a,b'"),
    ],
)
def test_a_fault_of_a_variable_names_the_variable(
    faults: Faults, variable: str, value: str, said: str
) -> None:
    [line] = faults("[server]\nport = 80\n", {variable: value})
    assert line.startswith(f"{variable}: {said}")


def test_a_variable_does_not_hide_that_its_table_is_no_table(faults: Faults) -> None:
    [line] = faults("server = 5", {"AGL__SERVER__PORT": "80"})
    assert line.endswith("server: must be a table, not a number")


def test_a_fault_of_an_option_names_the_option(tmp_path: Path) -> None:
    read = read_config(None, {}, {("server", "port"): ("--port", "99999")})
    with pytest.raises(ConfigError, match=r"^--port: server: 'port' must be <= 65535"):
        build(read)


def test_a_plugin_that_is_enabled_twice_is_a_fault(tmp_path: Path) -> None:
    read = raw(tmp_path, '[plugins]\nenabled = ["a", "b", "a"]')
    with pytest.raises(ConfigError, match=r"agl\.toml:2: 'a' is enabled twice"):
        enabled_plugins(read)


LAYOUT = '''
# [server]
title = """
[gateway]
retries = -1
"""
server.grace_seconds = -1 # dotted

[ plugins . "toy" ] # spaces and quotes
inner.names = [
  "[auth]",  # no header
  "]",
]
inner . size = 0
mode = 'x = "'

[gateway]
retries = -1
'''


def test_lines_are_right_in_an_odd_layout(faults: Faults) -> None:
    lines = faults(LAYOUT)
    found = {line.split(": ")[0]: line for line in lines}
    assert "unknown key 'title'" in found["agl.toml:3"]
    assert "'grace_seconds' must be >= 0" in found["agl.toml:7"]
    assert "'size' must be >= 1" in found["agl.toml:14"]
    assert "plugins.toy.mode" in found["agl.toml:15"]
    assert "'retries' must be >= 0" in found["agl.toml:18"]
    assert len(lines) == 5


def test_lines_are_right_with_windows_line_ends(faults: Faults) -> None:
    [line] = faults("[server]\r\n\r\nport = 'x'\r\n")
    assert line.startswith("agl.toml:3: server.port")


# --- secrets -------------------------------------------------------------------------------------


def test_a_secret_comes_from_a_variable_or_a_file_beside_the_configuration(
    make: Make, tmp_path: Path
) -> None:
    (tmp_path / "viewer.key").write_text("from-file\n", encoding="utf-8")
    text = """
[auth]
algorithm_key = { env = "MY_KEY" }
viewer_key = { file = "viewer.key" }
token_keys = [{ env = "MY_KEY" }, { file = "viewer.key" }]
[gateway.credentials]
judge = { env = "MY_KEY" }
"""
    settings = make(text, {"MY_KEY": "from-variable"})
    assert settings.auth.algorithm_key == Secret("from-variable")
    assert settings.auth.viewer_key == Secret("from-file")
    assert settings.auth.token_keys == (Secret("from-variable"), Secret("from-file"))
    assert settings.gateway.credentials == {"judge": Secret("from-variable")}
    assert settings.auth.controller_key is None


@pytest.mark.parametrize("value", ["s3cret", "5", "none", "[1]", "true"])
def test_for_a_secret_the_value_of_the_variable_is_the_secret(make: Make, value: str) -> None:
    settings = make(
        environ={
            "AGL__AUTH__ALGORITHM_KEY": value,
            "AGL__GATEWAY__CREDENTIALS__JUDGE": value,
            "AGL__PLUGINS__TOY__KEY": value,
        }
    )
    assert settings.auth.algorithm_key == Secret(value)
    assert settings.gateway.credentials == {"judge": Secret(value)}
    assert settings.plugins.tables["toy"].key == Secret(value)


@pytest.mark.parametrize(
    ("value", "keys"), [("old", ["old"]), ('["new", "old"]', ["new", "old"]), ("5", ["5"])]
)
def test_token_keys_in_a_variable_are_one_key_or_a_list(
    make: Make, value: str, keys: list[str]
) -> None:
    auth = make(environ={"AGL__AUTH__TOKEN_KEYS": value}).auth
    assert [key.reveal() for key in auth.token_keys] == keys


@pytest.mark.parametrize(
    "text",
    [
        '[auth]\nalgorithm_key = "hunter2"',
        '[auth]\ntoken_keys = ["hunter2"]',
        '[auth]\ntoken_keys = "hunter2"',
        '[gateway]\ncredentials = "hunter2"',
        '[gateway]\ncredentials = { judge = "hunter2" }',
        '[gateway.credentials]\njudge = { env = "A", value = "hunter2" }',
        '[plugins.toy]\nkey = "hunter2"',
        'auth = "hunter2"',
    ],
)
def test_a_secret_in_clear_is_refused_and_not_shown(faults: Faults, text: str) -> None:
    [line] = faults(text, {"A": "x"})
    assert "hunter2" not in line
    assert "a secret is written" in line or "must be a" in line


@pytest.mark.parametrize(
    ("text", "environ", "said"),
    [
        (
            '[auth]\nviewer_key = { env = "K" }',
            {"K": ""},
            "agl.toml:2: auth.viewer_key: environment variable K is unset or empty",
        ),
        (
            '[auth]\nviewer_key = { env = "K" }',
            {},
            "agl.toml:2: auth.viewer_key: environment variable K is unset or empty",
        ),
        (
            None,
            {"AGL__AUTH__VIEWER_KEY": ""},
            "AGL__AUTH__VIEWER_KEY: auth.viewer_key: the variable is unset or empty",
        ),
        (
            '[auth]\nviewer_key = { file = "none.key" }',
            {},
            "agl.toml:2: auth.viewer_key: file none.key cannot be read: No such file or directory",
        ),
    ],
)
def test_an_empty_secret_is_an_error_that_names_its_source(
    faults: Faults, text: str | None, environ: dict[str, str], said: str
) -> None:
    assert faults(text, environ) == [said]


def test_a_secret_shows_nowhere(make: Make, tmp_path: Path) -> None:
    environ = {"AGL__AUTH__ALGORITHM_KEY": "hunter2"}
    assert "hunter2" not in repr(make(environ=environ))
    assert "hunter2" not in repr(raw(tmp_path, None, environ))
    assert "hunter2" not in f"{Secret('hunter2')} {Secret('hunter2')!s}"
    with pytest.raises(TypeError):
        pickle.dumps(Secret("hunter2"))
    assert Secret("hunter2").reveal() == "hunter2"


# --- finding the file ----------------------------------------------------------------------------


def test_the_file_is_the_one_named_then_the_variables_then_the_one_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_file(None, {}) is None
    Path("agl.toml").touch()
    assert find_file(None, {}) == Path("agl.toml")
    assert find_file(None, {"AGL_CONFIG": "other.toml"}) == Path("other.toml")
    assert find_file("given.toml", {"AGL_CONFIG": "other.toml"}) == Path("given.toml")
