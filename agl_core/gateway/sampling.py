"""Which sampling a call is sent with: the trainer decides it, not the agent.

What a request leaves out vLLM takes from the model's ``generation_config``, where nobody sees it.
So every parameter is sent, neutral ones too: importance ratios need to know all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from agl_core.gateway.dialects import ParsedRequest
from agl_core.gateway.dialects.base import as_flag
from agl_core.records import Mode
from agl_core.settings import ModeSampling, SamplingSettings

PARAMETERS: Final = tuple(
    attribute.name for attribute in attrs.fields(ModeSampling) if attribute.name != "policy"
)
# Messages has no more than these; vLLM reads all of them in the other three.
_OF_API: Final[Mapping[str, tuple[str, ...]]] = {
    "chat": PARAMETERS,
    "completions": PARAMETERS,
    "responses": PARAMETERS,
    "messages": ("temperature", "top_p", "top_k"),
}
# A seed makes the siblings of a group identical, so that none has an advantage; the others sample
# from something that is not the policy.
_NOT_IN_TRAINING: Final = ("seed", "logit_bias", "use_beam_search", "best_of")


def sampling_changes(
    settings: SamplingSettings, mode: Mode, parsed: ParsedRequest, api: str
) -> dict[str, Any]:
    """Return the top-level fields to change, None for one to remove; only those that differ.

    For calls to trained policies. A translated request is given as what goes upstream, ``chat``.
    """
    wanted = settings.train if mode == "train" else settings.val
    parameters = _OF_API.get(api)
    if parsed.fields is None or parameters is None or wanted.policy == "agent":
        return {}
    changes: dict[str, Any] = {}
    for name in parameters:
        said, value = parsed.get(name), getattr(wanted, name)
        if said is None or (wanted.policy == "force" and not _is_same(name, said, value)):
            changes[name] = value
    if mode == "train":
        changes.update({name: None for name in _NOT_IN_TRAINING if _is_asked(parsed, name)})
    return changes


def _is_same(name: str, said: Any, value: float) -> bool:
    if isinstance(said, bool) or not isinstance(said, int | float):
        return False
    is_all_tokens = name == "top_k" and said in (0, -1) and value in (0, -1)
    return is_all_tokens or said == value


def _is_asked(parsed: ParsedRequest, name: str) -> bool:
    said = parsed.get(name)
    return said is not None and said is not False


def is_constrained(parsed: ParsedRequest) -> bool:
    """Tell whether the request bars tokens from being sampled, as guided decoding does.

    Such a call stays as it is and its record says so: its tokens come from the policy as far as
    the mask left it a choice.
    """
    return (
        any(_forces_a_form(parsed.get(name)) for name in ("response_format", "structured_outputs"))
        or _forces_a_form(_inner(parsed.get("text"), "format"))
        or _forces_a_form(_inner(parsed.get("output_config"), "format"))
        or _forces_a_tool(parsed.get("tool_choice"))
        or _is_guided(parsed)
        or any(bool(parsed.get(name)) for name in ("allowed_token_ids", "bad_words", "min_tokens"))
    )


_GUIDED: Final = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structural_tag",
)
# Of vLLM's StructuredOutputsParams; its other fields only say how.
_STRUCTURES: Final = ("json", "regex", "choice", "grammar", "structural_tag")


def _forces_a_form(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    if "type" in value:
        return value["type"] not in (None, "text")
    has_structure = any(value.get(name) is not None for name in _STRUCTURES)
    return has_structure or _is_on(value.get("json_object"))


def _forces_a_tool(choice: Any) -> bool:
    if isinstance(choice, dict):
        if choice.get("type") == "allowed_tools":
            options = choice.get("allowed_tools")
            return (options if isinstance(options, dict) else choice).get("mode") == "required"
        return choice.get("type") not in (None, "auto", "none")
    return choice in ("required", "any")


def _is_guided(parsed: ParsedRequest) -> bool:
    is_json_object = _is_on(parsed.get("guided_json_object"))
    return is_json_object or any(parsed.get(name) is not None for name in _GUIDED)


def _is_on(value: Any) -> bool:
    return as_flag(value) is True


def _inner(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None
