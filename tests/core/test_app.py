"""The composition: what stops a start, and that each hook's object is used by the service.

Every plugin here has about ten lines, as a plugin's first version has.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import attrs
import httpx
import pytest
from quart import Blueprint

from agl_core import running
from agl_core.app import Loaded, create_app, load, load_asgi_server, load_file
from agl_core.clock import Clock, SystemClock, poll
from agl_core.config import read_config
from agl_core.errors import ConfigError, HookError, Invalid, PluginConflict, PluginNotFound
from agl_core.hookspecs import hookimpl
from agl_core.interfaces import (
    Candidate,
    Exporter,
    ExportOptions,
    RolloutHooks,
    Route,
    RouteRequest,
    RouteResolver,
    Store,
    WebApp,
)
from agl_core.plugin_manager import LoadedPlugin, Plugins
from agl_core.records import Event, EventDraft, Rollout, RolloutSpec
from agl_core.settings import ServerSettings, Settings
from agl_core.testing.servers import serve_asgi
from agl_memory import MemoryConfig, MemoryPlugin, MemoryStore
from agl_verl import VerlPlugin
from agl_vllm import VllmConfig, VllmPlugin


def loaded(*instances: object) -> Loaded:
    named = [
        LoadedPlugin(name=type(one).__name__, origin="tests 1.0", instance=one) for one in instances
    ]
    return Loaded(settings=Settings(), plugins=Plugins(named), installed={})


def memory() -> MemoryPlugin:
    return MemoryPlugin(MemoryConfig())


def vllm() -> VllmPlugin:
    return VllmPlugin(VllmConfig())


@asynccontextmanager
async def running_service(*instances: object) -> AsyncIterator[httpx.AsyncClient]:
    service = create_app(loaded(*instances))
    async with (
        asyncio.timeout(20),
        service,
        serve_asgi(service.app) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=10) as client,
    ):
        yield client
        service.feed.close()


async def enqueue(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post("/api/rollouts", json=fields)
    assert answer.status_code == 201, answer.text
    rollout: dict[str, Any] = answer.json()
    return rollout


# --- what stops a start --------------------------------------------------------------------------


def test_a_service_without_a_store_does_not_start() -> None:
    with pytest.raises(PluginNotFound, match=r"provide_store \(enabled: VllmPlugin\)"):
        create_app(loaded(vllm()))


def test_a_service_with_two_stores_does_not_start() -> None:
    with pytest.raises(PluginConflict, match="'MemoryPlugin' and 'TenLineStore' both"):
        create_app(loaded(memory(), vllm(), TenLineStore()))


def test_a_service_without_a_route_resolver_does_not_start() -> None:
    with pytest.raises(PluginNotFound, match="provide_route_resolver"):
        create_app(loaded(memory()))


def test_two_exporters_of_one_format_stop_the_start() -> None:
    class OtherTriplets:
        @hookimpl
        def provide_exporter(self) -> list[Exporter]:
            exporter = IdLines()
            exporter.format = "triplet"
            return [exporter]

    with pytest.raises(PluginConflict, match=r"'VerlPlugin' and 'OtherTriplets' both .*'triplet'"):
        create_app(loaded(memory(), vllm(), VerlPlugin(), OtherTriplets()))


def routes_plugin(name: str, *rules: str, methods: Sequence[str] = ("GET",)) -> object:
    def register_routes(self: object, app: WebApp) -> None:
        blueprint = Blueprint(name, __name__)
        for number, rule in enumerate(rules):

            async def answer() -> Any:
                return {"from": name}

            blueprint.add_url_rule(rule, f"r{number}", answer, methods=list(methods))
        app.register_blueprint(blueprint)

    return type(name, (), {"register_routes": hookimpl(register_routes)})()


@pytest.mark.parametrize(
    "rule", ["/healthz", "/api/rollouts", "/api/rollouts/<name>", "/api/events"]
)
def test_a_plugin_that_takes_a_path_of_the_core_stops_the_start(rule: str) -> None:
    with pytest.raises(HookError, match=r"plugin 'Greedy' serves GET .*served already"):
        create_app(loaded(memory(), vllm(), routes_plugin("Greedy", rule)))


def test_two_plugins_with_one_path_stop_the_start_and_the_second_is_named() -> None:
    first, second = routes_plugin("First", "/page"), routes_plugin("Second", "/page")
    with pytest.raises(HookError, match="plugin 'Second' serves GET /page"):
        create_app(loaded(memory(), vllm(), first, second))


def test_another_method_of_a_path_is_no_conflict() -> None:
    first = routes_plugin("First", "/page")
    second = routes_plugin("Second", "/page", methods=["POST"])
    create_app(loaded(memory(), vllm(), first, second))


def test_register_routes_that_raises_stops_the_start_with_the_plugins_name() -> None:
    class Broken:
        @hookimpl
        def register_routes(self, app: WebApp) -> None:
            raise LookupError("no template")

    with pytest.raises(HookError, match=r"register_routes of plugin 'Broken' .*no template"):
        create_app(loaded(memory(), vllm(), Broken()))


def test_two_blueprints_of_one_name_stop_the_start() -> None:
    first, second = routes_plugin("Same", "/a"), routes_plugin("Same", "/b")
    type(second).__name__ = "Other"
    with pytest.raises(HookError, match=r"register_routes of plugin 'Other' .*'Same'"):
        create_app(loaded(memory(), vllm(), first, second))


def test_the_defaults_load_and_compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = load_file(None)
    assert [plugin.name for plugin in found.plugins.loaded] == ["memory", "vllm", "local", "verl"]
    service = create_app(found)
    assert isinstance(service.store, MemoryStore)


def test_faults_of_other_tables_are_told_beside_a_wrong_list_of_plugins(tmp_path: Path) -> None:
    path = tmp_path / "agl.toml"
    path.write_text("[plugins]\nenabled = 5\n[server]\nport = 'x'\n", encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load(read_config(path, {}))
    assert len(refused.value.problems) == 2


def test_the_settings_of_enabled_plugins_reach_them(tmp_path: Path) -> None:
    path = tmp_path / "agl.toml"
    path.write_text("[plugins.memory]\nmax_rollouts = 7\n", encoding="utf-8")
    settings = load(read_config(path, {})).settings
    assert settings.plugins.tables["memory"] == MemoryConfig(max_rollouts=7)


# --- the server ----------------------------------------------------------------------------------

SERVER = """
import attrs
from agl_core.hookspecs import hookimpl
from agl_core.serving import HypercornServer

@attrs.frozen(kw_only=True)
class Config:
    greeting: str = "hello"

class Server(HypercornServer):
    def __init__(self, greeting):
        self.greeting = greeting

class Plugin:
    Config = Config
    def __init__(self, config):
        self.config = config
    @hookimpl
    def provide_asgi_server(self):
        return Server(self.config.greeting)
"""


def load_text(folder: Path, text: str) -> Loaded:
    path = folder / "agl.toml"
    path.write_text(text, encoding="utf-8")
    return load(read_config(path, {}))


def test_the_server_is_the_one_that_server_use_names_with_its_own_table(
    install: Any, tmp_path: Path
) -> None:
    install("ten-line-server", SERVER)
    text = '[server]\nuse = "ten-line-server"\n[plugins.ten-line-server]\ngreeting = "hi"\n'
    server: Any = load_asgi_server(load_text(tmp_path, text))
    assert server.greeting == "hi"


def test_a_fault_in_the_table_of_the_server_is_told(install: Any, tmp_path: Path) -> None:
    install("ten-line-server", SERVER)
    text = '[server]\nuse = "ten-line-server"\n[plugins.ten-line-server]\ngreting = "hi"\n'
    with pytest.raises(ConfigError, match=r":4: plugins\.ten-line-server: unknown key 'greting'"):
        load_asgi_server(load_text(tmp_path, text))


@pytest.mark.parametrize(
    ("use", "said"),
    [("hypercorm", "did you mean 'hypercorn'"), ("memory", "which provides no server")],
)
def test_a_server_that_is_none_is_told(tmp_path: Path, use: str, said: str) -> None:
    found = load_text(tmp_path, f'[server]\nuse = "{use}"\n')
    with pytest.raises(PluginNotFound, match=said):
        load_asgi_server(found)


async def test_a_plugins_server_runs_the_service_until_it_is_stopped(
    install: Any, tmp_path: Path
) -> None:
    install("ten-line-server", SERVER)
    found = load_text(tmp_path, '[server]\nuse = "ten-line-server"\nport = 0\n')
    sock = running.bind(found.settings)
    url = running.url_of(sock, found.settings)
    stop = asyncio.Event()
    answers = []

    async def ask() -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            answers.append((await client.get(f"{url}/healthz")).json())
        stop.set()

    async with asyncio.timeout(20):
        await running.serve(
            create_app(found), load_asgi_server(found), sock, on_ready=ask, stop=stop
        )
    assert answers[0]["status"] == "ok"


# --- binding and certificates --------------------------------------------------------------------


def test_a_port_that_is_taken_is_told_with_the_way_out() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(running.ListenError, match=rf"127\.0\.0\.1:{port}: it is taken"):
            running.bind(Settings(server=ServerSettings(port=port)))


@pytest.mark.parametrize("host", ["no-such-host.invalid", "x" * 70, "1.2.3.4.5", ""])
def test_a_host_that_is_no_address_is_told(host: str) -> None:
    with pytest.raises(running.ListenError, match="is no address"):
        running.bind(Settings(server=ServerSettings(host=host, port=0)))


def test_an_address_of_another_machine_is_told() -> None:
    server = ServerSettings(host="192.0.2.1", port=0, insecure=True)
    with pytest.raises(running.ListenError, match="no address of this machine"):
        running.bind(Settings(server=server))


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_without_keys_the_service_binds_to_loopback_only(host: str) -> None:
    with pytest.raises(ConfigError, match="open to the network, but no key is set") as refused:
        running.bind(Settings(server=ServerSettings(host=host, port=0)))
    assert "--insecure" in (refused.value.hint or "")


def test_insecure_says_otherwise() -> None:
    settings = Settings(server=ServerSettings(host="0.0.0.0", port=0, insecure=True))
    with running.bind(settings) as sock:
        assert running.url_of(sock, settings).startswith("http://127.0.0.1:")


@pytest.mark.parametrize("key", ["private_key", "client_ca"])
def test_parts_of_tls_without_a_certificate_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} needs server.certificate"):
        running.check_certificates(attrs.evolve(ServerSettings(), **{key: "x.pem"}))


def test_a_certificate_that_cannot_be_used_is_told_with_its_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.pem.*No such file"):
        running.check_certificates(ServerSettings(certificate="nowhere.pem"))
    path = tmp_path / "junk.pem"
    path.write_text("junk", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"junk\.pem.*cannot be used"):
        running.check_certificates(ServerSettings(certificate=str(path)))


# --- ten-line plugins in a running service -------------------------------------------------------


class TenLineStore:
    """A memory store that remembers that it was opened and closed."""

    def __init__(self) -> None:
        self.life: list[str] = []

    @hookimpl
    def provide_store(self, clock: Clock) -> Store:
        life = self.life

        class NotedStore(MemoryStore):
            async def __aenter__(self) -> Self:
                life.append("opened")
                return await super().__aenter__()

            async def __aexit__(self, *exc_info: Any) -> None:
                await super().__aexit__(*exc_info)
                life.append("closed")

        return NotedStore(clock)


async def test_a_plugins_store_is_opened_used_and_closed() -> None:
    plugin = TenLineStore()
    async with running_service(plugin, vllm()) as client:
        assert plugin.life == ["opened"]
        made = await enqueue(client, input=1)
        found = await client.get(f"/api/rollouts/{made['rollout_id']}")
        assert found.json()["input"] == 1
    assert plugin.life == ["opened", "closed"]


class TenLineResolver:
    """Passes the first call on to the next resolver, and takes the last candidate after."""

    def __init__(self) -> None:
        self.seen: list[RouteRequest] = []
        self.forgotten: list[str] = []

    async def resolve(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Route | None:
        self.seen.append(request)
        if len(self.seen) == 1:
            return None
        return Route(server=candidates[-1].server, changes={"temperature": 0.5})

    def forget(self, rollout_id: str) -> None:
        self.forgotten.append(rollout_id)

    @hookimpl
    def provide_route_resolver(self) -> RouteResolver:
        return self


class TenLineSink:
    """Keeps what it receives."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.life: list[str] = []

    async def __aenter__(self) -> Self:
        self.life.append("opened")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.life.append("closed")

    async def receive(self, event: Event) -> None:
        self.events.append(event)

    @hookimpl
    def provide_capture_sink(self) -> TenLineSink:
        return self


async def echo_model(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """A model server that answers with the request in the text."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    request = json.loads(body)
    answer = {
        "id": "1",
        "object": "chat.completion",
        "model": request.get("model"),
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": json.dumps(request)},
            }
        ],
    }
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


async def test_a_plugins_resolver_decides_the_route_and_its_sink_gets_the_events() -> None:
    resolver, sink = TenLineResolver(), TenLineSink()
    async with (
        serve_asgi(echo_model) as model_url,
        running_service(memory(), resolver, vllm(), sink) as client,
    ):
        server = {"model": "m", "endpoint": f"{model_url}/v1", "trained": False}
        assert (await client.post("/api/models", json=server)).status_code < 300
        made = await enqueue(client, input=1)
        path = f"/rollout/{made['rollout_id']}/attempt/a"
        sent = []
        for _ in range(2):
            answer = await client.post(
                f"{path}/v1/chat/completions", json={"model": "m", "messages": []}
            )
            assert answer.status_code == 200, answer.text
            sent.append(json.loads(answer.json()["choices"][0]["message"]["content"]))
        assert "temperature" not in sent[0]
        assert sent[1]["temperature"] == 0.5
        assert resolver.seen[0].rollout_id == made["rollout_id"]
        assert (await client.post(f"{path}/events", json={"event_type": "note"})).is_success
        assert await poll(lambda: len(sink.events) == 3, SystemClock(), seconds=5)
        ended = await client.patch(
            f"/api/rollouts/{made['rollout_id']}", json={"status": "succeeded"}
        )
        assert ended.is_success
        assert await poll(lambda: resolver.forgotten != [], SystemClock(), seconds=5)
    kinds = [event.event_type for event in sink.events]
    assert kinds == ["model_request", "model_request", "note"]
    assert sink.life == ["opened", "closed"]


class IdLines:
    """An exporter: ids, one a line."""

    format = "ids"
    media_type = "text/plain"

    def begin(self, options: ExportOptions) -> bytes:
        if options.parameters:
            raise Invalid("'ids' takes no parameters")
        return b"# ids\n"

    def encode(self, rollout: Rollout, events: Sequence[Event], options: ExportOptions) -> bytes:
        return f"{rollout.rollout_id} {len(events)}\n".encode()

    def finish(self, options: ExportOptions) -> bytes:
        return b"# end\n"


class TenLineExporter:
    """Offers the format ``ids``."""

    @hookimpl
    def provide_exporter(self) -> list[Exporter]:
        return [IdLines()]


async def test_a_plugins_exporter_gives_its_format() -> None:
    async with running_service(memory(), vllm(), TenLineExporter()) as client:
        made = await enqueue(client, input=1)
        path = f"/rollout/{made['rollout_id']}/attempt/a/events"
        await client.post(path, json={"event_type": "note"})
        await client.patch(f"/api/rollouts/{made['rollout_id']}", json={"status": "succeeded"})
        answer = await client.get("/api/export/ids")
        assert answer.text == f"# ids\n{made['rollout_id']} 1\n# end\n"
        assert answer.headers["content-type"].startswith("text/plain")
        assert (await client.get("/api/export/ids?x=1")).status_code == 422


class TenLineHooks:
    """Adds an image at enqueue, refuses one input, and grades at the end."""

    async def on_enqueue(self, spec: RolloutSpec) -> RolloutSpec:
        if spec.input == "bad":
            raise Invalid("no bad input")
        return attrs.evolve(spec, config=attrs.evolve(spec.config, image="agent:1"))

    async def on_finished(self, rollout: Rollout, events: Sequence[Event]) -> Sequence[EventDraft]:
        return [EventDraft(event_type="reward", data={"value": float(len(events))})]

    @hookimpl
    def provide_rollout_hooks(self) -> RolloutHooks:
        return self


async def test_a_plugins_rollout_hooks_change_refuse_and_grade() -> None:
    async with running_service(memory(), vllm(), TenLineHooks()) as client:
        made = await enqueue(client, input="good")
        assert made["config"]["image"] == "agent:1"
        refused = await client.post("/api/rollouts", json={"input": "bad"})
        assert refused.status_code == 422
        assert "no bad input" in refused.json()["detail"]
        path = f"/rollout/{made['rollout_id']}/attempt/a/events"
        await client.post(path, json=[{"event_type": "note"}, {"event_type": "note"}])
        await client.patch(f"/api/rollouts/{made['rollout_id']}", json={"status": "succeeded"})
        listed = await client.get("/api/events", params={"rollout_id": made["rollout_id"]})
        reward = listed.json()["items"][-1]
        assert (reward["event_type"], reward["data"]["value"]) == ("reward", 2.0)


async def test_a_plugins_routes_are_served_beside_the_cores() -> None:
    plugin = routes_plugin("Page", "/page")
    async with running_service(memory(), vllm(), plugin) as client:
        assert (await client.get("/page")).json() == {"from": "Page"}
        assert (await client.get("/healthz")).status_code == 200


async def test_healthz_tells_which_plugins_run() -> None:
    async with running_service(memory(), vllm()) as client:
        told: Mapping[str, Any] = (await client.get("/healthz")).json()
    assert [plugin["name"] for plugin in told["plugins"]] == ["MemoryPlugin", "VllmPlugin"]
