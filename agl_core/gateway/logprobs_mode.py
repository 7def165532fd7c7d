"""Are a server's logprobs those of the distribution that it sampled from?

vLLM tells ``raw`` ones (before temperature and top-k) unless it was started with
``--logprobs-mode processed_logprobs``. With ``top_k: 1`` the processed distribution has one token,
whose logprob is exactly 0, while the raw one stays below. Temperature 0 tells nothing: then both
are raw.
"""

from __future__ import annotations

import math
from typing import Any, Final

from agl_core.records import LogprobsMode

_COMMON: Final[dict[str, Any]] = {
    "max_tokens": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 1,
    "min_p": 0.0,
}
# Completions come first, in the middle of open text. A chat answer may begin with a token that is
# certain (a model that always thinks), whose raw logprob is 0 as well.
MODE_PROBES: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("completions", {"prompt": "Some words that come to mind:", "logprobs": 0, **_COMMON}),
    (
        "chat/completions",
        {
            "messages": [{"role": "user", "content": "Say any word."}],
            "logprobs": True,
            "top_logprobs": 0,
            **_COMMON,
        },
    ),
)
"""Paths below ``v1`` and bodies without the model: the next is for a server without the first."""


def mode_probe(path: str, model: str) -> dict[str, Any]:
    """Return the request body of the probe of ``path``, one of ``MODE_PROBES``."""
    return {"model": model, **dict(MODE_PROBES)[path]}


def mode_of(answer: Any) -> LogprobsMode:
    """Return the logprobs mode that the answer to a probe shows."""
    values = _logprobs(answer)
    if not values or not all(map(_is_logprob, values)):
        return "unknown"
    return "raw" if any(value < 0 for value in values) else "processed"


def _is_logprob(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value <= 0


def _logprobs(answer: Any) -> list[Any]:
    """Return the chosen tokens' logprobs of the first choice, of a chat answer or a completion."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    logprobs = choice.get("logprobs") if isinstance(choice, dict) else None
    if not isinstance(logprobs, dict):
        return []
    content = logprobs.get("content")
    if isinstance(content, list):
        return [item.get("logprob") if isinstance(item, dict) else None for item in content]
    values = logprobs.get("token_logprobs")
    return values if isinstance(values, list) else []
