"""Taking out of an answer what the agent did not ask for, by patching raw JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from attrs import frozen

from agl_core.gateway.dialects.base import NULL, ParsedRequest, RawFields, as_integer
from agl_core.gateway.dialects.shapes import Chunk

_fields_decoder = msgspec.json.Decoder(RawFields)
_choices_decoder = msgspec.json.Decoder(list[RawFields] | None)


@frozen(kw_only=True)
class Hidden:
    """What only we asked for, and the agent must therefore not see."""

    token_ids: bool = False
    logprobs: bool = False
    tops: int | None = None
    """How many alternatives the agent asked for with each token, where more were asked for."""
    routing: bool = False
    """Which experts each token went through; in whole answers only."""
    usage: bool = False
    # Chunks that carry tokens and nothing else. They stay where the agent asked for ids or logprobs
    # itself.
    empty_chunks: bool = False

    @classmethod
    def between(cls, request: ParsedRequest, adjusted: Mapping[str, Any]) -> Hidden:
        """Return what ``adjusted`` adds to what the agent asked for."""
        token_ids = not request.wants_token_ids and bool(adjusted.get("return_token_ids"))
        asked = (adjusted.get("logprobs"), adjusted.get("top_logprobs"))
        logprobs = not request.wants_logprobs and any(value is not None for value in asked)
        return cls(
            token_ids=token_ids,
            logprobs=logprobs,
            tops=_asked_tops(request, adjusted) if request.wants_logprobs or logprobs else None,
            routing=not request.get("return_routed_experts")
            and bool(adjusted.get("return_routed_experts")),
            usage=not request.wants_usage and adjusted.get("stream_options") is not None,
            empty_chunks=(token_ids or logprobs)
            and not (request.wants_token_ids or request.wants_logprobs),
        )

    @property
    def anything(self) -> bool:
        """Whether anything has to be taken out."""
        return (
            self.token_ids or self.logprobs or self.tops is not None or self.routing or self.usage
        )

    def is_in(self, chunk: Chunk) -> bool:
        """Tell whether a chunk has anything that must be taken out."""
        if self.usage and chunk.usage is not None:
            return True
        if self.token_ids and chunk.prompt_token_ids is not None:
            return True
        for choice in chunk.choices or ():
            if self.logprobs and choice.logprobs is not None:
                return True
            if self.token_ids and (
                choice.token_ids is not None or choice.prompt_token_ids is not None
            ):
                return True
        return False


def _asked_tops(request: ParsedRequest, adjusted: Mapping[str, Any]) -> int | None:
    name = request.tops_field
    if name not in adjusted and request.wants_logprobs:
        return None
    sent = as_integer(adjusted[name] if name in adjusted else request.get(name))
    if sent is None:
        return None
    # What an agent names that gets no logprobs at all, it did not ask for.
    asked = as_integer(request.get(name) or 0) if request.wants_logprobs else 0
    # -1 asks for the whole vocabulary.
    return asked if asked is not None and asked >= 0 and (sent > asked or sent == -1) else None


def strip(data: bytes, hidden: Hidden, *, usage: bool) -> bytes:
    """Null what is hidden, as vLLM has it unasked; ``usage``: take a chunk's usage out too."""
    fields: dict[str, Any] = dict(_fields_decoder.decode(data))
    if usage and hidden.usage:
        fields.pop("usage", None)
    if hidden.token_ids and "prompt_token_ids" in fields:
        fields["prompt_token_ids"] = NULL
    choices = _choices_decoder.decode(fields["choices"]) if "choices" in fields else None
    for choice in choices or ():
        if hidden.token_ids:
            if "token_ids" in choice:
                choice["token_ids"] = NULL
            if "prompt_token_ids" in choice:
                choice["prompt_token_ids"] = NULL
        if hidden.logprobs and "logprobs" in choice:
            choice["logprobs"] = NULL
        if hidden.routing and "routed_experts" in choice:
            choice["routed_experts"] = NULL
    if choices:
        fields["choices"] = choices
    return msgspec.json.encode(fields)


def with_field(data: bytes, name: str, value: Any) -> bytes:
    """Return a JSON object with one more field at its end."""
    fields = _fields_decoder.decode(data)
    fields[name] = msgspec.Raw(msgspec.json.encode(value))
    return msgspec.json.encode(fields)
