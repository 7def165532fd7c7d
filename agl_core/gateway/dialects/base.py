"""What every dialect offers: reading and patching a request, and a tee that watches its answer.

All of it is pure: no I/O, no clock. JSON values stay raw bytes, so that what is not understood is
passed on as it came.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec
from attrs import Factory, field, frozen

from agl_core.gateway.dialects.shapes import UNREADABLE

RawFields = dict[str, msgspec.Raw]

NULL = msgspec.Raw(b"null")
_read_fields = msgspec.json.Decoder(RawFields)
_TRUE_WORDS = frozenset({"1", "on", "t", "true", "y", "yes"})
_INTEGER = re.compile(r"\s*[+-]?[0-9]{1,18}\s*")
_FALSE_WORDS = frozenset({"0", "off", "f", "false", "n", "no"})


def as_flag(value: Any) -> bool | None:
    """Read a boolean as pydantic's lax mode, and so vLLM, does; None where that refuses it.

    An absent field and null count as False: that is the default of all fields this is used for.
    """
    if value is None:
        return False
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    if isinstance(value, str):
        word = value.lower()
        return True if word in _TRUE_WORDS else False if word in _FALSE_WORDS else None
    return None


def as_integer(value: Any) -> int | None:
    """Read an integer as pydantic's lax mode, and so vLLM, does; None where that refuses it."""
    if isinstance(value, str):
        return int(value) if _INTEGER.fullmatch(value) else None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return int(value) if isinstance(value, int) else None


@frozen(kw_only=True)
class ParsedRequest:
    """A request's body and what of it the gateway needs to know.

    Attributes:
        body: The body as the agent sent it.
        fields: Its top-level fields, or None where the body is not a JSON object: it is then passed
            on untouched.
        stream: The agent asked for a streamed answer.
        model: The model it named.
        wants_token_ids: It asked for token ids itself, so they stay in its answer.
        wants_logprobs: It asked for logprobs in a way that the server answers with logprobs.
        tops_field: The field that says how many alternatives come with each token's logprob.
        wants_usage: It asked for the usage chunk of a stream.
    """

    body: bytes = field(repr=False)
    fields: RawFields | None = field(default=None, repr=False)
    stream: bool = False
    model: str | None = None
    wants_token_ids: bool = False
    wants_logprobs: bool = False
    tops_field: str = "top_logprobs"
    wants_usage: bool = False
    n: int = 1
    echo: bool = False

    def get(self, name: str) -> Any:
        """Return a top-level field, decoded; None where it is absent, null or not readable."""
        raw = None if self.fields is None else self.fields.get(name)
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw)
        except UNREADABLE:
            return None

    def has(self, name: str) -> bool:
        """Tell whether the field is there, be it null."""
        return self.fields is not None and name in self.fields


@frozen(kw_only=True)
class Reshaped:
    """A request's body after changes; ``adjusted`` is ``{field: value sent, None = removed}``."""

    body: bytes = field(repr=False)
    adjusted: dict[str, Any] = Factory(dict)


@frozen(kw_only=True)
class Answer:
    """What was seen of one answer, in the shape of a ``model_request`` event.

    Attributes:
        response: The answer as the agent got it, a stream assembled into the shape of a whole
            answer; None where it could not be read.
        choices: ``{index, prompt_token_ids, token_ids, logprobs, version_spans, finish_reason,
            tokens, extras}`` each.
        usage: As the server told it; a count of 0 is kept and differs from an absent one.
        error: The server's error, from an error body or from an event inside a stream.
        aborted: The engine ended a choice with ``abort``.
        flags: Things that someone may want to look at: ``nonfinite_logprob``, ``text_mismatch``,
            ``unreadable_event``.
    """

    response: Any = field(default=None, repr=False)
    choices: list[dict[str, Any]] = field(factory=list, repr=False)
    usage: dict[str, Any] | None = None
    error: Any = None
    aborted: bool = False
    flags: list[str] = Factory(list)

    @property
    def finish_reasons(self) -> list[str | None]:
        """The finish reason of each choice, in the order of ``choices``."""
        return [choice["finish_reason"] for choice in self.choices]


class AnswerTee(ABC):
    """Watches one upstream answer: hands on what the agent is to get, keeps what is recorded.

    For an event stream call ``feed`` for each piece, then ``finish``; for any other answer call
    ``whole`` once. ``is_stream`` says which it is, by the answer's own content type.
    """

    is_stream: bool

    @abstractmethod
    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of a stream and return what can be sent now."""

    @abstractmethod
    def finish(self) -> bytes:
        """Return what is left to be sent when the stream has ended, however it ended."""

    @abstractmethod
    def whole(self, body: bytes) -> bytes:
        """Take a whole body and return the body for the agent."""

    @property
    @abstractmethod
    def held(self) -> bytes:
        """What is held back: the stream's end, so that the call can be recorded before it."""

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether the answer ended as its dialect says that it must."""

    @property
    @abstractmethod
    def aborted(self) -> bool:
        """Whether the engine ended a choice with ``abort``; from that chunk on all is held."""

    @property
    @abstractmethod
    def ends_mid_event(self) -> bool:
        """Whether a stream that broke off was passed on up to the middle of an event.

        An event of ours must then be preceded by a blank line, or it would be read as part of that
        one.
        """

    @property
    @abstractmethod
    def first_token_seen(self) -> bool:
        """Whether anything that the model generated has come by."""

    @property
    def content_type(self) -> str | None:
        """The content type of what the agent gets, where it is not the model server's."""
        return None

    @property
    def token_counts(self) -> Mapping[int, int]:
        """How many token ids have come so far, by choice."""
        return {}

    @property
    def generated(self) -> Mapping[str, str]:
        """The arguments of tool calls exactly as the model wrote them, by call id."""
        return {}

    @property
    def remember(self) -> Mapping[str, Any]:
        """What later requests may refer to, by id."""
        return {}

    @abstractmethod
    def result(self) -> Answer:
        """Return what was seen so far."""


def is_event_stream(content_type: str) -> bool:
    """Tell whether a content type is that of server-sent events."""
    return content_type.partition(";")[0].strip().lower() == "text/event-stream"


class Dialect(ABC):
    """One API as agents speak it."""

    api: str

    def read_request(self, body: bytes) -> ParsedRequest:
        """Read what the gateway needs from a body; a body that cannot be read is not an error."""
        try:
            fields = _read_fields.decode(body)
        except UNREADABLE:
            return ParsedRequest(body=body)
        return self._describe(ParsedRequest(body=body, fields=fields))

    @abstractmethod
    def _describe(self, request: ParsedRequest) -> ParsedRequest:
        """Fill in what the agent asked for."""

    @abstractmethod
    def capture_changes(self, request: ParsedRequest) -> dict[str, Any]:
        """Return the fields to change so that the answer can be recorded for training.

        Only those that differ. What the server would refuse is left alone, so that the agent gets
        the error it would have got.
        """

    @abstractmethod
    def open_answer(
        self, request: ParsedRequest, adjusted: Mapping[str, Any], status: int, content_type: str
    ) -> AnswerTee:
        """Return the tee for the answer to a request that was sent with ``adjusted``."""

    def reshape(self, request: ParsedRequest, changes: Mapping[str, Any]) -> Reshaped:
        """Set top-level fields (None removes one); all other values keep their bytes and order.

        Without a difference, or where the body is not a JSON object, the body is the very one that
        came.
        """
        if request.fields is None:
            return Reshaped(body=request.body)
        fields = dict(request.fields)
        adjusted: dict[str, Any] = {}
        for name, value in changes.items():
            old = fields.get(name)
            if value is None:
                if old is None:
                    continue
                del fields[name]
            else:
                new = msgspec.json.encode(value)
                if old is not None and _canonical(old) == new:
                    continue
                fields[name] = msgspec.Raw(new)
            adjusted[name] = value
        if not adjusted:
            return Reshaped(body=request.body)
        return Reshaped(body=msgspec.json.encode(fields), adjusted=adjusted)


def _canonical(raw: msgspec.Raw) -> bytes | None:
    try:
        return msgspec.json.encode(msgspec.json.decode(raw))
    except UNREADABLE:
        return None
