"""The OpenAI Responses API, translated to chat completions and back."""

from __future__ import annotations

from agl_core.gateway.dialects.responses.errors import error_of
from agl_core.gateway.dialects.responses.request import ResponsesDialect
from agl_core.gateway.dialects.responses.stream import ResponsesTee

__all__ = ["ResponsesDialect", "ResponsesTee", "error_of"]
