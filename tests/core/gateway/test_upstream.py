"""The upstream client against servers that say exact bytes, on both event loops."""

import asyncio
import functools
import hashlib
import inspect
import socket
import ssl
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

import attrs
import pytest

from agl_core.errors import UpstreamError, UpstreamRefused, UpstreamTimeout
from agl_core.gateway.upstream import (
    PooledUpstreamClient,
    Timeouts,
    UpstreamRequest,
    UpstreamUrl,
    is_before_head,
    is_ours,
    upstream_url,
)
from agl_core.gateway.upstream_connection import UpstreamConnection

LOOPS = {"asyncio": asyncio.new_event_loop}
try:
    import uvloop
except ImportError:
    pass
else:
    LOOPS["uvloop"] = uvloop.new_event_loop

NO_LIMITS = Timeouts()
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
JAPANESE = 'data: {"delta":"日本😀"}\n\n'.encode()


def on_each_loop(scenario):
    """Make a test of a coroutine function: run on each event loop, for 40 seconds at most."""

    @pytest.mark.parametrize("new_loop", LOOPS.values(), ids=LOOPS)
    @functools.wraps(scenario)
    def test(new_loop, **arguments):
        async def run():
            async with asyncio.timeout(40):
                await scenario(**arguments)

        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(run())

    own = inspect.signature(scenario).parameters.values()
    new_loop = inspect.Parameter("new_loop", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    test.__signature__ = inspect.Signature([*own, new_loop])
    return test


@attrs.define
class Peer:
    """One accepted connection, as the scripted server sees it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    left: asyncio.Event = attrs.field(factory=asyncio.Event)

    async def request(self):
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left.set()
            raise
        size = 0
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                size = int(line.split(b":")[1])
        return head, await self.reader.readexactly(size)

    def send(self, data):
        self.writer.write(data)

    async def drip(self, data):
        """Send one byte per write, each read before the next is written."""
        for index in range(len(data)):
            self.writer.write(data[index : index + 1])
            await turns(3)

    def close(self):
        self.writer.close()

    def reset(self):
        linger = struct.pack("ii", 1, 0)
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort()

    async def gone(self):
        """Read on until the client closes the connection, which sets ``left``."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            pass
        self.left.set()


@attrs.define
class Server:
    endpoint: str
    peers: list[Peer] = attrs.field(factory=list)

    def request(self, method="POST", path="/v1/x", headers=(), body=b""):
        return UpstreamRequest(method, upstream_url(self.endpoint, path), list(headers), body)


async def turns(count):
    """Let the event loop turn: everything that is ready now has run afterwards."""
    loop = asyncio.get_running_loop()
    for _ in range(count):
        turn = loop.create_future()
        loop.call_soon(turn.set_result, None)
        await turn


@asynccontextmanager
async def serving(script: Callable[[Peer], Awaitable[None]], *, tls=None, **options):
    """Run ``script`` for each connection; what it raises fails the test."""
    scripts = []
    server = Server("")

    async def connected(reader, writer):
        peer = Peer(reader, writer)
        server.peers.append(peer)
        scripts.append(asyncio.current_task())
        try:
            await script(peer)
        except asyncio.IncompleteReadError as exc:
            if exc.partial:
                raise
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls, **options)
    port = listener.sockets[0].getsockname()[1]
    server.endpoint = f"http://127.0.0.1:{port}" if tls is None else f"https://localhost:{port}"
    try:
        yield server
    finally:
        listener.close()
        for task in scripts:
            task.cancel()
        await asyncio.gather(*scripts)


def saying(*answers, close=False):
    """A script: one answer for each request on a connection, then wait for its end."""

    async def script(peer):
        for answer in answers:
            await peer.request()
            peer.send(answer)
        if close:
            peer.close()
        else:
            await peer.gone()

    return script


def chunked(*parts, trailers=b""):
    body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + body + b"0\r\n" + trailers + b"\r\n"


async def fetch(client, request, timeouts=NO_LIMITS):
    answer = await client.open(request, timeouts=timeouts)
    return answer, await answer.read_all()


# What is sent


@on_each_loop
async def test_request_goes_out_exactly_as_given_with_its_own_framing():
    seen = []

    async def script(peer):
        seen.append(await peer.request())
        peer.send(OK)

    async with serving(script) as server, PooledUpstreamClient() as client:
        headers = [
            (b"X-Mixed", b"1"),
            (b"Host", b"evil"),
            (b"content-length", b"9"),
            (b"Transfer-Encoding", b"chunked"),
            (b"connection", b"close"),
            (b"x-mixed", b""),
        ]
        await fetch(client, server.request(path="/v1/x?a=%20b", headers=headers, body=b"{}"))
        host = server.endpoint.removeprefix("http://").encode()
    head = b"POST /v1/x?a=%20b HTTP/1.1\r\nhost: " + host
    head += b"\r\nX-Mixed: 1\r\nx-mixed: \r\ncontent-length: 2\r\n\r\n"
    assert seen == [(head, b"{}")]


@on_each_loop
async def test_get_without_a_body_has_no_content_length_and_an_empty_post_has():
    seen = []

    async def script(peer):
        for _ in range(2):
            seen.append((await peer.request())[0])
            peer.send(OK)

    async with serving(script) as server, PooledUpstreamClient() as client:
        await fetch(client, server.request("GET"))
        await fetch(client, server.request("POST"))
    assert b"content-length" not in seen[0]
    assert b"content-length: 0\r\n" in seen[1]


@pytest.mark.parametrize(
    ("method", "header"),
    [
        ("POST", (b"x", b"a\r\nevil: 1")),
        ("POST", (b"x", b"a\nevil: 1")),
        ("POST", (b"x", b"a\rb")),
        ("POST", (b"x", b"a\0b")),
        ("POST", (b"x\r\nevil", b"1")),
        ("POST", (b"content-length ", b"1")),
        ("POST", (b"x:y", b"1")),
        ("POST", (b"", b"1")),
        ("POST /evil HTTP/1.1\r\nx:", (b"x", b"1")),
        ("CONNECT", (b"x", b"1")),
    ],
)
async def test_request_that_would_be_read_as_another_is_refused_before_connecting(method, header):
    async with PooledUpstreamClient() as client:
        # Port 9 of nowhere: a connect would fail in another way.
        request = UpstreamRequest(method, upstream_url("http://127.0.0.1:9", "/"), [header])
        with pytest.raises(UpstreamError) as caught:
            await client.open(request, timeouts=NO_LIMITS)
    assert (caught.value.code, caught.value.status) == ("upstream_bad_request", 400)
    assert is_ours(caught.value)
    assert not is_before_head(caught.value)


@pytest.mark.parametrize(
    ("endpoint", "path"),
    [
        ("http://h", "/a b"),
        ("http://h", "/a\r\nevil: 1"),
        ("http://h", "/a#b"),
        ("http://h", "/日本"),
        ("http://h", "a"),
        ("http://h", ""),
        ("http://h\r\n", "/"),
        ("http://user:secret@h", "/"),
        ("http://user:sec/ret@h", "/"),
        ("http://h:99999", "/"),
        ("http://h?x=1", "/"),
        ("http://h..i", "/"),
        (f"http://{'h' * 64}", "/"),
        ("ftp://h", "/"),
        ("http://", "/"),
    ],
)
def test_address_that_is_not_one_is_refused_without_showing_secrets(endpoint, path):
    with pytest.raises(UpstreamError) as caught:
        upstream_url(endpoint, path)
    assert caught.value.code == "upstream_bad_request"
    assert "sec" not in str(caught.value)


@pytest.mark.parametrize(
    ("endpoint", "authority", "target", "port"),
    [
        ("http://h", b"h", b"/x?y", 80),
        ("https://h/v1/", b"h", b"/v1/x?y", 443),
        ("http://h:8000/v1", b"h:8000", b"/v1/x?y", 8000),
        ("http://[::1]:443", b"[::1]:443", b"/x?y", 443),
    ],
)
def test_endpoint_and_path_are_joined_once(endpoint, authority, target, port):
    url = upstream_url(endpoint, "/x?y")
    assert (url.authority, url.target, url.port) == (authority, target, port)
    assert upstream_url(endpoint, "/x?y") is url


@on_each_loop
async def test_c15_body_of_40_mib_arrives_whole():
    body = bytes(40 << 20)
    seen = []

    async def script(peer):
        seen.append((await peer.request())[1] == body)
        peer.send(OK)

    async with serving(script) as server, PooledUpstreamClient() as client:
        _, data = await fetch(client, server.request(body=body))
    assert data == b"hi"
    assert seen == [True]


# What comes back


FRAMINGS = {
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(JAPANESE), JAPANESE),
    "chunked": chunked(JAPANESE[:11], JAPANESE[11:], trailers=b"x-sum: 1\r\n"),
    "chunk extensions": chunked(JAPANESE).replace(b"\r\ndata", b";a=b\r\ndata"),
    "until close": b"HTTP/1.1 200 OK\r\n\r\n" + JAPANESE,
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\n\r\n" + JAPANESE,
    "until close in another coding": b"HTTP/1.1 200 OK\r\ntransfer-encoding: x\r\n\r\n" + JAPANESE,
}


@pytest.mark.parametrize("raw", FRAMINGS.values(), ids=FRAMINGS)
@on_each_loop
async def test_c25_body_is_byte_exact_when_each_byte_comes_alone(raw):
    async def script(peer):
        await peer.request()
        await peer.drip(raw)

    async with serving(script) as server, PooledUpstreamClient() as client:
        answer = await client.open(server.request(), timeouts=NO_LIMITS)
        pieces = [piece async for piece in answer.chunks()]
    assert len(pieces) > 10
    assert hashlib.sha256(b"".join(pieces)).digest() == hashlib.sha256(JAPANESE).digest()
    assert answer.complete
    assert b"x-sum" not in dict(answer.headers)


@on_each_loop
async def test_headers_keep_their_order_and_repeats():
    raw = b"HTTP/1.1 418 \r\nX-B: 1\r\nx-a:  two words \r\nX-B: 3\r\nContent-Length: 0\r\n\r\n"
    async with serving(saying(raw)) as server, PooledUpstreamClient() as client:
        answer, data = await fetch(client, server.request())
    assert answer.status == 418
    assert answer.headers == [
        (b"x-b", b"1"),
        (b"x-a", b"two words"),
        (b"x-b", b"3"),
        (b"content-length", b"0"),
    ]
    assert data == b""


@pytest.mark.parametrize("is_slow", [False, True])
@on_each_loop
async def test_interim_answers_are_skipped(is_slow):
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"

    async def script(peer):
        for _ in range(2):
            await peer.request()
            await (peer.drip(interim + OK) if is_slow else turns(1))
            if not is_slow:
                peer.send(interim + OK)

    async with serving(script) as server, PooledUpstreamClient() as client:
        for _ in range(2):
            answer, data = await fetch(client, server.request())
            assert (answer.status, data) == (200, b"hi")
            assert answer.headers == [(b"content-length", b"2")]
        assert len(server.peers) == 1


@pytest.mark.parametrize(
    ("method", "raw"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"),
        ("HEAD", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"),
        ("HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"),
        ("POST", b"HTTP/1.1 204 No Content\r\n\r\n"),
        ("POST", b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n"),
    ],
)
@on_each_loop
async def test_answer_without_a_body_ends_at_its_head_and_leaves_a_usable_connection(method, raw):
    async with serving(saying(raw, OK)) as server, PooledUpstreamClient() as client:
        first, nothing = await fetch(client, server.request(method))
        assert (first.complete, nothing) == (True, b"")
        second, data = await fetch(client, server.request())
        assert (second.reused, data) == (True, b"hi")
        assert len(server.peers) == 1


@on_each_loop
async def test_what_came_while_nobody_read_is_one_piece():
    answered = asyncio.Event()

    async def script(peer):
        await peer.request()
        for part in (chunked()[:-5], b"1\r\na\r\n", b"1\r\nb\r\n", b"1\r\nc\r\n", b"0\r\n\r\n"):
            peer.send(part)
            await turns(5)
        answered.set()

    async with serving(script) as server, PooledUpstreamClient() as client:
        answer = await client.open(server.request(), timeouts=NO_LIMITS)
        await answered.wait()
        while not answer.complete:
            await turns(1)
        assert answer.buffered_bytes == 3
        assert await answer.read() == b"abc"
        assert await answer.read() == b""
        assert await answer.read() == b""


@on_each_loop
async def test_answer_larger_than_the_limit_is_given_up():
    raw = chunked(b"x" * 100)
    async with serving(saying(raw, raw)) as server, PooledUpstreamClient() as client:
        answer = await client.open(server.request(), timeouts=NO_LIMITS)
        with pytest.raises(UpstreamError, match="larger than 99 bytes") as caught:
            await answer.read_all(limit=99)
        assert caught.value.code == "upstream_too_large"
        answer = await client.open(server.request(), timeouts=NO_LIMITS)
        assert len(await answer.read_all(limit=100)) == 100


@on_each_loop
async def test_two_readers_at_once_are_an_error():
    async with serving(saying(chunked()[:-5])) as server, PooledUpstreamClient() as client:
        answer = await client.open(server.request(), timeouts=NO_LIMITS)
        first = asyncio.create_task(answer.read())
        await turns(1)
        with pytest.raises(RuntimeError, match="one reader"):
            await answer.read()
        answer.abort()
        with pytest.raises(UpstreamError, match="given up"):
            await first


# What goes wrong


@pytest.mark.parametrize(
    "raw", [b"", b"HTTP/1.1 20", b"HTTP/1.1 200 OK\r\nx: y\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"]
)
@on_each_loop
async def test_close_before_the_head_may_be_sent_again_by_the_caller(raw):
    async with (
        serving(saying(raw, close=True)) as server,
        PooledUpstreamClient() as client,
    ):
        with pytest.raises(UpstreamError) as caught:
            await client.open(server.request(), timeouts=NO_LIMITS)
        assert len(server.peers) == 1
    assert caught.value.code == "upstream_truncated"
    assert is_before_head(caught.value)
    assert not is_ours(caught.value)


@on_each_loop
async def test_close_right_after_accept_is_a_truncated_answer():
    async def script(peer):
        peer.close()

    async with serving(script) as server, PooledUpstreamClient() as client:
        for _ in range(20):
            with pytest.raises(UpstreamError) as caught:
                await client.open(server.request(), timeouts=NO_LIMITS)
            assert caught.value.code == "upstream_truncated"
            assert is_before_head(caught.value)


@on_each_loop
async def test_connection_lost_before_its_first_request_is_a_truncated_answer():
    async def script(peer):
        peer.close()

    loop = asyncio.get_running_loop()
    async with serving(script) as server, PooledUpstreamClient() as client:
        request = server.request()
        _, connection = await loop.create_connection(
            lambda: UpstreamConnection(client, request.url.origin, loop, 1024),
            request.url.host,
            request.url.port,
        )
        while connection.is_attached:
            await turns(1)
        answer = connection.send(request, b"", NO_LIMITS)
        with pytest.raises(UpstreamError) as caught:
            await answer.wait_for_head()
    assert caught.value.code == "upstream_truncated"
    assert is_before_head(caught.value)


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf",
        chunked(b"half")[:-5],
        chunked(b"half")[:-7],
        chunked(b"half")[:-2],
        chunked(b"half")[:-5] + b"5\r\n",
    ],
)
@on_each_loop
async def test_close_in_the_body_fails_after_what_was_received(raw, is_reset):
    received = asyncio.Event()

    async def script(peer):
        await peer.request()
        peer.send(raw)
        await received.wait()
        if is_reset:
            peer.reset()

    async with serving(script) as server, PooledUpstreamClient() as client:
        answer = await client.open(server.request(), timeouts=NO_LIMITS)
        data = b""
        while len(data) < 4:
            data += await answer.read()
        received.set()
        with pytest.raises(UpstreamError) as caught:
            await answer.read()
        assert data == b"half"
        assert not answer.complete
        assert client.idle_connections == 0
    assert caught.value.code == "upstream_truncated"
    assert not is_before_head(caught.value)


@on_each_loop
async def test_reset_of_a_body_without_length_is_not_its_end():
    async def script(peer):
        await peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\n\r\nhalf")
        await peer.reader.readexactly(0)
        await turns(20)
        peer.reset()

    async with serving(script) as server, PooledUpstreamClient() as client:
        answer = await client.open(server.request(), timeouts=NO_LIMITS)
        with pytest.raises(UpstreamError) as caught:
            await answer.read_all()
    assert caught.value.code == "upstream_truncated"


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x16\x03\x01\x02\x00" * 20,
        b"HTTP/1.1 two hundred\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\nb: c\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 300_000,
    ],
)
@on_each_loop
async def test_answer_that_is_not_http_is_malformed(raw):
    async with serving(saying(raw)) as server, PooledUpstreamClient() as client:
        with pytest.raises(UpstreamError) as caught:
            await client.open(server.request(), timeouts=NO_LIMITS)
        await server.peers[0].left.wait()
    assert caught.value.code == "upstream_malformed"
    assert is_before_head(caught.value)


@pytest.mark.parametrize("rest", [b"zz\r\n", b"0\r\nx: " + b"y" * 600_000])
@on_each_loop
async def test_nonsense_in_the_body_fails_after_what_was_received(rest):
    raw = chunked(b"half")[:-5] + rest
    async with serving(saying(raw)) as server, PooledUpstreamClient() as client:
        answer = await client.open(server.request(), timeouts=NO_LIMITS)
        assert await answer.read() == b"half"
        with pytest.raises(UpstreamError) as caught:
            await answer.read()
    assert caught.value.code == "upstream_malformed"
    assert not is_before_head(caught.value)


@on_each_loop
async def test_nobody_listening_is_refused():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = upstream_url(f"http://127.0.0.1:{unused.getsockname()[1]}", "/")
        async with PooledUpstreamClient() as client:
            with pytest.raises(UpstreamRefused) as caught:
                await client.open(UpstreamRequest("GET", url), timeouts=NO_LIMITS)
            assert client.open_connections == 0
    assert caught.value.code == "upstream_refused"
    assert is_before_head(caught.value)


@on_each_loop
async def test_name_without_an_address_is_unresolvable():
    # The resolver refuses a colon by itself, without asking the network.
    url = UpstreamUrl("http", "1:2:3", 80, b"/")
    async with PooledUpstreamClient() as client:
        with pytest.raises(UpstreamRefused) as caught:
            await client.open(UpstreamRequest("GET", url), timeouts=NO_LIMITS)
    assert caught.value.code == "upstream_unresolvable"
    assert not is_ours(caught.value)


# Time-outs


@on_each_loop
async def test_c05_each_time_out_names_what_took_too_long_and_closes_the_connection():
    async def script(peer):
        head, _ = await peer.request()
        if b"/body" in head:
            peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
        await peer.gone()

    async with serving(script) as server, PooledUpstreamClient() as client:
        limits = Timeouts(first_byte_seconds=0.05, idle_seconds=30)
        with pytest.raises(UpstreamTimeout) as caught:
            await client.open(server.request(), timeouts=limits)
        assert (caught.value.code, caught.value.status) == ("first_byte_timeout", 504)
        assert is_before_head(caught.value)
        await server.peers[0].left.wait()

        limits = Timeouts(first_byte_seconds=30, idle_seconds=0.05)
        answer = await client.open(server.request(path="/body"), timeouts=limits)
        assert await answer.read() == b"half"
        with pytest.raises(UpstreamTimeout) as caught:
            await answer.read()
        assert caught.value.code == "idle_timeout"
        assert not is_before_head(caught.value)
        await server.peers[1].left.wait()

        # A TLS handshake that is never answered.
        url = upstream_url(server.endpoint.replace("http:", "https:"), "/")
        with pytest.raises(UpstreamTimeout) as caught:
            await client.open(UpstreamRequest("GET", url), timeouts=Timeouts(connect_seconds=0.05))
        assert caught.value.code == "connect_timeout"
        assert is_before_head(caught.value)


@on_each_loop
async def test_first_byte_limit_does_not_go_on_into_an_unlimited_body():
    release = asyncio.Event()

    async def script(peer):
        await peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n")
        await release.wait()
        peer.send(b"hi")

    async with serving(script) as server, PooledUpstreamClient() as client:
        limits = Timeouts(first_byte_seconds=0.5)
        answer = await client.open(server.request(), timeouts=limits)
        asyncio.get_running_loop().call_later(0.7, release.set)
        assert await answer.read_all() == b"hi"


@on_each_loop
async def test_slow_but_steady_body_outlives_the_idle_limit():
    loop = asyncio.get_running_loop()

    async def script(peer):
        await peer.request()
        peer.send(chunked()[:-5])
        for _ in range(8):
            tick = loop.create_future()
            loop.call_later(0.15, tick.set_result, None)
            await tick
            peer.send(b"1\r\nx\r\n")
        peer.send(b"0\r\n\r\n")

    async with serving(script) as server, PooledUpstreamClient() as client:
        _, data = await fetch(client, server.request(), Timeouts(idle_seconds=0.8))
    assert data == b"x" * 8


@on_each_loop
async def test_time_counts_on_the_clock_of_the_limits():
    asked, release = asyncio.Event(), asyncio.Event()
    now = 5.0

    async def script(peer):
        await peer.request()
        asked.set()
        await release.wait()
        peer.send(OK)

    async with serving(script) as server, PooledUpstreamClient() as client:
        limits = Timeouts(first_byte_seconds=0.02, now=lambda: now)
        asyncio.get_running_loop().call_later(0.2, release.set)
        _, data = await fetch(client, server.request(), limits)
        assert data == b"hi"
        asked.clear()
        release.clear()
        call = asyncio.create_task(client.open(server.request(), timeouts=limits))
        await asked.wait()
        now = 6.0
        with pytest.raises(UpstreamTimeout):
            await call


# The pool


@on_each_loop
async def test_connection_used_last_is_used_first():
    all_open = asyncio.Event()

    async def script(peer):
        name = b"%02d" % len(server.peers)
        while True:
            await peer.request()
            peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n")
            await all_open.wait()
            peer.send(name)

    async with serving(script) as server, PooledUpstreamClient() as client:
        answers = [await client.open(server.request(), timeouts=NO_LIMITS) for _ in range(3)]
        assert (client.open_connections, client.idle_connections) == (3, 0)
        all_open.set()
        names = [await answers[index].read_all() for index in (0, 2, 1)]
        assert sorted(names) == [b"01", b"02", b"03"]
        assert client.open_connections == client.idle_connections == 3
        last = (await fetch(client, server.request()))[1]
        for _ in range(4):
            answer, name = await fetch(client, server.request())
            assert answer.reused
            assert name == last
        assert client.open_connections == client.idle_connections == 3


@on_each_loop
async def test_connection_goes_back_only_when_its_answer_has_ended():
    more = asyncio.Event()

    async def script(peer):
        await peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nhi")
        await more.wait()
        peer.send(b"ho")
        await peer.gone()

    async with serving(script) as server, PooledUpstreamClient() as client:
        answer = await client.open(server.request(), timeouts=NO_LIMITS)
        assert await answer.read() == b"hi"
        assert (client.open_connections, client.idle_connections) == (1, 0)
        more.set()
        assert await answer.read_all() == b"ho"
        assert (client.open_connections, client.idle_connections) == (1, 1)


@pytest.mark.parametrize(
    "raw",
    [
        OK + b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil",
        OK + b"junk",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nhi",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi",
        b"HTTP/1.1 304 Not Modified\r\ncontent-length: 2\r\n\r\nhi",
    ],
)
@on_each_loop
async def test_connection_with_surplus_bytes_or_without_keep_alive_is_not_used_again(raw):
    async with serving(saying(raw)) as server, PooledUpstreamClient() as client:
        for count in (1, 2):
            answer, data = await fetch(client, server.request())
            assert data in (b"hi", b"")
            assert answer.complete
            assert not answer.reused
            assert client.idle_connections == 0
            assert len(server.peers) == count
            await server.peers[-1].left.wait()


@on_each_loop
async def test_surplus_that_comes_later_closes_the_idle_connection():
    evil = asyncio.Event()

    async def script(peer):
        await peer.request()
        peer.send(OK)
        await evil.wait()
        peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil")
        await peer.gone()

    async with serving(script) as server, PooledUpstreamClient() as client:
        await fetch(client, server.request())
        assert client.idle_connections == 1
        evil.set()
        await server.peers[0].left.wait()
        assert (client.open_connections, client.idle_connections) == (0, 0)


@on_each_loop
async def test_request_on_a_stale_connection_goes_out_once_more_on_a_fresh_one():
    bodies = []

    async def script(peer):
        bodies.append((await peer.request())[1])
        peer.send(OK)
        if len(server.peers) == 1:
            # Takes the second request and closes without a byte of an answer.
            bodies.append((await peer.request())[1])
        else:
            await peer.gone()

    async with serving(script) as server, PooledUpstreamClient() as client:
        first, _ = await fetch(client, server.request(body=b"1"))
        second, data = await fetch(client, server.request(body=b"2"))
        assert (first.resent, second.resent, second.reused) == (False, True, False)
        assert data == b"hi"
        assert bodies == [b"1", b"2", b"2"]
        assert client.resent_requests == 1
        assert len(server.peers) == 2


@on_each_loop
async def test_request_is_not_sent_again_once_a_byte_of_its_answer_came():
    async def script(peer):
        await peer.request()
        peer.send(OK)
        await peer.request()
        peer.send(b"H")

    async with serving(script) as server, PooledUpstreamClient() as client:
        await fetch(client, server.request())
        with pytest.raises(UpstreamError) as caught:
            await client.open(server.request(), timeouts=NO_LIMITS)
        assert caught.value.code == "upstream_truncated"
        assert (client.resent_requests, len(server.peers)) == (0, 1)


@on_each_loop
async def test_connection_that_the_server_closed_while_idle_is_forgotten():
    async with (
        serving(saying(OK, close=True)) as server,
        PooledUpstreamClient() as client,
    ):
        await fetch(client, server.request())
        while client.open_connections:
            await turns(1)
        assert client.idle_connections == 0
        answer, data = await fetch(client, server.request())
        assert (data, answer.resent, client.resent_requests) == (b"hi", False, 0)


@on_each_loop
async def test_idle_connection_is_closed_before_the_server_would():
    async with (
        serving(saying(OK, OK)) as server,
        PooledUpstreamClient(idle_seconds=0.3) as client,
    ):
        await fetch(client, server.request())
        assert client.idle_connections == 1
        await server.peers[0].left.wait()
        assert (client.open_connections, client.idle_connections) == (0, 0)
    assert PooledUpstreamClient()._idle_seconds < 5


@on_each_loop
async def test_answer_before_the_request_was_all_sent_does_not_poison_the_next():
    async def script(peer):
        await peer.reader.readuntil(b"\r\n\r\n")
        peer.send(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
        await rest_is_wanted.wait()

    rest_is_wanted = asyncio.Event()
    async with serving(script, limit=1024) as server, PooledUpstreamClient() as client:
        answer, data = await fetch(client, server.request(body=bytes(32 << 20)))
        assert (answer.status, data) == (413, b"no")
        assert client.idle_connections == 0
        rest_is_wanted.set()


# Going away


@pytest.mark.parametrize(
    ("phase", "way"),
    [("head", "cancel"), ("body", "cancel"), ("body", "abort"), ("body", "leave")],
)
@on_each_loop
async def test_c01_connection_is_closed_at_once_when_the_caller_goes_away(way, phase):
    asked = asyncio.Event()

    async def script(peer):
        await peer.request()
        if phase == "body":
            peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n")
        asked.set()
        await peer.gone()

    async def call(client, request):
        async with await client.open(request, timeouts=NO_LIMITS) as answer:
            if way == "leave":
                return
            if way == "abort":
                asyncio.get_running_loop().call_soon(answer.abort)
            await answer.read()

    async with serving(script) as server, PooledUpstreamClient() as client:
        task = asyncio.create_task(call(client, server.request()))
        await asked.wait()
        if way == "cancel":
            await turns(5)
            task.cancel()
        await asyncio.wait([task])
        # Two turns: one for the transport to close its socket, one for the count.
        await turns(2)
        assert (client.open_connections, client.idle_connections) == (0, 0)
        await server.peers[0].left.wait()
    assert task.cancelled() == (way == "cancel")


@on_each_loop
async def test_call_cancelled_while_it_connects_leaves_nothing():
    async def script(peer):
        await peer.gone()

    async with serving(script) as server, PooledUpstreamClient() as client:
        # From before the first step of the connect to after the last.
        for count in range(12):
            request = server.request()
            task = asyncio.create_task(client.open(request, timeouts=NO_LIMITS))
            await turns(count)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
        while client.open_connections:
            await turns(1)
        for peer in server.peers:
            await peer.left.wait()


@on_each_loop
async def test_abort_after_the_end_leaves_the_connection_to_its_next_user():
    async with serving(saying(OK, OK)) as server, PooledUpstreamClient() as client:
        first, _ = await fetch(client, server.request())
        second = await client.open(server.request(), timeouts=NO_LIMITS)
        first.abort()
        first.abort()
        assert await second.read_all() == b"hi"
        assert second.reused


@on_each_loop
async def test_close_ends_calls_connects_and_idle_connections():
    async def script(peer):
        head, _ = await peer.request()
        if b"/idle" in head:
            peer.send(OK)
        elif b"/body" in head:
            peer.send(chunked(b"half")[:-5])
        await peer.gone()

    async with serving(script) as server:
        client = PooledUpstreamClient()
        answer = await client.open(server.request(path="/body"), timeouts=NO_LIMITS)
        assert await answer.read() == b"half"
        waiting = asyncio.create_task(client.open(server.request(), timeouts=NO_LIMITS))
        url = upstream_url(server.endpoint.replace("http:", "https:"), "/")
        connecting = asyncio.create_task(
            client.open(UpstreamRequest("GET", url), timeouts=NO_LIMITS)
        )
        await fetch(client, server.request(path="/idle"))
        assert client.idle_connections == 1
        await client.close()
        assert (client.open_connections, client.idle_connections) == (0, 0)
        codes = {}
        for name, call in {"body": answer.read(), "head": waiting, "connect": connecting}.items():
            with pytest.raises(UpstreamError) as caught:
                await call
            assert is_ours(caught.value)
            codes[name] = (caught.value.code, caught.value.details["phase"])
        assert codes == {name: ("upstream_closed", name) for name in codes}
        with pytest.raises(UpstreamError, match="shutting down"):
            await client.open(server.request(), timeouts=NO_LIMITS)
        await client.close()


# Size and number


@on_each_loop
async def test_reader_that_lags_keeps_memory_bounded():
    size, high_water = 64 << 20, 128 * 1024
    block = bytes(range(256)) * 1024

    async def script(peer):
        await peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(size // len(block)):
            peer.send(block)
            await peer.writer.drain()
        await peer.gone()

    async with (
        serving(script) as server,
        PooledUpstreamClient(high_water_bytes=high_water) as client,
    ):
        answer = await client.open(server.request(), timeouts=NO_LIMITS)
        seen, most = hashlib.sha256(), 0
        total = 0
        while True:
            # The reader lags: the server gets many turns for each read.
            await turns(8)
            most = max(most, answer.buffered_bytes)
            data = await answer.read()
            if not data:
                break
            seen.update(data)
            total += len(data)
        assert total == size
        assert seen.digest() == hashlib.sha256(block * (size // len(block))).digest()
        # asyncio reads 256 KiB at a time, uvloop as much or less.
        assert high_water < most <= high_water + 256 * 1024
        assert client.idle_connections == 1


def answering_in_a_thread(listener, asked, may_answer, answered):
    """Answer one request from a thread, however long the event loop stands still."""
    connection, _ = listener.accept()
    with connection:
        connection.recv(65536)
        asked.set()
        may_answer.wait()
        connection.sendall(OK)
        answered.set()
        connection.recv(1)


@on_each_loop
async def test_c05_answer_that_came_while_the_loop_stood_still_is_in_time():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asked, may_answer, answered = threading.Event(), threading.Event(), threading.Event()
        arguments = (listener, asked, may_answer, answered)
        thread = threading.Thread(target=answering_in_a_thread, args=arguments)
        thread.start()
        url = upstream_url(f"http://127.0.0.1:{listener.getsockname()[1]}", "/")
        async with PooledUpstreamClient() as client:
            opening = asyncio.create_task(
                client.open(UpstreamRequest("GET", url), timeouts=Timeouts(5, 0.2, 0.2))
            )
            await asyncio.to_thread(asked.wait)
            may_answer.set()
            answered.wait()
            stand_still_until = time.monotonic() + 0.4
            while time.monotonic() < stand_still_until:
                pass
            async with await opening as answer:
                assert await answer.read_all() == b"hi"
        await asyncio.to_thread(thread.join)


@on_each_loop
async def test_c05_connection_made_while_the_loop_stood_still_is_in_time():
    async with serving(saying(OK)) as server, PooledUpstreamClient() as client:
        opening = asyncio.create_task(client.open(server.request(), timeouts=Timeouts(0.2, 5, 5)))
        await turns(1)  # the connection is asked for, and the kernel has made it
        stand_still_until = time.monotonic() + 0.4
        while time.monotonic() < stand_still_until:
            pass
        async with await opening as answer:
            assert await answer.read_all() == b"hi"


@on_each_loop
async def test_c09_cost_of_a_call_does_not_grow_with_the_number_of_open_calls():
    async def seconds_for(count):
        everyone = asyncio.Event()
        arrived = 0

        async def script(peer):
            nonlocal arrived
            await peer.request()
            arrived += 1
            if arrived == count:
                everyone.set()
            await everyone.wait()
            peer.send(OK)
            await peer.gone()

        async with serving(script, backlog=2048) as server, PooledUpstreamClient() as client:
            start = time.perf_counter()
            calls = (fetch(client, server.request(), Timeouts(30, 30, 30)) for _ in range(count))
            done = await asyncio.gather(*calls)
            seconds = time.perf_counter() - start
            assert [data for _, data in done] == [b"hi"] * count
            assert client.idle_connections == count
        return seconds

    await seconds_for(50)
    few = min([await seconds_for(200), await seconds_for(200)])
    many = min([await seconds_for(1600), await seconds_for(1600)])
    # Eight times the calls; quadratic would be 64 times the time.
    assert many < few * 8 * 5


@pytest.mark.parametrize("name", LOOPS)
def test_c10_running_out_of_descriptors_is_our_fault_and_passes(name):
    program = textwrap.dedent(f"""
        import asyncio, os, resource
        from agl_core.errors import UpstreamError
        from agl_core.gateway.upstream import (
            PooledUpstreamClient, Timeouts, UpstreamRequest, UpstreamUrl,
            is_before_head, is_ours, upstream_url)

        async def main():
            release = asyncio.Event()

            async def serve(reader, writer):
                await reader.readuntil(b"\\r\\n\\r\\n")
                await release.wait()
                writer.write(b"HTTP/1.1 200 OK\\r\\nconnection: close\\r\\n\\r\\nhi")
                writer.close()

            # The listener is another process's affair in earnest: here its sockets count as well.
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            url = upstream_url(f"http://127.0.0.1:{{port}}", "/")
            named = upstream_url(f"http://localhost:{{port}}", "/")
            async with PooledUpstreamClient() as client:

                async def call(url):
                    try:
                        answer = await client.open(UpstreamRequest("GET", url), timeouts=Timeouts())
                        return await answer.read_all()
                    except UpstreamError as exc:
                        assert is_ours(exc) and is_before_head(exc), repr(exc)
                        return exc.code, exc.status

                assert release.set() or await call(named) == b"hi"
                release.clear()
                resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
                held = []
                while True:
                    try:
                        held.append(os.open(os.devnull, os.O_RDONLY))
                    except OSError:
                        break
                # The resolver does not say what it lacked, so its refusals are not believed now.
                urls = [url] * 20 + [named, UpstreamUrl("http", "1:2:3", 80, b"/")]
                results = await asyncio.gather(*map(call, urls))
                assert set(results) == {{("fd_exhausted", 503)}}, results
                assert client.open_connections == 0
                for descriptor in held:
                    os.close(descriptor)
                release.set()
                for _ in range(50):
                    assert await call(url) == b"hi"
            server.close()

        new_loop = asyncio.new_event_loop
        if {name!r} == "uvloop":
            import uvloop
            new_loop = uvloop.new_event_loop
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(asyncio.wait_for(main(), 20))
        print("done")
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=40, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs the openssl command to make a certificate")
    return cert, key


@on_each_loop
async def test_https_answers_are_read_and_connections_reused(certificate):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    trust = ssl.create_default_context(cafile=certificate[0])
    body = bytes(3 << 20)
    big = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    async with (
        serving(saying(OK, big), tls=context) as server,
        PooledUpstreamClient(tls=trust) as client,
    ):
        _, data = await fetch(client, server.request(body=b"x" * 300_000))
        answer, received = await fetch(client, server.request())
        assert (data, answer.reused, received == body) == (b"hi", True, True)


@on_each_loop
async def test_unknown_certificate_is_refused(certificate):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    async with serving(saying(OK), tls=context) as server, PooledUpstreamClient() as client:
        with pytest.raises(UpstreamRefused) as caught:
            await client.open(server.request(), timeouts=NO_LIMITS)
    assert caught.value.code == "upstream_tls"
