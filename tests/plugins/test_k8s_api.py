"""The API client against servers on loopback that answer, and fail, as scripted."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from agl_core.clock import SystemClock
from agl_core.errors import ConfigError
from agl_core.testing.clock import FakeClock
from agl_core.testing.servers import bind_loopback
from agl_k8s.api import KubeApi
from agl_k8s.config import K8sConfig
from agl_k8s.errors import IDLE, KubeError, error_of_answer, kind_of

JOBS = "/apis/batch/v1/namespaces/spot/jobs"
PODS = "/api/v1/namespaces/spot/pods"


class RecordingClock(SystemClock):
    """Notes what is waited for instead of waiting."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        await super().sleep(0)


@attrs.define
class Server:
    """Answers with what ``answer`` makes of each request."""

    url: str = ""
    requests: list[Any] = attrs.field(factory=list)
    bodies: list[Any] = attrs.field(factory=list)


@asynccontextmanager
async def serve(
    answer: Callable[[Any], Awaitable[Any]], *, tls: Any = None
) -> AsyncIterator[Server]:
    from aiohttp import web

    server = Server()

    async def take(request: web.Request) -> web.StreamResponse:
        server.requests.append(request)
        body = await request.read()
        server.bodies.append(json.loads(body) if body else None)
        return await answer(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", take)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    sock = bind_loopback()
    try:
        await web.SockSite(runner, sock, ssl_context=tls).start()
        server.url = f"http{'s' if tls else ''}://127.0.0.1:{sock.getsockname()[1]}"
        yield server
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serve_raw(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[Server]:
    """For faults below HTTP: ``answer`` has the socket once a request's head was read."""
    server = Server()
    open_writers: list[asyncio.StreamWriter] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_writers.append(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                server.requests.append(head.decode())
                await answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    sock = bind_loopback()
    async with await asyncio.start_server(take, sock=sock) as listening:
        server.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        yield server
        listening.close()
        for writer in open_writers:
            writer.transport.abort()


def kubeconfig(folder: Path, url: str, *, cluster: dict | None = None, **user: Any) -> Path:
    """A kubeconfig file; JSON is YAML."""
    path = folder / "kubeconfig"
    config = {
        "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": url} | (cluster or {})}],
        "users": [{"name": "u", "user": user}],
        "contexts": [
            {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "spot"}}
        ],
    }
    path.write_text(json.dumps(config))
    return path


def connect(
    folder: Path, url: str, clock: Any = None, *, request_seconds: float = 30.0, **user: Any
) -> KubeApi:
    path = kubeconfig(folder, url, **({"token": "t0"} | user))
    config = K8sConfig(kubeconfig=str(path))
    return KubeApi(config, clock or SystemClock(), request_seconds=request_seconds)


@pytest.fixture(autouse=True)
def _no_cluster_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def reply(body: Any, status: int = 200, **headers: str) -> Any:
    from aiohttp import web

    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if isinstance(body, str):
        return web.Response(text=body, status=status, headers=named)
    return web.json_response(body, status=status, headers=named)


def status(code: int, reason: str, message: str, **details: Any) -> dict[str, Any]:
    return {
        "kind": "Status",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
        "details": details,
    }


def pod(name: str = "p", version: str = "1") -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": f"uid-{name}", "resourceVersion": version}}


async def raised(work: Awaitable[Any]) -> KubeError:
    with pytest.raises(KubeError) as caught:
        await work
    return caught.value


# --- which cluster -------------------------------------------------------------------------------


def test_the_import_of_the_api_brings_no_kubernetes_client():
    code = (
        "import sys, agl_k8s.api, agl_k8s.reflector, agl_k8s.lease\n"
        "print([name for name in ('kubernetes', 'aiohttp', 'yaml') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_the_context_and_the_namespace_of_the_settings_win(tmp_path: Path):
    two = {
        "current-context": "a",
        "clusters": [
            {"name": "a", "cluster": {"server": "http://127.0.0.1:1"}},
            {"name": "b", "cluster": {"server": "http://127.0.0.1:2/prefix/"}},
        ],
        "contexts": [
            {"name": "a", "context": {"cluster": "a", "namespace": "of-a"}},
            {"name": "b", "context": {"cluster": "b"}},
        ],
        "users": None,
    }
    path = tmp_path / "two"
    path.write_text(json.dumps(two))

    async def where(**settings: Any) -> tuple[str, str]:
        config = K8sConfig(kubeconfig=str(path), **settings)
        async with KubeApi(config, SystemClock()) as api:
            error = await raised(api.get("pods", "p"))
            return error.message.split(": ")[1], api.namespace

    assert await where() == ("http://127.0.0.1:1", "of-a")
    assert await where(context="b") == ("http://127.0.0.1:2/prefix", "default")
    assert await where(namespace="mine") == ("http://127.0.0.1:1", "mine")


async def test_files_of_the_variable_kubeconfig_are_merged(tmp_path: Path, monkeypatch):
    async def answer(request: Any) -> Any:
        return reply(pod() | {"token": request.headers["Authorization"]})

    async with serve(answer) as server:
        first, second = tmp_path / "first", tmp_path / "second" / "config"
        second.parent.mkdir()
        context = {"cluster": "c", "user": "u"}
        first.write_text(
            json.dumps(
                {
                    "current-context": "x",
                    "contexts": [{"name": "x", "context": context}],
                    "clusters": [{"name": "c", "cluster": {"server": server.url}}],
                }
            )
        )
        # The path of a token is relative to the file that has it.
        user = {"name": "u", "user": {"tokenFile": "token"}}
        second.write_text(json.dumps({"users": [user]}))
        (second.parent / "token").write_text("from-file\n")
        monkeypatch.setenv("KUBECONFIG", f"{first}{os.pathsep}{tmp_path / 'none'}:{second}")
        async with KubeApi(K8sConfig(), SystemClock()) as api:
            assert (await api.get("pods", "p"))["token"] == "Bearer from-file"


@pytest.mark.parametrize(
    ("settings", "content", "env", "words"),
    [
        ({"kubeconfig": "{tmp}/none"}, None, {}, "plugins.k8s.kubeconfig is '{tmp}/none'"),
        ({}, None, {"KUBECONFIG": "{tmp}/none"}, "KUBECONFIG is '{tmp}/none'"),
        ({}, None, {}, "no cluster is known"),
        ({"context": "x"}, None, {}, "plugins.k8s.context is 'x', but there is no kubeconfig"),
        ({"context": "x"}, {}, {}, "context 'x', cannot be used"),
        ({}, "{: not yaml", {}, "kubeconfig {tmp}/kubeconfig cannot be used"),
        ({}, "just text", {}, "kubeconfig {tmp}/kubeconfig cannot be used: it is no kubeconfig"),
        ({}, "", {}, "kubeconfig {tmp}/kubeconfig cannot be used: it is no kubeconfig"),
        ({}, {"tokenFile": "/none/token"}, {}, "No such file"),
        ({}, {"exec": {"command": "false", "apiVersion": "v1"}}, {}, "credential plugin"),
        ({}, {"client-certificate-data": "Z", "client-key-data": "Z"}, {}, "cannot be used"),
        ({}, {"client-certificate-data": "Zm9v", "client-key-data": "Zm9v"}, {}, "certificates"),
    ],
)
async def test_what_is_wrong_with_the_configuration_is_told(
    settings: dict, content: Any, env: dict, words: str, tmp_path: Path, monkeypatch
):
    for name, value in env.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    settings = {name: value.format(tmp=tmp_path) for name, value in settings.items()}
    if content is not None:
        path = (
            kubeconfig(tmp_path, "https://127.0.0.1:1", **content if content else {})
            if (isinstance(content, dict))
            else tmp_path / "kubeconfig"
        )
        if isinstance(content, str):
            path.write_text(content)
        settings["kubeconfig"] = str(path)
    with pytest.raises(ConfigError) as caught:
        async with KubeApi(K8sConfig(**settings), SystemClock()):
            pass
    assert words.format(tmp=tmp_path) in caught.value.message
    assert caught.value.hint


async def test_a_pod_whose_account_is_not_mounted_is_told_so(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    api = KubeApi(K8sConfig(), SystemClock(), service_account=tmp_path)
    with pytest.raises(ConfigError, match="automountServiceAccountToken"):
        await api.__aenter__()


# --- who we are ----------------------------------------------------------------------------------


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that is its own authority, and its key."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", f"/CN={name}"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
            *("-addext", "keyUsage=critical,digitalSignature,keyCertSign"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


class Tokens:
    """Lets in who has the right token."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.refused = 0

    async def answer(self, request: Any) -> Any:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            self.refused += 1
            return reply(status(401, "Unauthorized", "Unauthorized"), 401)
        if request.query.get("watch"):
            return reply(json.dumps({"type": "ADDED", "object": pod()}) + "\n")
        return reply(pod())


@pytest.fixture
async def in_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    import ssl

    certificate, key = make_certificate(tmp_path, "apiserver")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    account = tmp_path / "account"
    account.mkdir()
    (account / "ca.crt").write_bytes(certificate.read_bytes())
    (account / "namespace").write_text("of-the-pod")
    (account / "token").write_text("A\n")
    tokens = Tokens("A")
    async with serve(tokens.answer, tls=tls) as server:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", server.url.rpartition(":")[2])
        async with KubeApi(K8sConfig(), SystemClock(), service_account=account) as api:
            yield api, tokens, account / "token"


async def test_c53_a_token_file_that_was_replaced_is_read_before_anything_is_refused(in_cluster):
    api, tokens, token_file = in_cluster
    await api.get("pods", "p")
    assert api.namespace == "of-the-pod"

    (token_file.parent / "new").write_text("B")
    (token_file.parent / "new").rename(token_file)
    tokens.token = "B"

    await api.get("pods", "p")
    assert tokens.refused == 0


async def test_c53_a_refused_token_is_read_again_and_tried_once(in_cluster):
    api, tokens, token_file = in_cluster
    await api.get("pods", "p")
    before = token_file.stat()

    # Written in place, and looks the same from outside.
    token_file.write_text("B\n")
    os.utime(token_file, ns=(before.st_atime_ns, before.st_mtime_ns))
    tokens.token = "B"

    await api.create("jobs", {"kind": "Job"})
    assert tokens.refused == 1
    async with aclosing(api.watch("pods", resource_version="1")) as events:
        assert [event.type async for event in events] == ["ADDED"]
    assert tokens.refused == 1


async def test_c53_a_token_that_stays_refused_costs_one_request_a_call(in_cluster):
    api, tokens, token_file = in_cluster
    tokens.token = "B"
    assert kind_of(await raised(api.get("pods", "p"))) == "unauthorized"
    assert tokens.refused == 1

    token_file.write_text("B")
    await api.get("pods", "p")
    assert tokens.refused == 1


async def test_c53_the_token_file_of_a_kubeconfig_is_followed(tmp_path: Path):
    token_file = tmp_path / "token"
    token_file.write_text("A")
    tokens = Tokens("A")
    async with serve(tokens.answer) as server:
        path = kubeconfig(tmp_path, server.url, tokenFile="token")
        async with KubeApi(K8sConfig(kubeconfig=str(path)), SystemClock()) as api:
            await api.get("pods", "p")
            token_file.write_text("longer")
            tokens.token = "longer"
            await api.get("pods", "p")
    assert tokens.refused == 0


PLUGIN = """
import datetime, json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
with (folder / "runs").open("a") as runs:
    runs.write("x")
status = json.loads((folder / "status").read_text())
print(json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
                  "status": status}))
"""


def credential_plugin(folder: Path) -> dict[str, Any]:
    (folder / "plugin.py").write_text(PLUGIN)
    return {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": sys.executable,
            "args": [str(folder / "plugin.py"), str(folder)],
        }
    }


async def test_a_credential_plugin_is_asked_again_when_its_token_is_refused(tmp_path: Path):
    (tmp_path / "status").write_text(json.dumps({"token": "A"}))
    tokens = Tokens("A")
    async with serve(tokens.answer) as server:
        path = kubeconfig(tmp_path, server.url, **credential_plugin(tmp_path))
        async with KubeApi(K8sConfig(kubeconfig=str(path)), SystemClock()) as api:
            await api.get("pods", "p")
            (tmp_path / "status").write_text(json.dumps({"token": "B"}))
            tokens.token = "B"
            await asyncio.gather(*(api.get("pods", "p") for _ in range(5)))
            assert (tmp_path / "runs").read_text() == "xx"  # one run for all five

            # A plugin that keeps handing out bad tokens is not run for each request.
            tokens.token = "C"
            for _ in range(5):
                assert kind_of(await raised(api.get("pods", "p"))) == "unauthorized"
    assert (tmp_path / "runs").read_text() == "xx"


async def test_a_credential_plugin_is_asked_again_before_its_token_ends(tmp_path: Path):
    clock = FakeClock()
    expiry = {"expirationTimestamp": "2025-06-15T15:21:40Z"}  # 15 minutes after the clock's start
    (tmp_path / "status").write_text(json.dumps({"token": "A"} | expiry))
    tokens = Tokens("A")
    async with serve(tokens.answer) as server:
        path = kubeconfig(tmp_path, server.url, **credential_plugin(tmp_path))
        async with KubeApi(K8sConfig(kubeconfig=str(path)), clock) as api:
            clock.advance(13 * 60)
            await api.get("pods", "p")
            assert (tmp_path / "runs").read_text() == "x"
            (tmp_path / "status").write_text(json.dumps({"token": "B"}))
            tokens.token = "B"
            clock.advance(90)
            await api.get("pods", "p")
    assert tokens.refused == 0


async def test_a_client_certificate_of_a_kubeconfig_is_shown(tmp_path: Path):
    import base64
    import ssl

    certificate, key = make_certificate(tmp_path, "apiserver")
    own, own_key = make_certificate(tmp_path, "somebody")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(own))
    tls.load_cert_chain(certificate, key)
    tls.verify_mode = ssl.CERT_REQUIRED

    async def answer(request: Any) -> Any:
        subject = request.transport.get_extra_info("peercert")["subject"]
        return reply(pod() | {"subject": subject[0][0][1]})

    def data(path: Path) -> str:
        return base64.b64encode(path.read_bytes()).decode()

    async with serve(answer, tls=tls) as server:
        trusted = {"certificate-authority-data": data(certificate)}
        shown = {"client-certificate-data": data(own), "client-key-data": data(own_key)}
        path = kubeconfig(tmp_path, server.url, cluster=trusted, **shown)
        async with KubeApi(K8sConfig(kubeconfig=str(path)), SystemClock()) as api:
            assert (await api.get("pods", "p"))["subject"] == "somebody"
        path = kubeconfig(tmp_path, server.url, **shown)
        async with KubeApi(K8sConfig(kubeconfig=str(path)), SystemClock()) as api:
            error = await raised(api.get("pods", "p"))
            assert error.status == 0
            assert "certificate" in error.message.lower()


async def test_no_proxy_stands_before_this_machine_and_one_does_before_others(
    tmp_path: Path, monkeypatch
):
    async def answer(request: Any) -> Any:
        return reply(pod())

    async with serve(answer) as server, serve(answer) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        async with connect(tmp_path, server.url) as api:
            await api.get("pods", "p")
        assert len(server.requests) == 1
        assert not proxy.requests
        async with connect(tmp_path, "http://cluster.invalid") as api:
            await api.get("pods", "p")
        assert [request.host for request in proxy.requests] == ["cluster.invalid"]


# --- calls and their answers ---------------------------------------------------------------------


async def test_calls_are_what_the_api_server_documents(tmp_path: Path):
    async def answer(request: Any) -> Any:
        if request.path.endswith("selfsubjectaccessreviews"):
            return reply({"status": {"allowed": True}}, 201)
        return reply(pod(), 201 if request.method == "POST" else 200)

    async with serve(answer) as server, connect(tmp_path, server.url) as api:
        await api.create("jobs", {"kind": "Job"})
        await api.create("secrets", {"kind": "Secret"})
        await api.replace("leases", "a/b", {"kind": "Lease"})
        assert await api.review_access("get", "", "pods", "log")
    assert [(r.method, r.raw_path) for r in server.requests] == [
        ("POST", f"{JOBS}?fieldValidation=Strict"),
        ("POST", "/api/v1/namespaces/spot/secrets"),
        ("PUT", "/apis/coordination.k8s.io/v1/namespaces/spot/leases/a%2Fb"),
        ("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"),
    ]
    assert server.bodies[:3] == [{"kind": "Job"}, {"kind": "Secret"}, {"kind": "Lease"}]
    assert server.bodies[3]["spec"]["resourceAttributes"] == {
        "namespace": "spot",
        "verb": "get",
        "group": "",
        "resource": "pods",
        "subresource": "log",
    }
    assert server.requests[0].headers["Authorization"] == "Bearer t0"


async def test_a_deletion_says_what_becomes_of_dependents(tmp_path: Path):
    async def answer(request: Any) -> Any:
        if request.path.endswith("gone"):
            return reply(status(404, "NotFound", 'pods "gone" not found'), 404)
        if request.path.endswith("other"):
            return reply(status(409, "Conflict", "the UID in the precondition ..."), 409)
        return reply(status(200, "", ""))

    async with serve(answer) as server, connect(tmp_path, server.url) as api:
        assert await api.delete("jobs", "j", propagation="Foreground", uid="u1") is True
        assert await api.delete("pods", "p", grace_seconds=0) is True
        assert await api.delete("jobs", "j") is True
        assert await api.delete("pods", "gone") is False
        assert kind_of(await raised(api.delete("jobs", "other", uid="u2"))) == "conflict"
    options = {"apiVersion": "v1", "kind": "DeleteOptions"}
    assert server.bodies[:3] == [
        options | {"propagationPolicy": "Foreground", "preconditions": {"uid": "u1"}},
        options | {"gracePeriodSeconds": 0},
        options | {"propagationPolicy": "Background"},  # never left to the default, which orphans
    ]


QUOTA = 'jobs.batch "j" is forbidden: exceeded quota: q, requested: count/jobs.batch=1, used: 1'
RBAC = 'jobs.batch is forbidden: User "system:serviceaccount:a:b" cannot create resource "jobs"'
ENDING = 'jobs.batch "j" is forbidden: unable to create new content in namespace spot'


@pytest.mark.parametrize(
    ("code", "body", "kind"),
    [
        (409, status(409, "AlreadyExists", 'jobs.batch "j" already exists'), "exists"),
        (
            409,
            status(409, "AlreadyExists", 'object is being deleted: jobs.batch "j" already exists'),
            "being_deleted",
        ),
        (409, status(409, "Conflict", "the object has been modified"), "conflict"),
        (404, status(404, "NotFound", 'jobs.batch "j" not found'), "not_found"),
        (400, status(400, "BadRequest", 'strict decoding error: unknown field "x"'), "invalid"),
        (422, status(422, "Invalid", "spec.backoffLimit: Invalid value: -1"), "invalid"),
        (413, status(413, "RequestEntityTooLarge", "limit is 3145728"), "invalid"),
        (403, status(403, "Forbidden", QUOTA), "quota"),
        (403, status(403, "Forbidden", RBAC), "forbidden"),
        (
            403,
            status(403, "Forbidden", ENDING, causes=[{"reason": "NamespaceTerminating"}]),
            "namespace_terminating",
        ),
        (401, status(401, "Unauthorized", "Unauthorized"), "unauthorized"),
        (410, status(410, "Expired", "too old resource version"), "expired"),
        (429, "Too many requests, please try again later.", "busy"),
        (500, status(500, "InternalError", "etcdserver: request timed out"), "busy"),
        (502, "<html><body>Bad Gateway</body></html>", "busy"),
        (504, status(504, "Timeout", "Too large resource version"), "busy"),
        (403, "<html>the firewall's page</html>", "forbidden"),
        (404, b"\xff\x00", "not_found"),
        (500, "[1]", "busy"),
        (422, {"kind": "Status", "details": None, "causes": 1}, "invalid"),
    ],
)
def test_c67_what_a_refusal_means_is_told_from_its_reason_and_its_text(
    code: int, body: Any, kind: str
):
    raw = body if isinstance(body, bytes) else body if isinstance(body, str) else json.dumps(body)
    error = error_of_answer("POST jobs", code, {}, raw if isinstance(raw, bytes) else raw.encode())
    assert kind_of(error) == kind
    assert error.status == code
    assert error.message


async def test_a_busy_server_is_asked_again_when_it_says(tmp_path: Path):
    clock = RecordingClock()
    left = 2

    async def answer(request: Any) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            return reply("Too many requests", 429, Retry_After="1" if left else "3600")
        return reply({"metadata": {"resourceVersion": "7"}, "items": None})

    async with serve(answer) as server, connect(tmp_path, server.url, clock) as api:
        assert (await api.list("jobs")).resource_version == "7"
        assert 1.0 <= clock.waits[0] <= 1.25
        assert 10.0 <= clock.waits[1] <= 12.5  # and not an hour
        left = 1000
        error = await raised(api.delete("jobs", "j"))
    assert (kind_of(error), len(server.requests)) == ("busy", 3 + 3)


async def test_a_creation_is_never_sent_twice_by_itself(tmp_path: Path):
    clock = RecordingClock()

    async def answer(request: Any) -> Any:
        return reply("Too many requests", 429, Retry_After="7")

    async with serve(answer) as server, connect(tmp_path, server.url, clock) as api:
        error = await raised(api.create("jobs", {}))
        assert (kind_of(error), error.retry_after_seconds) == ("busy", 7.0)
        assert (len(server.requests), clock.waits) == (1, [])

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(2)  # the body, so that it may well have been obeyed
        writer.close()

    async with serve_raw(hang_up) as raw_server, connect(tmp_path, raw_server.url, clock) as api:
        error = await raised(api.create("jobs", {}))
        assert (error.status, kind_of(error)) == (0, "unreachable")
        assert len(raw_server.requests) == 1


async def test_an_answer_that_does_not_come_ends_by_a_limit(tmp_path: Path):
    async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with (
        serve_raw(stay_silent) as server,
        connect(tmp_path, server.url, request_seconds=0.2) as api,
    ):
        for call in (api.create("jobs", {}), api.get("jobs", "j"), api.list("jobs")):
            error = await raised(call)
            assert (error.status, error.reason) == (0, IDLE)


async def test_what_is_no_object_is_an_error_that_shows_it(tmp_path: Path):
    bodies = iter(["<html>welcome to the hotel</html>", "", "[]", '{"metadata": {"cut', "{}"])

    async def answer(request: Any) -> Any:
        return reply(next(bodies))

    async with serve(answer) as server, connect(tmp_path, server.url) as api:
        error = await raised(api.create("jobs", {}))
        assert kind_of(error) == "unreachable"  # a get by name tells whether it was made
        assert "welcome to the hotel" in error.message
        for _ in range(3):
            assert (await raised(api.get("jobs", "j"))).status == 0
        assert (await raised(api.list("jobs"))).status == 0

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b'{"metadata": {')
        writer.close()

    async with serve_raw(cut) as server, connect(tmp_path, server.url) as api:
        assert (await raised(api.get("jobs", "j"))).status == 0

    async with connect(tmp_path, server.url) as api:
        error = await raised(api.get("jobs", "j"))
        assert (error.status, server.url in error.message) == (0, True)  # nobody listens there


async def test_c70_lists_are_read_to_the_end_and_begun_anew_when_they_expire(tmp_path: Path):
    jobs = [{"metadata": {"name": f"j{n}", "uid": str(n)}} for n in range(1200)]
    expires = True

    async def answer(request: Any) -> Any:
        nonlocal expires
        start = int(request.query.get("continue", "0 ").split()[0])
        if start == 1000 and expires:
            expires = False
            rest = status(410, "Expired", "The provided continue parameter is too old")
            return reply(rest | {"metadata": {"continue": "1100 inconsistent"}}, 410)
        page: dict[str, Any] = {"resourceVersion": "99"}
        end = start + int(request.query["limit"])
        if end < len(jobs):
            page["continue"] = f"{end} token=="
        listed = {"kind": "JobList", "apiVersion": "batch/v1", "metadata": page}
        return reply(listed | {"items": jobs[start:end]})

    async with serve(answer) as server, connect(tmp_path, server.url) as api:
        listing = await api.list("jobs", label_selector="a=b,c!=d", field_selector="x=y")
    assert [item["metadata"] for item in listing.items] == [job["metadata"] for job in jobs]
    assert listing.resource_version == "99"
    assert {(item["kind"], item["apiVersion"]) for item in listing.items} == {("Job", "batch/v1")}
    assert len(server.requests) == 3 + 3
    for request in server.requests:
        assert request.query["limit"] == "500"
        assert request.query["labelSelector"] == "a=b,c!=d"
        assert request.query["fieldSelector"] == "x=y"


# --- logs ----------------------------------------------------------------------------------------


async def test_the_end_of_a_log_is_kept_while_it_is_read(tmp_path: Path):
    lines = b"".join(b"line %d\n" % n for n in range(200_000))

    async def answer(request: Any) -> Any:
        from aiohttp import web

        return web.Response(body=lines)

    async with serve(answer) as server, connect(tmp_path, server.url) as api:
        tail = await api.log_tail("p", "agent", lines=400_000, size_bytes=5000)
        assert tail == lines[-5000:]
        assert await api.log_tail("p", "agent", lines=1, size_bytes=10**7) == lines
    # limitBytes is no use: it cuts the end.
    assert dict(server.requests[0].query) == {"container": "agent", "tailLines": "400000"}
    assert server.requests[0].path == f"{PODS}/p/log"


@pytest.mark.parametrize(
    ("code", "body"),
    [
        (404, status(404, "NotFound", 'pods "p" not found')),
        (400, status(400, "BadRequest", 'container "agent" in pod "p" is waiting to start: X')),
        (200, "unable to retrieve container logs for containerd://0123"),
    ],
)
async def test_a_log_that_is_not_there_is_none(code: int, body: Any, tmp_path: Path):
    async def answer(request: Any) -> Any:
        return reply(body, code)

    async with serve(answer) as server, connect(tmp_path, server.url) as api:
        assert await api.log_tail("p", "agent", lines=10, size_bytes=100) is None


async def test_a_log_that_cannot_be_read_is_not_none(tmp_path: Path):
    async def answer(request: Any) -> Any:
        return reply(status(403, "Forbidden", 'User "x" cannot get resource "pods/log"'), 403)

    async with serve(answer) as server, connect(tmp_path, server.url) as api:
        error = await raised(api.log_tail("p", "agent", lines=10, size_bytes=100))
        assert kind_of(error) == "forbidden"


async def test_a_log_is_followed_as_it_is_written(tmp_path: Path):
    seen = asyncio.Event()

    async def answer(request: Any) -> Any:
        from aiohttp import web

        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first\n")
        await asyncio.wait_for(seen.wait(), 5)
        await response.write(b"second\n")
        return response

    async with (
        serve(answer) as server,
        connect(tmp_path, server.url) as api,
        aclosing(api.read_log("p", "agent", follow=True)) as pieces,
    ):
        assert await anext(pieces) == b"first\n"
        seen.set()
        assert [piece async for piece in pieces] == [b"second\n"]
    assert dict(server.requests[0].query) == {"container": "agent", "follow": "true"}


# --- watches -------------------------------------------------------------------------------------


def watch_of(*lines: Any, end: bytes = b"") -> Callable[[Any], Awaitable[Any]]:
    async def answer(request: Any) -> Any:
        texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        return reply(b"".join(text + b"\n" for text in texts).decode() + end.decode())

    return answer


async def events_of(api: KubeApi, **options: Any) -> list[Any]:
    async with aclosing(api.watch("pods", resource_version="5", **options)) as events:
        return [event async for event in events]


async def test_a_watch_gives_changes_and_bookmarks_until_the_server_ends_it(tmp_path: Path):
    told = [
        {"type": "ADDED", "object": pod("a", "6")},
        {"type": "MODIFIED", "object": pod("a", "7")},
        {"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": "9"}}},
        {"type": "DELETED", "object": pod("a", "10")},
    ]
    async with serve(watch_of(*told)) as server, connect(tmp_path, server.url) as api:
        events = await events_of(api, label_selector="a=b", timeout_seconds=42)
    assert [{"type": event.type, "object": event.object} for event in events] == told
    assert dict(server.requests[0].query) == {
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": "5",
        "timeoutSeconds": "42",
        "labelSelector": "a=b",
    }


GONE = status(410, "Expired", "too old resource version: 5 (70)")


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (
            watch_of({"type": "ADDED", "object": pod()}, {"type": "ERROR", "object": GONE}),
            "expired",
        ),
        (watch_of({"type": "ERROR", "object": status(500, "InternalError", "no")}), "busy"),
        (
            watch_of({"type": "ADDED", "object": pod()}, end=b'{"type": "ADDED", "obj'),
            "unreachable",
        ),
        (watch_of(b"<html>", b"<body>"), "unreachable"),
        (watch_of(["a", "list"]), "unreachable"),
        (watch_of({"type": "ADDED", "object": {"no": "metadata"}}), "unreachable"),
        (watch_of({"type": "CHANGED", "object": pod()}), "unreachable"),
    ],
)
async def test_c52_a_line_that_is_no_change_ends_the_watch_with_what_it_means(
    answer: Any, kind: str, tmp_path: Path
):
    async with serve(answer) as server, connect(tmp_path, server.url) as api:
        assert kind_of(await raised(events_of(api))) == kind


async def test_c52_the_status_of_a_watch_is_looked_at_before_its_lines(tmp_path: Path):
    answers = iter([reply(GONE, 410), reply("<html>Bad Gateway</html>", 502), reply("no", 429)])

    async def answer(request: Any) -> Any:
        return next(answers)

    async with serve(answer) as server, connect(tmp_path, server.url) as api:
        assert [kind_of(await raised(events_of(api))) for _ in range(3)] == [
            "expired",
            "busy",
            "busy",
        ]


async def test_lines_of_a_watch_may_be_as_long_as_objects_are(tmp_path: Path):
    def change(size: int) -> dict[str, Any]:
        return {"type": "ADDED", "object": pod() | {"text": "x" * size}}

    sizes = [3_900_000, 10, 2_000_000]
    async with serve(watch_of(*map(change, sizes))) as server, connect(tmp_path, server.url) as api:
        events = await events_of(api)
        assert [len(event.object["text"]) for event in events] == sizes
    async with (
        serve(watch_of(end=b'{"type": "' + b"x" * 5_000_000)) as server,
        connect(tmp_path, server.url) as api,
    ):
        assert (await raised(events_of(api))).reason == "LineTooLong"


async def test_c55_a_watch_that_falls_silent_ends_by_its_idle_limit(tmp_path: Path):
    line = json.dumps({"type": "ADDED", "object": pod()}).encode() + b"\n"

    async def fall_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n%s\r\n" % (len(line), line))
        await reader.read()

    async with (
        serve_raw(fall_silent) as server,
        connect(tmp_path, server.url) as api,
        aclosing(api.watch("pods", resource_version="5", idle_seconds=0.2)) as events,
    ):
        assert (await anext(events)).type == "ADDED"
        assert (await raised(anext(events))).reason == IDLE


async def test_a_watch_from_a_version_of_the_future_ends_by_its_idle_limit(tmp_path: Path):
    async def not_even_a_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serve_raw(not_even_a_head) as server, connect(tmp_path, server.url) as api:
        assert (await raised(events_of(api, idle_seconds=0.2))).reason == IDLE


def _open_sockets() -> int:
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            count += str(link.readlink()).startswith("socket:")
        except FileNotFoundError:
            pass  # that of the listing itself
    return count


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
async def test_c71_five_hundred_watches_leave_no_thread_socket_or_memory_behind(tmp_path: Path):
    count = 0

    async def answer(request: Any) -> Any:
        nonlocal count
        count += 1
        line = json.dumps({"type": "ADDED", "object": pod() | {"text": "x" * 50_000}}) + "\n"
        return reply(line if count % 3 else GONE, 200 if count % 3 else 410)

    async with serve(answer) as server, connect(tmp_path, server.url) as api:

        async def watch(is_left_early: bool) -> None:
            async with aclosing(api.watch("pods", resource_version="5")) as events:
                try:
                    async for _ in events:
                        if is_left_early:
                            break
                except KubeError:
                    pass

        for n in range(60):
            await watch(bool(n % 2))
        server.requests.clear()
        threads, sockets, memory = threading.active_count(), _open_sockets(), _resident_bytes()
        for n in range(500):
            await watch(bool(n % 2))
            server.requests.clear()
            server.bodies.clear()
        assert abs(threading.active_count() - threads) <= 2
        assert _open_sockets() <= sockets + 4
        assert _resident_bytes() - memory < 20 * 1024 * 1024
