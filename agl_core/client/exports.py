"""Streams of an export: their lines, and what their last one tells where they break off."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import httpx

from agl_core import wire
from agl_core.client.calls import ApiRequest
from agl_core.client.connection import ClientSettings
from agl_core.client.exchange import no_answer, problem_error
from agl_core.errors import AglError, ApiError

# A refusal names rollouts: room for thousands of ids.
_KEPT_BYTES = 2**18


class JsonLines:
    """Cuts a stream of bytes into the JSON objects of its lines."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[dict[str, Any]]:
        """The lines that end in ``piece``."""
        *ends, rest = piece.split(b"\n")
        for end in ends:
            self._pieces.append(end)
            yield from self.finish()
        if rest:
            self._pieces.append(rest)

    def finish(self) -> Iterator[dict[str, Any]]:
        """What is left over, as a line.

        Raises:
            ApiError: It is no line of an export, or tells why the export breaks off.
        """
        line = b"".join(self._pieces)
        self._pieces.clear()
        if not line.strip():
            return
        try:
            value = wire.read_json(line, "a line of the export")
        except AglError as exc:
            raise ApiError(
                200,
                "bad_answer",
                exc.message,
                hint="a binary format is read with export_bytes",
            ) from exc
        if not isinstance(value, dict):
            raise ApiError(200, "bad_answer", "a line of the export is no JSON object")
        refusal = _refusal_in(value)
        if refusal is not None:
            raise refusal
        yield value


class LastLine:
    """Keeps the end of a stream that passes, for what it says of why the stream broke off."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._size_bytes = 0

    def feed(self, piece: bytes) -> None:
        """Take the next piece."""
        self._pieces.append(piece)
        self._size_bytes += len(piece)
        while self._size_bytes - len(self._pieces[0]) >= _KEPT_BYTES:
            self._size_bytes -= len(self._pieces.popleft())

    def error(
        self, exc: httpx.TransportError, request: ApiRequest, settings: ClientSettings
    ) -> ApiError:
        """The error for a stream that broke off: the service's words where it said any."""
        line = b"".join(self._pieces).rstrip(b"\n").rpartition(b"\n")[2]
        try:
            refusal = _refusal_in(wire.read_json(line))
        except AglError:
            refusal = None
        return refusal or no_answer(exc, request, settings)


def _refusal_in(value: Any) -> ApiError | None:
    """Read a line that tells why the answer breaks off; None: it is another one."""
    problem = value.get("error") if isinstance(value, dict) and len(value) == 1 else None
    if not isinstance(problem, dict) or not isinstance(problem.get("status"), int):
        return None
    return problem_error(problem, problem["status"], "the export was refused")
