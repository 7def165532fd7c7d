"""The alternatives to each token: keeping all that came, showing the agent what it asked for.

vLLM puts the sampled token first and the likeliest ones after it. Asked for ``k`` of them, chat has
the first ``k`` of these, the sampled one included; completions have the sampled one and the ``k``
likeliest, which it may be among. So fewer of them can be made of more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from agl_core.gateway.dialects.base import RawFields
from agl_core.gateway.dialects.shapes import UNREADABLE

Alternatives = list[list[list[Any]] | None]
"""Per token its alternatives, each ``[token or token id, logprob or None]``; None: none came."""

# What vLLM 0.32 writes for a token where ``return_tokens_as_token_ids`` is set.
_TOKEN_ID = re.compile(r"token_id:([0-9]{1,18})")

_fields_decoder = msgspec.json.Decoder(RawFields)
_choices_decoder = msgspec.json.Decoder(list[RawFields])
_logprobs_decoder = msgspec.json.Decoder(RawFields | None)
_content_decoder = msgspec.json.Decoder(list[RawFields] | None)
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw] | None)
_tops_decoder = msgspec.json.Decoder(list[RawFields | None] | None)
_number_decoder = msgspec.json.Decoder(float | None)


class _Top(msgspec.Struct, gc=False):
    token: str
    logprob: float | None = None


class _Token(msgspec.Struct):
    top_logprobs: list[_Top] | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None
    top_logprobs: list[dict[str, float | None] | None] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    logprobs: _Logprobs | None = None


class _Told(msgspec.Struct):
    choices: list[_Choice] | None = None


_told_decoder = msgspec.json.Decoder(_Told)


def alternatives_in(data: bytes) -> dict[int, Alternatives]:
    """Return all alternatives of a chunk or a whole answer, by choice; none in another shape.

    They stand as the engine listed them, the sampled token among them where it listed that.
    """
    try:
        choices = _told_decoder.decode(data).choices or ()
    except UNREADABLE:
        return {}
    return {choice.index: _listed(choice.logprobs) for choice in choices if choice.logprobs}


def _listed(logprobs: _Logprobs) -> Alternatives:
    if logprobs.content is not None:
        tokens = (token.top_logprobs for token in logprobs.content)
        return [
            None if tops is None else _pairs((top.token, top.logprob) for top in tops)
            for tops in tokens
        ]
    listed = logprobs.top_logprobs or ()
    return [None if tops is None else _pairs(tops.items()) for tops in listed]


def _pairs(tops: Iterable[tuple[str, float | None]]) -> list[list[Any]]:
    return [[_id_or_text(token), logprob] for token, logprob in tops]


def _id_or_text(token: str) -> int | str:
    match = _TOKEN_ID.fullmatch(token)
    return token if match is None else int(match[1])


def with_fewer(data: bytes, count: int) -> bytes:
    """Return a chunk or a whole answer with at most the alternatives that ``count`` asks for.

    What is of another shape stays; without a difference the very bytes that came are returned.
    """
    try:
        fields: dict[str, Any] = dict(_fields_decoder.decode(data))
        choices = _choices_decoder.decode(fields["choices"]) if "choices" in fields else []
        is_changed = False
        for choice in choices:
            logprobs = _logprobs_decoder.decode(choice.get("logprobs", b"null"))
            changed = None if logprobs is None else _fewer(logprobs, count)
            if changed is not None:
                choice["logprobs"] = _raw(changed)
                is_changed = True
    except UNREADABLE:
        return data
    if not is_changed:
        return data
    fields["choices"] = choices
    return msgspec.json.encode(fields)


def _fewer(logprobs: RawFields, count: int) -> RawFields | None:
    """Return one choice's logprobs with fewer alternatives; None where there are no more."""
    if "content" in logprobs:
        content = _content_decoder.decode(logprobs["content"]) or []
        found = [_fewer_of_chat(token, count) for token in content]
        return {**logprobs, "content": _raw(content)} if any(found) else None
    if "top_logprobs" in logprobs:
        tops = _tops_decoder.decode(logprobs["top_logprobs"]) or []
        kept = [top and _likeliest(top, count) for top in tops]
        return {**logprobs, "top_logprobs": _raw(kept)} if kept != tops else None
    return None


def _fewer_of_chat(token: RawFields, count: int) -> bool:
    """Cut a token's alternatives down; return whether there were more."""
    tops = _list_decoder.decode(token.get("top_logprobs", b"null"))
    if tops is None or len(tops) <= count:
        return False
    token["top_logprobs"] = _raw(tops[:count])
    return True


def _likeliest(tops: RawFields, count: int) -> RawFields:
    """Return the sampled token, which is the first, and the others among the ``count`` likeliest.

    The others come in the order of their likelihood.
    """
    sampled, *others = (_number(raw) for raw in tops.values())
    before = sum(other > sampled for other in others)
    kept = count if before < count else count + 1
    return dict(list(tops.items())[:kept]) if kept < len(tops) else tops


def _number(raw: msgspec.Raw) -> float:
    value = _number_decoder.decode(raw)
    return float("-inf") if value is None else value


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
