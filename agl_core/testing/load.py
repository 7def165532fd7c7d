"""A model server and agents as processes of their own, so that they cost a gateway nothing.

``python -m agl_core.testing.load engine`` serves and prints its base URL; ``... agents URL COUNT
BYTES`` makes that many calls at once, each with an image of that size, and prints what came of it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from attrs import frozen

from agl_core.testing.servers import bind_loopback

_ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1_800_000_000,
    "model": "m",
    "prompt_token_ids": [1, 2],
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello"},
            "logprobs": {"content": [{"token": "Hello", "logprob": -0.5, "top_logprobs": []}]},
            "finish_reason": "stop",
            "token_ids": [3],
        }
    ],
    "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3},
}


@frozen(kw_only=True)
class Load:
    """What came of calls made at once."""

    seconds: float
    """From the first byte sent to the last one received."""
    statuses: dict[str, int]
    """How many answers had each status."""


@asynccontextmanager
async def engine_process() -> AsyncIterator[str]:
    """Run a model server that answers at once; yields the base URL to register it with."""
    process = await _start("engine")
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.terminate()
        await process.wait()


async def call_at_once(url: str, count: int, size_bytes: int) -> Load:
    """Make ``count`` calls at once from another process.

    Args:
        url: Where agents send chat requests.
        count: How many.
        size_bytes: Of the image in each request, in base64.
    """
    process = await _start("agents", url, str(count), str(size_bytes))
    out, _ = await process.communicate()
    assert process.returncode == 0, f"the agents failed with {process.returncode}"
    return Load(**json.loads(out))


async def _start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, *arguments, stdout=asyncio.subprocess.PIPE
    )


# In the processes


async def _serve_engine() -> None:
    sock = bind_loopback()
    server = await asyncio.start_server(_answer_all, sock=sock)
    print(f"http://127.0.0.1:{sock.getsockname()[1]}/v1", flush=True)  # noqa: T201 - for the parent
    await server.serve_forever()


async def _answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    body = json.dumps(_ANSWER).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    try:
        while True:
            left = _length(await reader.readuntil(b"\r\n\r\n"))
            while left:
                left -= len(await reader.read(min(left, 2**20)))
            writer.write(head % len(body) + body)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def _call_all(url: str, count: int, size_bytes: int) -> Load:
    parts = urlsplit(url)
    image = base64.b64encode(os.urandom(size_bytes * 3 // 4)).decode()
    content: Any = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
    ]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    lines = (f"host: {parts.netloc}", f"content-length: {len(body)}", "\r\n")
    head = "\r\n".join((f"POST {parts.path} HTTP/1.1", *lines)).encode()
    connections = [await asyncio.open_connection(parts.hostname, parts.port) for _ in range(count)]

    async def call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        writer.write(head)
        writer.write(body)
        answered = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(_length(answered))
        writer.close()
        return answered.split(b" ", 2)[1].decode()

    loop = asyncio.get_running_loop()
    began = loop.time()
    found = await asyncio.gather(*(call(*connection) for connection in connections))
    seconds = loop.time() - began
    return Load(seconds=seconds, statuses={status: found.count(status) for status in found})


def _length(head: bytes) -> int:
    _, _, rest = head.lower().partition(b"content-length:")
    return int(rest.split(b"\r\n", 1)[0] or 0)


def _main(role: str, *arguments: str) -> None:
    if role == "engine":
        asyncio.run(_serve_engine())
        return
    url, count, size_bytes = arguments
    load = asyncio.run(_call_all(url, int(count), int(size_bytes)))
    print(json.dumps({"seconds": load.seconds, "statuses": load.statuses}))  # noqa: T201


if __name__ == "__main__":
    _main(*sys.argv[1:])
