"""A chat answer as a response: the tee that writes whole bodies, and streams event for event.

An item is done when the next one begins, as in the API; the last one is done with the end, which is
held back. A stream that breaks off therefore leaves no half call that an agent would run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from agl_core.gateway.dialects.base import AnswerTee
from agl_core.gateway.dialects.responses.answer import (
    Frame,
    call_item,
    delta_logprobs,
    incomplete_reason,
    logprobs_of,
    made_up_call_id,
    message_item,
    prefix_of,
    reasoning_item,
    text_part,
)
from agl_core.gateway.dialects.responses.errors import error_event, read_error
from agl_core.gateway.dialects.responses.tools import InputReader, ToolName
from agl_core.gateway.dialects.shapes import Chunk, ChunkChoice
from agl_core.gateway.dialects.translation import (
    TranslatedTee,
    reasoning_of,
    stable_hex,
    write_event,
)

Event = tuple[str, dict[str, Any]]


class _Reasoning:
    """A reasoning item while it comes in."""

    prefix = "rs"

    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self._pieces: list[str] = []

    def begin(self) -> list[Event]:
        part = {"text": "", "type": "reasoning_text"}
        return [
            ("output_item.added", {"item": reasoning_item(self.id, None, "in_progress")}),
            ("content_part.added", self._in_part(part=part)),
        ]

    def add(self, text: str) -> list[Event]:
        self._pieces.append(text)
        return [("reasoning_text.delta", self._in_part(delta=text))]

    def end(self, status: str) -> list[Event]:
        text = "".join(self._pieces)
        part = {"text": text, "type": "reasoning_text"}
        return [
            ("reasoning_text.done", self._in_part(text=text)),
            ("content_part.done", self._in_part(part=part)),
            ("output_item.done", {"item": self.item(status)}),
        ]

    def item(self, status: str) -> dict[str, Any]:
        return reasoning_item(self.id, "".join(self._pieces), status)

    def _in_part(self, **fields: Any) -> dict[str, Any]:
        return {"content_index": 0, "item_id": self.id, **fields}


class _Message:
    """A message while it comes in."""

    prefix = "msg"

    def __init__(self, item_id: str, *, with_logprobs: bool) -> None:
        self.id = item_id
        self._pieces: list[str] = []
        self._logprobs: list[dict[str, Any]] | None = [] if with_logprobs else None
        self._unshown: list[dict[str, Any]] = []

    def begin(self) -> list[Event]:
        return [
            ("output_item.added", {"item": message_item(self.id, None, None, "in_progress")}),
            ("content_part.added", self._in_part(part=text_part("", []))),
        ]

    def note(self, logprobs: list[dict[str, Any]]) -> None:
        """Keep logprobs; those of tokens without a text of their own go with the next text."""
        if self._logprobs is not None:
            self._logprobs += logprobs
            self._unshown += logprobs

    def add(self, text: str) -> list[Event]:
        self._pieces.append(text)
        shown, self._unshown = delta_logprobs(self._unshown), []
        return [("output_text.delta", self._in_part(delta=text, logprobs=shown))]

    def end(self, status: str) -> list[Event]:
        text = "".join(self._pieces)
        return [
            ("output_text.done", self._in_part(text=text, logprobs=[])),
            ("content_part.done", self._in_part(part=text_part(text, self._logprobs))),
            ("output_item.done", {"item": self.item(status)}),
        ]

    def item(self, status: str) -> dict[str, Any]:
        return message_item(self.id, "".join(self._pieces), self._logprobs, status)

    def _in_part(self, **fields: Any) -> dict[str, Any]:
        return {"content_index": 0, "item_id": self.id, **fields}


class _Call:
    """A call while it comes in."""

    def __init__(self, item_id: str, call_id: str, name: ToolName) -> None:
        self.id = item_id
        self._call_id = call_id
        self._name = name
        self._pieces: list[str] = []
        self._reader = InputReader()
        self._shown: list[str] = []

    def begin(self) -> list[Event]:
        return [("output_item.added", {"item": self.item("in_progress")})]

    def add(self, text: str) -> list[Event]:
        self._pieces.append(text)
        if not self._name.is_custom:
            return [("function_call_arguments.delta", {"delta": text, "item_id": self.id})]
        return self._show(self._reader.feed(text))

    def end(self, status: str) -> list[Event]:
        item = self.item(status)
        done: dict[str, Any] = {"item_id": self.id}
        events: list[Event] = []
        if self._name.is_custom:
            shown = "".join(self._shown)
            if item["input"].startswith(shown):
                events += self._show(item["input"][len(shown) :])
            events.append(("custom_tool_call_input.done", {**done, "input": item["input"]}))
        else:
            done.update(name=self._name.name, arguments=item["arguments"])
            events.append(("function_call_arguments.done", done))
        return [*events, ("output_item.done", {"item": item})]

    def item(self, status: str) -> dict[str, Any]:
        return call_item(self.id, self._call_id, self._name, "".join(self._pieces), status)

    def _show(self, text: str) -> list[Event]:
        if not text:
            return []
        self._shown.append(text)
        return [("custom_tool_call_input.delta", {"delta": text, "item_id": self.id})]


_Open = _Reasoning | _Message | _Call


class ResponsesTee(TranslatedTee):
    """Writes a chat answer as a response."""

    def __init__(
        self,
        inner: AnswerTee,
        status: int,
        frame: Frame,
        *,
        cut_answers_end: Literal["incomplete", "completed"] = "incomplete",
    ) -> None:
        super().__init__(inner, status)
        self._frame = frame
        self._cut_answers_end = cut_answers_end
        self._sequence = 0
        self._head: tuple[Any, Any, Any] | None = None
        self._seed = ""
        self._items: list[_Open] = []
        self._is_open = False
        # By the index that chat gives a call; a new id at the same index is another call.
        self._calls: dict[int, tuple[Any, _Call]] = {}
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] | None = None
        self._response: dict[str, Any] | None = None

    @property
    def remember(self) -> dict[str, Any]:
        """What later requests may refer to, by id; empty until the answer has ended."""
        response = None if self.aborted else self._response
        return {} if response is None else self._frame.remember(response)

    # Streams

    def _write_chunk(self, chunk: Chunk) -> bytes:
        out: list[bytes] = []
        if self._head is None:
            self._head = (chunk.id, chunk.created, chunk.model)
            self._seed = self._frame.hex_of(chunk.id)
            begun = self._now("in_progress")
            out = [
                self._event(f"response.{name}", response=begun)
                for name in ("created", "in_progress")
            ]
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices or ():
            if choice.index == 0:
                out += self._take_choice(choice)
        return b"".join(out)

    def _take_choice(self, choice: ChunkChoice) -> list[bytes]:
        out: list[bytes] = []
        delta = choice.delta or {}
        reasoning, text = reasoning_of(delta), delta.get("content")
        if reasoning:
            out += self._ensure(_Reasoning)
            out += self._events(self._items[-1].add(reasoning))
        if isinstance(text, str) and text:
            out += self._ensure(_Message)
        if choice.logprobs is not None and not reasoning:
            last = self._items[-1] if self._is_open else None
            if isinstance(last, _Message):
                last.note(logprobs_of(choice.logprobs))
        if isinstance(text, str) and text:
            out += self._events(self._items[-1].add(text))
        for call in delta.get("tool_calls") or ():
            if isinstance(call, dict):
                out += self._take_call(call)
        if choice.finish_reason is not None:
            self._finish_reason = choice.finish_reason
        return out

    def _ensure(self, kind: type[_Reasoning] | type[_Message]) -> list[bytes]:
        """Begin an item of a kind unless one is open."""
        if self._is_open and isinstance(self._items[-1], kind):
            return []
        closed = self._close("completed")
        item_id = f"{kind.prefix}_{self._item_hex()}"
        if kind is _Message:
            item: _Open = _Message(item_id, with_logprobs=self._frame.wants_logprobs)
        else:
            item = _Reasoning(item_id)
        return closed + self._begin(item)

    def _take_call(self, delta: dict[str, Any]) -> list[bytes]:
        function = delta.get("function") or {}
        index = delta.get("index")
        at = index if isinstance(index, int) else max(self._calls, default=0)
        call_id = delta.get("id")
        known, call = self._calls.get(at, (None, None))
        out: list[bytes] = []
        if call is None or (call_id and known and call_id != known):
            name = self._frame.tools.original(str(function.get("name")))
            out += self._close("completed")
            call = _Call(
                f"{prefix_of(name)}_{self._item_hex()}",
                call_id or made_up_call_id(self._seed, len(self._calls)),
                name,
            )
            self._calls[at] = (call_id, call)
            out += self._begin(call)
        arguments = function.get("arguments")
        if isinstance(arguments, str) and arguments:
            out += self._events(call.add(arguments), self._items.index(call))
        return out

    def _item_hex(self) -> str:
        return stable_hex(self._seed, len(self._items))

    def _begin(self, item: _Open) -> list[bytes]:
        self._items.append(item)
        self._is_open = True
        return self._events(item.begin())

    def _close(self, status: str) -> list[bytes]:
        """End the open item."""
        if not self._is_open:
            return []
        self._is_open = False
        return self._events(self._items[-1].end(status))

    def _write_end(self) -> bytes:
        reason = incomplete_reason(self._finish_reason)
        status = "incomplete" if reason else "completed"
        out = self._close(status)
        self._response = self._now(status, reason)
        end = self._cut_answers_end if reason else "completed"
        out.append(self._event(f"response.{end}", response=self._response))
        return b"".join(out)

    def _write_error(self, error: Any) -> bytes:
        return self._event("error", **error_event(error))

    def _now(self, status: str, reason: str | None = None) -> dict[str, Any]:
        """Return the response as it is now."""
        upstream_id, created, model = self._head or (None, None, None)
        last = len(self._items) - 1
        output = [
            item.item(status if at == last else "completed") for at, item in enumerate(self._items)
        ]
        return self._frame.response(
            upstream_id=upstream_id,
            created=created,
            model=model,
            status=status,
            output=output,
            usage=None if status == "in_progress" else self._usage,
            reason=reason,
        )

    def _events(self, events: Sequence[Event], at: int | None = None) -> list[bytes]:
        index = len(self._items) - 1 if at is None else at
        return [
            self._event(f"response.{name}", output_index=index, **data) for name, data in events
        ]

    def _event(self, name: str, /, **data: Any) -> bytes:
        number = self._sequence
        self._sequence += 1
        return write_event(name, {"type": name, **data, "sequence_number": number})

    def _assemble(self) -> Any:
        if self._response is not None:
            return self._response
        error = self._inner.result().error
        if self._head is None:
            return None if error is None else {"error": error}
        response = self._now("failed" if error is not None else "in_progress")
        if error is not None:
            told = error_event(error)
            response["error"] = {"code": told["code"], "message": told["message"]}
        return response

    # Whole answers

    def _read_whole(self, chat: dict[str, Any]) -> dict[str, Any]:
        self._response = self._frame.read_whole(chat)
        return self._response

    def _read_error(self, status: int, body: bytes) -> dict[str, Any]:
        return read_error(status, body)
