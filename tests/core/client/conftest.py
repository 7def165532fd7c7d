"""A scripted HTTP server on loopback, and both clients behind one face."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from attrs import define, field, frozen

from agl_core.client import AglLiteClient, AsyncAglLiteClient


@frozen
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    query: tuple[tuple[str, str], ...]
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body) if self.body else None


@define
class Answer:
    """One scripted answer."""

    status: int = 200
    json: Any = None
    headers: dict[str, str] = field(factory=dict)
    raw: bytes | None = None
    media_type: str = "application/json"
    breaks_off: bool = False
    """Fewer bytes come than were announced, then the connection closes."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that leave are part of the tests."""


class ScriptedServer:
    """Answers each request with what ``script`` returns; a list is answered one by one."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.connections = 0
        self.script: Callable[[Seen], Answer] | list[Answer] = lambda _: Answer(json={})
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._server = _Server(("127.0.0.1", self.port), self._handler())
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        with self._lock:
            for connection in self._open:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def answer(self, seen: Seen) -> Answer:
        with self._lock:
            self.seen.append(seen)
            if isinstance(self.script, list):
                return self.script.pop(0)
        return self.script(seen)

    def _handler(server) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                with server._lock:
                    server.connections += 1
                    server._open.add(self.connection)

            def finish(self) -> None:
                try:
                    super().finish()
                finally:
                    with server._lock:
                        server._open.discard(self.connection)

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def handle_any(self) -> None:
                parts = urlsplit(self.path)
                seen = Seen(
                    method=self.command,
                    path=parts.path,
                    query=tuple(parse_qsl(parts.query, keep_blank_values=True)),
                    headers={k.lower(): v for k, v in self.headers.items()},
                    body=self.rfile.read(int(self.headers.get("content-length", 0))),
                )
                answer = server.answer(seen)
                body = answer.raw if answer.raw is not None else json.dumps(answer.json).encode()
                if answer.status == 204:
                    body = b""
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                if answer.status != 204:
                    self.send_header("content-type", answer.media_type)
                    announced = len(body) + (10 if answer.breaks_off else 0)
                    self.send_header("content-length", str(announced))
                self.end_headers()
                self.wfile.write(body)
                if answer.breaks_off:
                    self.close_connection = True

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any

        return Handler


class Blocking:
    """The blocking client, as it is."""

    kind = "blocking"

    def __init__(self, **options: Any) -> None:
        self.client = AglLiteClient(**options)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.client, name)(*args, **kwargs)
        return [*result] if isinstance(result, Iterator) else result

    def update(self, body: Callable[[], None], **kwargs: Any) -> None:
        with self.client.weight_update(**kwargs):
            body()

    def close(self) -> None:
        self.client.close()


class Asynchronous:
    """The asynchronous client, in an event loop of its own."""

    kind = "asynchronous"

    def __init__(self, **options: Any) -> None:
        self.client = AsyncAglLiteClient(**options)
        self._runner = asyncio.Runner()

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        async def run() -> Any:
            result = getattr(self.client, name)(*args, **kwargs)
            if hasattr(result, "__aiter__"):
                return [item async for item in result]
            return await result

        return self._runner.run(run())

    def update(self, body: Callable[[], None], **kwargs: Any) -> None:
        async def run() -> None:
            async with self.client.weight_update(**kwargs):
                body()

        self._runner.run(run())

    def close(self) -> None:
        self._runner.run(self.client.close())
        self._runner.close()


Shell = Blocking | Asynchronous


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGL_URL", raising=False)
    monkeypatch.delenv("AGL_KEY", raising=False)


@pytest.fixture(params=[Blocking, Asynchronous], ids=["blocking", "asynchronous"])
def make_shell(
    request: pytest.FixtureRequest, server: ScriptedServer
) -> Iterator[Callable[..., Shell]]:
    made: list[Shell] = []

    def make(**options: Any) -> Shell:
        made.append(request.param(**{"url": server.url, **options}))
        return made[-1]

    yield make
    for shell in made:
        with closing(shell):
            pass


@pytest.fixture
def shell(make_shell: Callable[..., Shell]) -> Shell:
    return make_shell()


@pytest.fixture
def answer() -> type[Answer]:
    return Answer
