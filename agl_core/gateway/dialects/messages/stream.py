"""A chat stream as the events of a message.

Blocks are written one after another, as the API has it, also where a server mixes its deltas: what
belongs to a later block waits until the one before it is known to be whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from attrs import Factory, define

from agl_core.gateway.dialects.base import AnswerTee
from agl_core.gateway.dialects.messages.answer import (
    blank_message,
    call_id,
    message_of,
    signature_of,
    stop_of,
    text_block,
    thinking_block,
    tool_block,
    usage_of,
)
from agl_core.gateway.dialects.messages.errors import error_from_chat, error_from_stream
from agl_core.gateway.dialects.shapes import Chunk, ChunkChoice
from agl_core.gateway.dialects.translation import (
    TranslatedTee,
    read_arguments,
    reasoning_of,
    write_event,
)


@define(eq=False)
class _Block:
    """One content block while its stream comes in."""

    kind: Literal["thinking", "text", "tool_use"]
    index: int
    signature: str = ""
    call_index: Any = None
    call_id: str = ""
    name: str = ""
    pieces: list[str] = Factory(list)
    sent: int = 0
    is_started: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def is_whole(self) -> bool:
        """Whether nothing more can come, given that another block has begun after it."""
        if self.kind != "tool_use":
            return True
        try:
            read_arguments(self.text)
        except ValueError:
            return False
        return True

    def whole(self) -> dict[str, Any]:
        """Return the block with all that has come of it."""
        if self.kind == "thinking":
            return thinking_block(self.text, self.signature)
        if self.kind == "text":
            return text_block(self.text)
        return tool_block(self.call_id, self.name, self.text)

    def _opening(self) -> dict[str, Any]:
        if self.kind == "thinking":
            return thinking_block("", "")
        if self.kind == "text":
            return text_block("")
        return tool_block(self.call_id, self.name, "")

    def write(self) -> Iterator[bytes]:
        """Yield the events for what has come and was not sent; a call waits for its name."""
        if not self.is_started:
            if self.kind == "tool_use" and not self.name:
                return
            self.is_started = True
            yield _event("content_block_start", content_block=self._opening(), index=self.index)
        kinds = {
            "thinking": ("thinking_delta", "thinking"),
            "text": ("text_delta", "text"),
            "tool_use": ("input_json_delta", "partial_json"),
        }
        delta, name = kinds[self.kind]
        for piece in self.pieces[self.sent :]:
            yield self._delta({"type": delta, name: piece})
        self.sent = len(self.pieces)

    def close(self) -> Iterator[bytes]:
        """Yield the events that end the block."""
        yield from self.write()
        if not self.is_started:
            self.is_started = True
            yield _event("content_block_start", content_block=self._opening(), index=self.index)
        if self.kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self.signature})
        yield _event("content_block_stop", index=self.index)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", delta=delta, index=self.index)


class MessagesTee(TranslatedTee):
    """The tee of a message."""

    def __init__(self, inner: AnswerTee, status: int, model: str | None) -> None:
        super().__init__(inner, status)
        self._model = model
        self._upstream: Any = None
        self._message: dict[str, Any] | None = None
        self._blocks: list[_Block] = []
        # The blocks before this one are closed; those after it wait.
        self._live = 0
        self._finish: tuple[Any, Any] = (None, None)
        self._usage: dict[str, Any] | None = None
        self._is_ended = False

    # Streams

    def _write_chunk(self, chunk: Chunk) -> bytes:
        out: list[bytes] = []
        if chunk.usage is not None:
            self._usage = chunk.usage
        if self._message is None:
            out.append(self._write_start(chunk))
        for choice in chunk.choices or ():
            if choice.index == 0:
                self._take_choice(choice)
                out += self._write_blocks(is_end=choice.finish_reason is not None)
        return b"".join(out)

    def _write_start(self, chunk: Chunk) -> bytes:
        self._upstream = chunk.id
        self._message = blank_message(chunk.id, self._model or chunk.model)
        prompt = (self._usage or {}).get("prompt_tokens") or 0
        usage = {"input_tokens": prompt, "output_tokens": 0}
        return _event("message_start", message={**self._message, "usage": usage})

    def _take_choice(self, choice: ChunkChoice) -> None:
        delta = choice.delta or {}
        reasoning, text = reasoning_of(delta), delta.get("content")
        if reasoning:
            self._text_block("thinking").pieces.append(reasoning)
        if isinstance(text, str) and text:
            self._text_block("text").pieces.append(text)
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict):
                self._take_call(call)
        if choice.finish_reason is not None:
            self._finish = (choice.finish_reason, choice.stop_reason)

    def _text_block(self, kind: Literal["thinking", "text"]) -> _Block:
        """Return the last block where it is of this kind, else a new one."""
        if self._blocks and self._blocks[-1].kind == kind:
            return self._blocks[-1]
        index = len(self._blocks)
        signature = signature_of(self._upstream, index) if kind == "thinking" else ""
        return self._add(_Block(kind, index, signature=signature))

    def _take_call(self, call: dict[str, Any]) -> None:
        """Add to the call of the delta's index; another id at that index is another call."""
        index, given = call.get("index"), call.get("id")
        calls = [block for block in self._blocks if block.kind == "tool_use"]
        block = next((b for b in reversed(calls) if b.call_index == index), None)
        if index is None and not given and calls:
            block = calls[-1]
        if block is None or (given and given != block.call_id):
            place = len(self._blocks)
            tool_id = call_id(given, self._upstream, place)
            block = self._add(_Block("tool_use", place, call_index=index, call_id=tool_id))
        function = call.get("function")
        if isinstance(function, dict):
            name, arguments = function.get("name"), function.get("arguments")
            if isinstance(name, str) and not block.is_started:
                block.name += name
            if isinstance(arguments, str) and arguments:
                block.pieces.append(arguments)

    def _add(self, block: _Block) -> _Block:
        self._blocks.append(block)
        return block

    def _write_blocks(self, *, is_end: bool) -> Iterator[bytes]:
        """Yield what can be sent of the blocks; at the end, all of it."""
        while self._live < len(self._blocks):
            block = self._blocks[self._live]
            if not is_end and (self._live == len(self._blocks) - 1 or not block.is_whole):
                yield from block.write()
                return
            yield from block.close()
            self._live += 1

    def _write_end(self) -> bytes:
        out = list(self._write_blocks(is_end=True))
        if self._message is None:
            out.append(self._write_start(Chunk()))
        self._is_ended = True
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        out.append(_event("message_delta", delta=delta, usage=usage_of(self._usage)))
        out.append(_event("message_stop"))
        return b"".join(out)

    def _stop(self) -> tuple[str, str | None]:
        has_calls = any(block.kind == "tool_use" for block in self._blocks)
        return stop_of(*self._finish, has_calls=has_calls)

    def _write_error(self, error: Any) -> bytes:
        answer = error_from_stream(error)
        return _event("error", error=answer["error"])

    def _assemble(self) -> Any:
        if self._message is None:
            return None
        message = {**self._message, "content": [block.whole() for block in self._blocks]}
        if self._is_ended:
            message["stop_reason"], message["stop_sequence"] = self._stop()
        message["usage"] = usage_of(self._usage)
        return message

    # Whole answers

    def _read_whole(self, chat: dict[str, Any]) -> dict[str, Any]:
        return message_of(chat, self._model)

    def _read_error(self, status: int, body: bytes) -> dict[str, Any]:
        return error_from_chat(status, body)


def _event(kind: str, **data: Any) -> bytes:
    return write_event(kind, {"type": kind, **data})
