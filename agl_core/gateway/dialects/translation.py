"""What the dialects share that are answered by way of chat completions.

A request is rewritten into a chat request, the answer to that is rewritten back. The chat tee does
the recording; a ``TranslatedTee`` around it turns what the agent would have got as chat into the
agent's own dialect.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
import msgspec
from attrs import Factory, field, frozen

from agl_core.errors import AglError
from agl_core.gateway.dialects.base import Answer, AnswerTee, ParsedRequest
from agl_core.gateway.dialects.chat import ChatDialect
from agl_core.gateway.dialects.shapes import UNREADABLE, Chunk, decode_lenient
from agl_core.gateway.dialects.sse import EventSplitter, data_of

CHAT_PATH = "chat/completions"

_CHAT = ChatDialect()
_chunk_decoder = msgspec.json.Decoder(Chunk)


class TranslationError(AglError):
    """The request cannot be said in chat completions; the agent gets a 400 in its own dialect."""

    default_code: ClassVar[str] = "invalid_request"
    default_status: ClassVar[int] = 400


class TranslatedTee(AnswerTee):
    """Watches a chat answer through the chat tee and writes it in another dialect.

    A dialect says how a chunk, the end and a whole answer are written. The event that ends a stream
    in the dialect is held back like chat's ``[DONE]``: ``held`` has it and ``finish`` returns it.
    """

    def __init__(self, inner: AnswerTee, status: int) -> None:
        self.is_stream = inner.is_stream
        self._inner = inner
        self._status = status
        self._splitter = EventSplitter()
        self._end: bytes | None = None
        self._failed = False
        self._shown: Any = None

    # What a dialect writes

    @abstractmethod
    def _write_chunk(self, chunk: Chunk) -> bytes:
        """Return the events that one chunk of a chat stream becomes."""

    @abstractmethod
    def _write_end(self) -> bytes:
        """Return the events that end a stream that ended properly; called once."""

    @abstractmethod
    def _write_error(self, error: Any) -> bytes:
        """Return the event for an error that came inside a stream."""

    @abstractmethod
    def _read_whole(self, chat: dict[str, Any]) -> dict[str, Any]:
        """Return a whole chat answer in the dialect."""

    @abstractmethod
    def _read_error(self, status: int, body: bytes) -> dict[str, Any]:
        """Return the dialect's form of a body that came with an error status."""

    @abstractmethod
    def _assemble(self) -> Any:
        """Return the stream so far in the shape of a whole answer; None where nothing came."""

    # Streams

    def feed(self, data: bytes) -> bytes:
        """Return the dialect's events that can be sent now."""
        out = self._take(self._inner.feed(data))
        self._note_end()
        return out

    def finish(self) -> bytes:
        """Return what is left, the event that ends the dialect's stream included.

        A stream that broke off gets no such event, and one that the engine aborted neither.
        """
        out = self._take(self._inner.finish())
        self._note_end()
        end, self._end = self._end or b"", b""
        return out + end

    def _take(self, data: bytes) -> bytes:
        out: list[bytes] = []
        for event in self._splitter.feed(data):
            payload = data_of(event)
            if not payload or payload == b"[DONE]" or self._failed:
                continue
            read = decode_lenient(_chunk_decoder, payload)
            if read is None:
                continue
            chunk = read[0]
            if chunk.error is not None:
                self._failed = True
                out.append(self._write_error(chunk.error))
            else:
                out.append(self._write_chunk(chunk))
        return b"".join(out)

    def _note_end(self) -> None:
        inner = self._inner
        if self._end is None and inner.complete and not self._failed and not inner.aborted:
            self._end = self._write_end()

    # Whole answers

    def whole(self, body: bytes) -> bytes:
        """Return the body in the dialect; one that is no chat answer is returned as it came."""
        shown = self._inner.whole(body)
        if self._status >= 400:
            self._shown = self._read_error(self._status, body)
            return msgspec.json.encode(self._shown)
        try:
            chat = msgspec.json.decode(shown)
        except UNREADABLE:
            return shown
        if not isinstance(chat, dict):
            return shown
        if chat.get("error") is not None:
            self._shown = self._read_error(self._status, body)
        elif chat.get("choices"):
            self._shown = self._read_whole(chat)
        else:
            self._shown = chat
            return shown
        return msgspec.json.encode(self._shown)

    # Both

    @property
    def held(self) -> bytes:
        """What is held back: the end of the dialect's stream."""
        return self._end or b""

    @property
    def complete(self) -> bool:
        """Whether the chat answer ended as it must."""
        return self._inner.complete

    @property
    def aborted(self) -> bool:
        """Whether the engine ended the answer with ``abort``."""
        return self._inner.aborted

    @property
    def ends_mid_event(self) -> bool:
        """Never: only whole events are written."""
        return False

    @property
    def first_token_seen(self) -> bool:
        """Whether anything that the model generated has come by."""
        return self._inner.first_token_seen

    @property
    def content_type(self) -> str:
        """The content type of what is written, whatever the model server's was."""
        return "text/event-stream; charset=utf-8" if self.is_stream else "application/json"

    @property
    def token_counts(self) -> Mapping[int, int]:
        """How many token ids have come so far, by choice."""
        return self._inner.token_counts

    @property
    def generated(self) -> dict[str, str]:
        """The arguments of each tool call exactly as the model wrote them, by call id."""
        return dict(self._inner.generated)

    def result(self) -> Answer:
        """Return the tokens of the chat answer with the answer as the agent got it."""
        response = self._assemble() if self.is_stream else self._shown
        return attrs.evolve(self._inner.result(), response=response)


OpenAnswer = Callable[[Mapping[str, Any], int, str], TranslatedTee]


@frozen(kw_only=True)
class Translation:
    """What goes upstream in place of a request of another dialect.

    Attributes:
        path: The path below ``v1``.
        request: The chat request.
        normalised: What was changed beyond translation, for the record, such as
            ``{"billing_lines": [...], "cache_control": 3, "arguments_restored": ["call_1"],
            "dropped": ["metadata"]}``.
        open_answer: Takes what was adjusted in ``request``, the answer's status and its content
            type, and returns the tee that writes it in the agent's dialect.
    """

    request: ParsedRequest
    open_answer: OpenAnswer = field(repr=False)
    path: str = CHAT_PATH
    normalised: dict[str, Any] = Factory(dict)


def translation_of(
    body: Mapping[str, Any],
    wrap: Callable[[AnswerTee, int], TranslatedTee],
    normalised: Mapping[str, Any],
) -> Translation:
    """Return the translation into ``body``; ``wrap`` puts the dialect's tee around the chat tee.

    What is empty in ``normalised`` is left out of the record.
    """
    request = _CHAT.read_request(msgspec.json.encode(body))

    def open_answer(adjusted: Mapping[str, Any], status: int, content_type: str) -> TranslatedTee:
        return wrap(_CHAT.open_answer(request, adjusted, status, content_type), status)

    kept = {name: value for name, value in normalised.items() if value}
    return Translation(request=request, open_answer=open_answer, normalised=kept)


def write_event(name: str, data: Mapping[str, Any]) -> bytes:
    """Return a server-sent event with its name and JSON data."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"


def stable_hex(*parts: object, length: int = 24) -> str:
    """Return hexadecimal digits that depend on ``parts`` alone, for ids that we must invent."""
    text = "\0".join(str(part) for part in parts)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:length]


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return the reasoning of a chat message or delta.

    vLLM calls the field ``reasoning``, other servers and older versions ``reasoning_content``.
    """
    for name in ("reasoning", "reasoning_content"):
        value = message.get(name)
        if isinstance(value, str) and value:
            return value
    return ""


def read_arguments(text: str) -> Any:
    """Decode a tool call's arguments; raises ``ValueError`` where they are no JSON."""
    try:
        return json.loads(text)
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc


def write_arguments(value: Any) -> str:
    """Write a tool call's arguments as models write them: spaced, in their order, unescaped."""
    return json.dumps(value, ensure_ascii=False)


def same_json(one: Any, other: Any) -> bool:
    """Tell whether two JSON values are the same: 1 is 1.0, but it is not true."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other)
