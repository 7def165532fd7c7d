"""Answers recorded from a real vLLM, played again over real sockets.

A request says by ``x-test-case`` which recording answers it, and by ``x-test-split`` how its bytes
arrive: ``recorded`` (the chunks that vLLM sent), ``bytes`` (one byte at a time) or offsets at which
the body is cut, such as ``5,17``. A request that names none is answered by its route, where the
server was told which recording stands for it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from agl_core.testing.raw_http import Exchange, Header, RawServer

CASE_HEADER = "x-test-case"
SPLIT_HEADER = "x-test-split"

# Single bytes of the largest recordings would take minutes: those arrive in a few more at a time.
_MOST_PIECES = 2000
_FRAMING = {"content-length", "transfer-encoding", "connection", "date", "server"}


@frozen(kw_only=True)
class Recording:
    """One recorded exchange with vLLM."""

    name: str
    method: str
    path: str
    request: bytes = field(repr=False)
    content_type: str | None
    authorization: str | None = field(repr=False)
    status: int | None
    """None: no head came back."""
    headers: tuple[Header, ...] = field(repr=False)
    body: bytes = field(repr=False)
    end: str
    """``complete``, ``eof_before_end``, ``client_closed`` or ``TimeoutError``."""
    cuts: tuple[int, ...] = field(repr=False)
    """Where vLLM's chunks began."""
    note: str | None

    @property
    def is_stream(self) -> bool:
        """Whether the answer is an event stream."""
        return dict(self.headers).get("content-type", "").startswith("text/event-stream")

    @property
    def is_aborted(self) -> bool:
        """Whether the engine ended a generation that it was told to drop."""
        return b'"finish_reason":"abort"' in self.body

    @property
    def is_of_the_model_api(self) -> bool:
        """Whether its path is below ``/v1``; all others are the engine's own."""
        return self.path.startswith("/v1/")

    @property
    def route(self) -> str:
        """Method and path, as ``ReplayServer`` takes them."""
        return f"{self.method} {self.path}"


def load_recordings(folder: Path) -> dict[str, Recording]:
    """Read a folder of recordings, by name."""
    return {
        path.name: _load(path) for path in sorted(folder.iterdir()) if (path / "meta.json").exists()
    }


def _load(folder: Path) -> Recording:
    meta = json.loads((folder / "meta.json").read_bytes())
    chunks_file, head_file = folder / "chunks.json", folder / "response.headers.json"
    head: dict[str, Any] = json.loads(head_file.read_bytes()) if head_file.exists() else {}
    chunks = json.loads(chunks_file.read_bytes())["http_chunks"] if chunks_file.exists() else []
    return Recording(
        name=folder.name,
        method=meta["method"],
        path=meta["path"],
        request=_read(folder / "request.json") or _read(folder / "request.body"),
        content_type=meta["request_headers"].get("content-type"),
        authorization=meta["request_headers"].get("authorization"),
        status=head.get("status"),
        headers=tuple((name.lower(), value) for name, value in head.get("headers", ())),
        body=_read(folder / "response.body"),
        end=meta["end"],
        cuts=tuple(offset for _, offset, _ in chunks if offset),
        note=meta.get("note"),
    )


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def chunks_of(body: bytes) -> list[dict[str, Any]]:
    """The JSON events of a stream."""
    return [json.loads(part[6:]) for part in body.split(b"\n\n") if part.startswith(b"data: {")]


def with_usage_chunk(body: bytes) -> bytes:
    """A stream as vLLM sends it with ``include_usage``: the usage chunk takes the fingerprint.

    Its counts are those of the recorded ids. A stream that has usage, an error or no end, or no
    ids to count, is returned as it is.
    """
    chunks = chunks_of(body)
    if not body.endswith(b"data: [DONE]\n\n") or not chunks:
        return body
    if any("error" in chunk or chunk.get("usage") is not None for chunk in chunks):
        return body
    counted: dict[int, int] = {}
    prompt: list[int] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            ids = choice.get("token_ids") or ()
            counted[choice["index"]] = counted.get(choice["index"], 0) + len(ids)
            prompt = chunk.get("prompt_token_ids") or choice.get("prompt_token_ids") or prompt
    completion = sum(counted.values())
    if not completion:
        return body
    fingerprints = [c["system_fingerprint"] for c in chunks if c.get("system_fingerprint")]
    last = {name: chunks[0][name] for name in ("id", "object", "created", "model")}
    usage: dict[str, Any] = {
        **last,
        "choices": [],
        "usage": {
            "prompt_tokens": len(prompt),
            "total_tokens": len(prompt) + completion,
            "completion_tokens": completion,
        },
    }
    if fingerprints:
        usage["system_fingerprint"] = fingerprints[0]
        body = re.sub(rb',"system_fingerprint":"[^"]*"', b"", body)
    event = b"data: " + json.dumps(usage, separators=(",", ":")).encode() + b"\n\n"
    return body.removesuffix(b"data: [DONE]\n\n") + event + b"data: [DONE]\n\n"


def asks_for_usage(request: bytes) -> bool:
    """Whether a request asks for the usage chunk of a stream."""
    try:
        fields = json.loads(request)
    except ValueError:
        return False
    options = fields.get("stream_options") if isinstance(fields, dict) else None
    return isinstance(options, dict) and bool(options.get("include_usage"))


def body_as_sent(recording: Recording, request: bytes) -> bytes:
    """The recorded body, with the usage chunk where the request asks for it."""
    if recording.is_stream and asks_for_usage(request):
        return with_usage_chunk(recording.body)
    return recording.body


def pieces_of(body: bytes, cuts: Sequence[int]) -> list[bytes]:
    """The body cut at offsets; none of the pieces is empty."""
    edges = [0, *(cut for cut in sorted(set(cuts)) if 0 < cut < len(body)), len(body)]
    return [body[start:end] for start, end in itertools.pairwise(edges) if end > start]


class ReplayServer(RawServer):
    """Answers each request by the recording that it names, or else by that of its route.

    Args:
        recordings: By name.
        routes: Names of recordings by method and target, such as ``GET /health``. It may be
            changed while the server runs.
    """

    def __init__(
        self, recordings: Mapping[str, Recording], routes: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(self._replay)
        self.routes = dict(routes or {})
        self._recordings = recordings

    def asked(self, route: str) -> int:
        """How often a route was asked for."""
        return sum(f"{seen.method} {seen.target}" == route for seen in self.requests)

    async def _replay(self, exchange: Exchange) -> None:
        request = exchange.request
        by_route = self.routes.get(f"{request.method} {request.target}", "")
        recording = self._recordings[request.header(CASE_HEADER) or by_route]
        if recording.status is None:
            await exchange.gone.wait()
            return
        body = body_as_sent(recording, request.body)
        headers = [header for header in recording.headers if header[0] not in _FRAMING]
        if not recording.is_stream:
            headers.append(("content-length", str(len(body))))
        exchange.begin(recording.status, headers, chunked=recording.is_stream)
        for piece in pieces_of(body, self._cuts(recording, body, request.header(SPLIT_HEADER))):
            exchange.write(piece)
            await exchange.flush()
        if recording.end == "complete":
            exchange.end()
        elif recording.end == "client_closed":
            await exchange.gone.wait()
        else:
            exchange.cut()

    def _cuts(self, recording: Recording, body: bytes, split: str | None) -> Sequence[int]:
        if split is None or split == "recorded":
            return recording.cuts
        if split == "bytes":
            return range(0, len(body), 1 + len(body) // _MOST_PIECES)
        return [int(offset) for offset in split.split(",")]
