"""The whole service on a loopback socket, with real plugins, for as long as a test lasts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import httpx
from attrs import define, frozen

from agl_core.app import Loaded, Service, create_app, load, load_asgi_server
from agl_core.config import RawConfig
from agl_core.plugin_manager import LoadedPlugin, Plugins
from agl_core.running import serve
from agl_core.testing.servers import bind_loopback

PLUGINS = ("memory", "vllm", "verl")
# Nothing in a test waits for its own sake: no pauses between retries, and servers are
# asked nothing beside the calls.
_TABLES: dict[str, dict[str, Any]] = {
    "server": {"grace_seconds": 0.5},
    "gateway": {
        "probe": False,
        "health_seconds": "none",
        "retry_backoff_seconds": 0.0,
        "hold_seconds": 20.0,
        # A request goes on as it came, so that what else changes in it is seen.
        "sampling": {"train": {"policy": "agent"}, "val": {"policy": "agent"}},
    },
    "plugins": {"vllm": {"load_seconds": "none"}},
}


@frozen(kw_only=True)
class Answer:
    """What an agent received."""

    status: int
    headers: httpx.Headers
    body: bytes
    is_clean: bool
    """Whether the answer ended as HTTP says it must."""

    @property
    def call_id(self) -> str:
        """The call's id, which its record has too."""
        return self.headers["x-request-id"]

    def json(self) -> Any:
        """The body, decoded."""
        return httpx.Response(self.status, content=self.body).json()

    @property
    def code(self) -> str:
        """The code of an error."""
        error = self.json()
        return str(error.get("error", error)["code"])


@define
class RunningService:
    """A service that runs, and what tests ask of it."""

    service: Service
    url: str
    client: httpx.AsyncClient
    stop: asyncio.Event

    def base(self, rollout_id: str, attempt_id: str = "a-1") -> str:
        """The base URL that an attempt's agent is given."""
        return f"{self.url}/rollout/{rollout_id}/attempt/{attempt_id}/v1"

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare connection to the service, for bytes that no client library sends."""
        port = int(self.url.rpartition(":")[2])
        return await asyncio.open_connection("127.0.0.1", port)

    def head(
        self, rollout_id: str, *headers: str, path: str = "chat/completions", method: str = "POST"
    ) -> bytes:
        """The bytes of a request's head; ``headers`` as they stand on the wire."""
        target = f"/rollout/{rollout_id}/attempt/a-1/v1/{path}"
        lines = [f"{method} {target} HTTP/1.1", "host: 127.0.0.1", *headers, "\r\n"]
        return "\r\n".join(lines).encode()

    async def api(self, method: str, path: str, body: Any = None, *, expect: int = 200) -> Any:
        """Call ``/api`` and return its JSON; another status than ``expect`` fails the test."""
        answer = await self.client.request(method, f"{self.url}/api{path}", json=body)
        assert answer.status_code == expect, (answer.status_code, answer.text)
        return answer.json() if answer.content else None

    async def rollout(self, rollout_id: str, **spec: Any) -> str:
        """Enqueue a rollout."""
        await self.api("POST", "/rollouts", {"rollout_id": rollout_id, **spec}, expect=201)
        return rollout_id

    async def register(self, endpoint: str, model: str = "m", **fields: Any) -> None:
        """Register a model server."""
        body = [{"model": model, "endpoint": endpoint, **fields}]
        answer = await self.client.post(f"{self.url}/api/models", json=body)
        assert answer.status_code in (200, 201), answer.text

    async def state(self, policy: str = "m") -> dict[str, Any]:
        """The gateway's state of one policy."""
        found: dict[str, Any] = (await self.api("GET", "/gateway/state"))["policies"][policy]
        return found

    async def until_state(self, policy: str = "m", **wanted: Any) -> None:
        """Wait (bound it with ``asyncio.timeout``) until the state has these values."""
        while True:
            state = (await self.api("GET", "/gateway/state"))["policies"].get(policy, {})
            if all(state.get(name) == value for name, value in wanted.items()):
                return

    async def events(
        self, rollout_id: str, event_type: str | None = "model_request"
    ) -> list[dict[str, Any]]:
        """The data of a rollout's events, of every attempt."""
        path = f"/events?rollout_id={rollout_id}&all_attempts=true"
        if event_type is not None:
            path += f"&type={event_type}"
        return [item["data"] for item in (await self.api("GET", path))["items"]]

    async def until_events(self, rollout_id: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait (bound it with ``asyncio.timeout``) until there are that many."""
        while True:
            events = await self.events(rollout_id)
            if len(events) >= count:
                return events

    async def call(
        self,
        rollout_id: str,
        body: Any = None,
        path: str = "chat/completions",
        *,
        attempt_id: str = "a-1",
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        url: str | None = None,
    ) -> Answer:
        """Call a model as an agent does.

        Args:
            rollout_id: Whose call.
            body: JSON, or bytes to be sent as they are; None: a small chat request.
            path: Below ``/v1``.
            attempt_id: Of which attempt.
            method: The HTTP method.
            headers: More headers.
            url: Instead of the attempt's own.
        """
        if body is None:
            body = chat()
        sent = {"json": body} if not isinstance(body, bytes) else {"content": body}
        target = url or f"{self.base(rollout_id, attempt_id)}/{path}"
        parts: list[bytes] = []
        is_clean = True
        async with self.client.stream(method, target, headers=headers, **sent) as answer:
            try:
                async for part in answer.aiter_raw():
                    parts.append(part)  # noqa: PERF401 - what came before a break counts
            except (httpx.RemoteProtocolError, httpx.ReadError):
                is_clean = False
        return Answer(
            status=answer.status_code,
            headers=answer.headers,
            body=b"".join(parts),
            is_clean=is_clean,
        )

    async def bare_call(self, rollout_id: str) -> int:
        """Make a small chat call on a connection of its own; the status.

        Many of these at once cost little, which keeps the agents out of what is measured.
        """
        body = json.dumps(chat()).encode()
        reader, writer = await self.connect()
        length = f"content-length: {len(body)}"
        writer.write(self.head(rollout_id, length, "content-type: application/json") + body)
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        return int(head.split(b" ", 2)[1])


def chat(**fields: Any) -> dict[str, Any]:
    """A small chat request; a field that is ``...`` is left out."""
    whole = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return {name: value for name, value in whole.items() if value is not ...}


@asynccontextmanager
async def running_service(
    tables: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    plugins: Sequence[object] = (),
    enabled: Sequence[str] = PLUGINS,
    wrap: Callable[[Loaded], Loaded] | None = None,
) -> AsyncIterator[RunningService]:
    """Run the service.

    Args:
        tables: Settings over those that suit tests, by table.
        plugins: More plugins, as objects; each is named after its class.
        enabled: Installed plugins.
        wrap: Has the last word on what was loaded.
    """
    merged: dict[str, Any] = {"plugins": {"enabled": list(enabled)}}
    for name in {*_TABLES, *(tables or {})}:
        merged[name] = {
            **merged.get(name, {}),
            **_TABLES.get(name, {}),
            **(tables or {}).get(name, {}),
        }
    loaded = load(RawConfig(name="test", tables=merged))
    extra = [
        LoadedPlugin(name=type(plugin).__name__, origin="test", instance=plugin)
        for plugin in plugins
    ]
    loaded = attrs.evolve(loaded, plugins=Plugins([*loaded.plugins.loaded, *extra]))
    if wrap is not None:
        loaded = wrap(loaded)
    service = create_app(loaded)
    sock = bind_loopback()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    stop, ready = asyncio.Event(), asyncio.Event()

    async def on_ready() -> None:
        ready.set()

    serving = asyncio.create_task(
        serve(service, load_asgi_server(loaded), sock, on_ready=on_ready, stop=stop)
    )
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        waiting.cancel()
        serving.result()
    try:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(trust_env=False, timeout=30.0, limits=limits) as client:
            yield RunningService(service, url, client, stop)
    finally:
        stop.set()
        await serving
