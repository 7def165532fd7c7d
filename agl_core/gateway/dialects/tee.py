"""The tee of the dialects whose answers carry tokens: chat completions and completions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec

from agl_core.gateway.dialects.alternatives import alternatives_in, with_fewer
from agl_core.gateway.dialects.base import Answer, AnswerTee, ParsedRequest, is_event_stream
from agl_core.gateway.dialects.choices import ChoiceState, extras_in, prove, record
from agl_core.gateway.dialects.hidden import Hidden, strip, with_field
from agl_core.gateway.dialects.shapes import (
    UNREADABLE,
    Chunk,
    ChunkChoice,
    Whole,
    WholeLogprobs,
    decode_lenient,
)
from agl_core.gateway.dialects.sse import EventSplitter, data_of, ends_event, with_data

_chunk_decoder = msgspec.json.Decoder(Chunk)
_whole_decoder = msgspec.json.Decoder(Whole)


class TokenTee(AnswerTee):
    """Takes ids, logprobs and usage out of an answer and gathers them.

    A stream's ``[DONE]`` and what follows is held back, and so is a chunk that says ``abort``.
    Where the usage chunk is ours, vLLM moved ``system_fingerprint`` from the finish chunk to it;
    the finish chunk therefore waits for the next event, to get it back.
    """

    def __init__(
        self, request: ParsedRequest, adjusted: Mapping[str, Any], status: int, content_type: str
    ) -> None:
        self.is_stream = is_event_stream(content_type)
        self._request = request
        self._ok = 200 <= status < 300
        self._hidden = Hidden.between(request, adjusted) if self._ok else Hidden()
        self._splitter = EventSplitter()
        self._out: list[bytes] = []
        self._held: list[bytes] = []
        self._holding = False
        # The finish chunk that waits for its fingerprint: the event and its data.
        self._waiting: tuple[bytes, bytes] | None = None
        self._done = False
        self._ends_mid_event = False
        self._aborted = False
        self._first_token_seen = False
        self._states: dict[int, ChoiceState] = {}
        self._head: dict[str, Any] = {}
        self._usage: dict[str, Any] | None = None
        self._has_total_usage = False
        self._error: Any = None
        self._flags: dict[str, None] = {}
        self._shown: bytes | None = None

    @property
    def held(self) -> bytes:
        """What is held back from the agent: the stream's end, or an abort and what follows it."""
        return b"".join(self._held)

    @property
    def complete(self) -> bool:
        """Whether ``[DONE]`` was seen, or the whole body is JSON."""
        return self._done

    @property
    def aborted(self) -> bool:
        """Whether the engine has ended a choice with ``abort``."""
        return self._aborted

    @property
    def ends_mid_event(self) -> bool:
        """Whether what was sent stops inside an event, once ``finish`` was called."""
        return self._ends_mid_event

    @property
    def first_token_seen(self) -> bool:
        """Whether a generated token or text has come by."""
        return self._first_token_seen

    @property
    def token_counts(self) -> dict[int, int]:
        """How many token ids have come so far, by choice."""
        return {index: len(state.token_ids or ()) for index, state in self._states.items()}

    @abstractmethod
    def _is_empty(self, choice: ChunkChoice) -> bool:
        """Tell whether a choice of a chunk would not have been sent without our additions."""

    @abstractmethod
    def _has_output(self, choice: ChunkChoice) -> bool:
        """Tell whether a choice of a chunk has anything that the model generated."""

    @abstractmethod
    def _gather(self, state: ChoiceState, choice: ChunkChoice) -> None:
        """Add the text and logprobs of one chunk to what is known of its choice."""

    @abstractmethod
    def _chosen_logprobs(self, logprobs: WholeLogprobs) -> list[float | None] | None:
        """Return the chosen tokens' logprobs of a whole answer."""

    @abstractmethod
    def _assemble(self, states: list[ChoiceState]) -> dict[str, Any]:
        """Return a stream in the shape of a whole answer, but for what ``_head`` and usage give."""

    @abstractmethod
    def _text(self, state: ChoiceState) -> str | None:
        """Return a streamed choice's text where it can be compared with its tokens, else None."""

    # Streams

    def feed(self, data: bytes) -> bytes:
        """Return the events that can be sent now, without our additions."""
        for event in self._splitter.feed(data):
            self._take_event(event)
        return self._drain()

    def finish(self) -> bytes:
        """Return what is left: a waiting finish chunk, the held end, a broken last event.

        A broken last event is no use to an SSE client. Where things have to be taken out it is left
        out, since what it holds of ours cannot be told.
        """
        rest = self._splitter.take_rest()
        if rest:
            data = data_of(rest)
            if (
                self._done
                or not data
                or not self._hidden.anything
                or data == b"[DONE]"
                or decode_lenient(_chunk_decoder, data) is not None
            ):
                self._take_event(rest)
                self._ends_mid_event = not ends_event(rest)
        self._release()
        out = self._drain() + self.held
        self._held.clear()
        return out

    def _drain(self) -> bytes:
        out = self._out
        if not out:
            return b""
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        return data

    def _emit(self, event: bytes) -> None:
        (self._held if self._holding else self._out).append(event)

    def _release(self) -> None:
        """Let the waiting finish chunk go as it is."""
        if self._waiting is not None:
            event, _data = self._waiting
            self._waiting = None
            self._emit(event)

    def _take_event(self, event: bytes) -> None:
        data = None if self._done else data_of(event)
        if not data:
            self._release()
            self._emit(event)
            return
        if data == b"[DONE]":
            self._release()
            self._done = self._holding = True
            self._emit(event)
            return
        read = decode_lenient(_chunk_decoder, data)
        if read is None:
            self._flags["unreadable_event"] = None
            self._release()
            self._emit(event)
            return
        chunk, mended = read
        if self._hidden.tops is not None and chunk.choices:
            fewer = self._take_alternatives(mended, self._hidden.tops)
            if fewer is not mended:
                chunk, mended = _chunk_decoder.decode(fewer), fewer
        if mended is not data:
            event = with_data(event, mended)
        self._take_chunk(event, mended, chunk)

    def _take_chunk(self, event: bytes, data: bytes, chunk: Chunk) -> None:
        hidden = self._hidden
        choices = chunk.choices or []
        self._absorb(chunk, choices)
        if hidden.usage and chunk.usage is not None and not choices:
            self._take_fingerprint(chunk.system_fingerprint)
            self._release()
            return
        self._release()
        finished = False
        only_tokens = hidden.empty_chunks and bool(choices)
        for choice in choices:
            if choice.finish_reason is not None:
                finished, only_tokens = True, False
                if choice.finish_reason == "abort":
                    self._aborted = self._holding = True
            elif only_tokens:
                has_tokens = choice.token_ids is not None or choice.logprobs is not None
                only_tokens = has_tokens and self._is_empty(choice)
        if only_tokens:
            return
        if hidden.is_in(chunk):
            data = strip(data, hidden, usage=bool(choices))
            event = with_data(event, data)
        if finished and hidden.usage and chunk.system_fingerprint is None:
            self._waiting = (event, data)
        else:
            self._emit(event)

    def _take_fingerprint(self, fingerprint: Any) -> None:
        """Give the waiting finish chunk the fingerprint that our usage chunk took from it."""
        if self._waiting is None or fingerprint is None:
            return
        event, data = self._waiting
        self._waiting = (
            with_data(event, with_field(data, "system_fingerprint", fingerprint)),
            data,
        )

    def _absorb(self, chunk: Chunk, choices: list[ChunkChoice]) -> None:
        if chunk.error is not None:
            self._error = chunk.error
        if chunk.usage is not None and (not choices or not self._has_total_usage):
            # With continuous_usage_stats each chunk counts its own choice; the one without choices
            # has the total.
            self._usage = chunk.usage
            self._has_total_usage = not choices
        if chunk.system_fingerprint is not None:
            self._head["system_fingerprint"] = chunk.system_fingerprint
        if "id" not in self._head and chunk.id is not None:
            self._head.update(id=chunk.id, created=chunk.created, model=chunk.model)
        for choice in choices:
            state = self._state(choice.index)
            prompt = choice.prompt_token_ids or chunk.prompt_token_ids
            if prompt is not None:
                state.prompt_token_ids = prompt
            state.add_token_ids(choice.token_ids)
            if choice.finish_reason is not None:
                state.finish_reason = choice.finish_reason
                state.stop_reason = choice.stop_reason
            self._gather(state, choice)
            if not self._first_token_seen:
                self._first_token_seen = bool(choice.token_ids) or self._has_output(choice)

    def _state(self, index: int) -> ChoiceState:
        state = self._states.get(index)
        if state is None:
            state = self._states[index] = ChoiceState(index)
        return state

    def _take_alternatives(self, data: bytes, count: int) -> bytes:
        """Keep all alternatives of a chunk or a whole answer; return it with the agent's alone."""
        for index, found in alternatives_in(data).items():
            self._state(index).add_alternatives(found)
        return data if self._hidden.logprobs else with_fewer(data, count)

    # Whole answers

    def whole(self, body: bytes) -> bytes:
        """Return the body without our additions; one that cannot be read is returned as it came."""
        read = decode_lenient(_whole_decoder, body)
        self._shown = body
        self._done = not self._ok
        if read is None:
            return body
        answer, mended = read
        self._done = True
        self._error = answer.error
        if not self._ok:
            return body
        self._usage = answer.usage
        self._has_total_usage = answer.usage is not None
        for choice in answer.choices or ():
            state = self._states[choice.index] = ChoiceState(choice.index)
            state.prompt_token_ids = choice.prompt_token_ids or answer.prompt_token_ids
            state.add_token_ids(choice.token_ids)
            if choice.logprobs is not None:
                chosen = self._chosen_logprobs(choice.logprobs)
                if chosen is not None:
                    state.add_logprobs(chosen)
            state.finish_reason = choice.finish_reason
        self._first_token_seen = bool(answer.choices)
        self._aborted = any(state.finish_reason == "abort" for state in self._states.values())
        if answer.choices:
            for index, extras in extras_in(body).items():
                self._states[index].extras = extras
            if self._hidden.tops is not None:
                mended = self._take_alternatives(mended, self._hidden.tops)
            if self._hidden.anything:
                mended = strip(mended, self._hidden, usage=False)
        self._shown = mended
        return mended

    # Both

    def result(self) -> Answer:
        """Return what was seen so far; after a stream that broke off, what had come until then."""
        states = [self._states[index] for index in sorted(self._states)]
        for state in states:
            if self._request.echo:
                state.drop_prompt_logprobs()
            if state.has_gaps:
                self._flags["nonfinite_logprob"] = None
        if self.is_stream:
            response: Any = self._assemble_stream(states)
            if any((text := self._text(s)) is not None and s.text_differs(text) for s in states):
                self._flags["text_mismatch"] = None
        else:
            response = self._decode_shown()
            self._leave_out_extras(response)
        error = self._error
        if error is None and not self._ok and response is not None:
            error = response
        proofs = prove(states, self._usage, ended=self._done and error is None)
        return Answer(
            response=response,
            choices=[record(state, proof) for state, proof in zip(states, proofs, strict=True)],
            usage=self._usage,
            error=error,
            aborted=self._aborted,
            flags=list(self._flags),
        )

    def _assemble_stream(self, states: list[ChoiceState]) -> dict[str, Any] | None:
        if not states:
            return None if self._error is None else {"error": self._error}
        response = {**self._head, **self._assemble(states), "usage": self._usage}
        if self._error is not None:
            response["error"] = self._error
        return response

    def _leave_out_extras(self, response: Any) -> None:
        """Take out of a whole answer what is large and recorded in the choice."""
        if any(state.extras for state in self._states.values()):
            for choice in response["choices"]:
                if self._states[choice.get("index", 0)].extras:
                    choice["routed_experts"] = None

    def _decode_shown(self) -> Any:
        if self._shown is None:
            return None
        try:
            return msgspec.json.decode(self._shown)
        except UNREADABLE:
            return None
