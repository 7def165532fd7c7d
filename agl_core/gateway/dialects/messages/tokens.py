"""``count_tokens``, answered by vLLM's ``/tokenize``.

vLLM's own route leaves out what other parts of a request add to the prompt; counting the very
messages and tools of the translated call gives the length of that call's prompt.
"""

from __future__ import annotations

import msgspec

from agl_core.gateway.dialects.base import ParsedRequest
from agl_core.gateway.dialects.chat import ChatDialect
from agl_core.gateway.dialects.messages.errors import error_from_chat
from agl_core.gateway.dialects.messages.notes import Notes
from agl_core.gateway.dialects.messages.request import count_body
from agl_core.gateway.dialects.shapes import UNREADABLE

# At the server's root, not below ``v1``.
TOKENIZE_PATH = "tokenize"

_CHAT = ChatDialect()


class _Counted(msgspec.Struct):
    count: int


def count_request(parsed: ParsedRequest) -> tuple[str, ParsedRequest]:
    """Return the path at the server's root and the request that count a call's prompt.

    Raises:
        TranslationError: The call itself could not be translated.
    """
    body = count_body(parsed, Notes({}))
    return TOKENIZE_PATH, _CHAT.read_request(msgspec.json.encode(body))


def count_answer(status: int, body: bytes) -> tuple[int, bytes]:
    """Return the status and body of the answer to ``count_tokens``."""
    if status >= 400:
        return status, msgspec.json.encode(error_from_chat(status, body))
    try:
        count = msgspec.json.decode(body, type=_Counted).count
    except (*UNREADABLE, msgspec.ValidationError):
        return 502, msgspec.json.encode(error_from_chat(502, body))
    return status, msgspec.json.encode({"input_tokens": count})
