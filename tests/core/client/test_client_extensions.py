"""Extensions of the client: headers, namespaces, and plugins that do not work."""

from __future__ import annotations

import itertools
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from agl_core.errors import HookError, PluginConflict, PluginLoadError, PluginNotFound


class Counting:
    """Headers that differ with each request, and a namespace that knows its client."""

    def __init__(self, name: str = "counting") -> None:
        self.name = name
        self.count = itertools.count(1)

    def headers(self) -> Mapping[str, str]:
        return {"X-Count": str(next(self.count)), "Authorization": "Signed"}

    def namespace(self, client: Any) -> object:
        return {"url": client.url}


class Fixed:
    name = "fixed"

    def headers(self) -> Mapping[str, str]:
        return {"X-Fixed": "yes"}

    def namespace(self, client: Any) -> object:
        return object()


TEN_LINES = """
from agl_core.hookspecs import hookimpl

class Tenant:
    name = "tenant"
    def headers(self): return {"X-Tenant": "blue"}
    def namespace(self, client): return ("tenant of", client.url)

class TenantPlugin:
    @hookimpl
    def provide_client_extension(self): return Tenant()
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch) -> Callable[..., None]:
    """Put a distribution with one client plugin on the path."""
    modules: list[str] = []

    def put(source: str, plugin: str, name: str = "tenant", dist: str = "tenant-dist") -> None:
        module = f"client_plugin_{len(modules)}_{tmp_path.name}".replace("-", "_")
        modules.append(module)
        root = tmp_path / dist
        info = root / f"{dist.replace('-', '_')}-1.2.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(
            f"[agl.client_plugins]\n{name} = {module}:{plugin}\n"
        )
        (root / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(str(root))

    yield put
    for module in modules:
        sys.modules.pop(module, None)


def test_headers_of_given_extensions_go_with_each_request_anew(make_shell, server, answer) -> None:
    server.script = lambda _: answer(json={"status": "ok"})
    shell = make_shell(key="k", extensions=[Counting(), Fixed()])
    shell.call("health")
    shell.call("health")
    sent = [(s.headers["x-count"], s.headers["x-fixed"]) for s in server.seen]
    assert sent == [("1", "yes"), ("2", "yes")]
    assert server.seen[0].headers["authorization"] == "Signed"


def test_a_repeat_gets_fresh_headers(make_shell, server, answer) -> None:
    server.script = [answer(status=503), answer(json={"status": "ok"})]
    make_shell(extensions=[Counting()]).call("health")
    assert [s.headers["x-count"] for s in server.seen] == ["1", "2"]


def test_a_plugin_of_ten_lines_adds_headers_and_a_namespace(
    make_shell, server, answer, install
) -> None:
    install(TEN_LINES, "TenantPlugin")
    server.script = lambda _: answer(json={"status": "ok"})
    shell = make_shell(extensions=("tenant",))
    shell.call("health")
    assert server.seen[0].headers["x-tenant"] == "blue"
    assert shell.client.tenant == ("tenant of", server.url)
    assert shell.client.tenant is shell.client.tenant
    assert pickle.loads(pickle.dumps(shell.client)).tenant == ("tenant of", server.url)


def test_a_namespace_is_loaded_when_it_is_first_needed_and_adds_no_headers(
    make_shell, server, answer, install
) -> None:
    install("raise SystemError('imported')", "Plugin", name="broken", dist="broken-dist")
    install(TEN_LINES, "TenantPlugin")
    server.script = lambda _: answer(json={"status": "ok"})
    shell = make_shell()
    assert shell.client.tenant[0] == "tenant of"
    shell.call("health")
    assert "x-tenant" not in server.seen[0].headers
    with pytest.raises(PluginLoadError, match=r"'broken' \(broken-dist 1\.2\).*imported"):
        _ = shell.client.broken


def test_a_given_extension_goes_before_an_installed_one(make_shell, install) -> None:
    install(TEN_LINES, "TenantPlugin")
    shell = make_shell(extensions=[Counting("tenant")])
    assert isinstance(shell.client.tenant, dict)


def test_two_of_one_name_are_an_error(make_shell, install) -> None:
    with pytest.raises(PluginConflict, match="counting"):
        make_shell(extensions=[Counting(), Counting()])
    install(TEN_LINES, "TenantPlugin")
    install(TEN_LINES, "TenantPlugin", dist="other-dist")
    with pytest.raises(PluginConflict, match=r"other-dist 1\.2.*tenant-dist 1\.2"):
        make_shell(extensions=["tenant"])


def test_an_unknown_name_lists_what_is_installed(make_shell) -> None:
    with pytest.raises(PluginNotFound, match=r"'verI'.*installed: .*verl"):
        make_shell(extensions=["verI"])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (TEN_LINES.replace("provide_client_", "provide_cilent_"), "provide_cilent_extension"),
        (TEN_LINES.replace("return Tenant()", "return None"), "gave nothing"),
        (TEN_LINES.replace("return Tenant()", "raise ValueError('inside')"), "inside"),
        (TEN_LINES.replace('name = "tenant"', 'name = "other"'), "calls itself 'other'"),
        (TEN_LINES.replace("def headers(self)", "def haeders(self)"), "no method 'headers'"),
    ],
)
def test_a_plugin_that_breaks_the_contract_is_named(make_shell, install, source, words) -> None:
    install(source, "TenantPlugin")
    with pytest.raises(HookError) as caught:
        make_shell(extensions=["tenant"])
    assert "client plugin 'tenant' (tenant-dist 1.2)" in str(caught.value)
    assert words in str(caught.value)


def test_an_extension_may_not_hide_a_method(make_shell) -> None:
    with pytest.raises(HookError, match="'wait'"):
        make_shell(extensions=[Counting("wait")])


def test_headers_that_fail_are_named_and_nothing_is_sent(make_shell, server) -> None:
    class Failing(Fixed):
        def headers(self) -> Mapping[str, str]:
            raise OSError("no token file")

    with pytest.raises(HookError, match=r"'fixed'.*no token file"):
        make_shell(extensions=[Failing()]).call("health")
    assert server.seen == []


@pytest.mark.parametrize(
    ("method", "format"), [("triplets", "triplet"), ("trajectories", "trajectory")]
)
def test_verl_gives_the_lines_of_an_export_as_a_list(shell, server, answer, method, format) -> None:
    server.script = lambda _: answer(raw=b'{"rollout_id": "r1"}\n{"rollout_id": "r2"}\n')
    namespace = shell.client.verl

    if shell.kind == "blocking":
        found = getattr(namespace, method)(["r1", "r2"], policy="p", mode="all")
    else:
        found = shell._runner.run(getattr(namespace, method)(["r1", "r2"], policy="p", mode="all"))
    assert found == [{"rollout_id": "r1"}, {"rollout_id": "r2"}]
    (seen,) = server.seen
    assert seen.path == f"/api/export/{format}"
    assert dict(seen.query) == {"ids": "r1,r2", "policy": "p", "mode": "all"}
