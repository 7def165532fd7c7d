"""The context length of model servers: reading it, clamping to it, knowing its error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agl_core.gateway.context import (
    clamp,
    context_error,
    context_length_of,
    is_context_error,
)
from agl_core.gateway.dialects import ParsedRequest
from agl_core.gateway.dialects.chat import ChatDialect

RECORDINGS = Path(__file__).parents[2] / "data" / "vllm"


def parsed(**fields: Any) -> ParsedRequest:
    return ChatDialect().read_request(json.dumps(fields).encode())


def recorded(case: str) -> bytes:
    return (RECORDINGS / case / "response.body").read_bytes()


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_c82_only_a_value_above_the_context_is_cut(name: str) -> None:
    assert clamp(parsed(**{name: 1025}), 1024) == {name: 1024}
    assert clamp(parsed(**{name: 1024}), 1024) == {}
    assert clamp(parsed(**{name: 5}), 1024) == {}


def test_both_limits_of_a_chat_request_are_cut() -> None:
    request = parsed(max_tokens=2000, max_completion_tokens=3000)
    assert clamp(request, 1024) == {"max_tokens": 1024, "max_completion_tokens": 1024}


@pytest.mark.parametrize("value", [2000.0, "2000"])
def test_what_vllm_reads_as_an_integer_is_cut_too(value: Any) -> None:
    assert clamp(parsed(max_tokens=value), 1024) == {"max_tokens": 1024}


@pytest.mark.parametrize("value", [None, True, 2000.5, "many", [2000], -1])
def test_what_vllm_refuses_anyway_is_left_for_it_to_refuse(value: Any) -> None:
    assert clamp(parsed(max_tokens=value), 1) == {}


def test_a_recorded_refusal_would_not_have_happened() -> None:
    body = (RECORDINGS / "error_context_max_tokens" / "request.json").read_bytes()
    request = ChatDialect().read_request(body)
    assert clamp(request, 1024) == {"max_tokens": 1024}
    assert clamp(ChatDialect().read_request(b"not json"), 1024) == {}


def card(name: str, length: Any, parent: str | None = None) -> dict[str, Any]:
    """A model as vLLM 0.32 lists it, without the fields that say nothing here."""
    return {
        "id": name,
        "object": "model",
        "owned_by": "vllm",
        "root": name,
        "parent": parent,
        "max_model_len": length,
    }


def listing(*cards: dict[str, Any]) -> dict[str, Any]:
    return {"object": "list", "data": list(cards)}


def test_the_context_length_is_in_the_model_list() -> None:
    answer = listing(card("other", 2048), card("tiny-qwen", 1024))
    assert context_length_of(answer, "tiny-qwen") == 1024


def test_an_adapter_has_its_base_models_context_length() -> None:
    # vLLM lists an adapter with a length of null and its base model as parent.
    answer = listing(card("tiny-qwen", 1024), card("tiny-lora", None, "tiny-qwen"))
    assert context_length_of(answer, "tiny-lora") == 1024


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {},
        {"data": None},
        {"data": [None, {"id": 1}, {"object": "model"}]},
        listing(card("another", 1024)),
        listing(card("m", None)),
        listing(card("m", None, "m")),
        listing(card("m", True)),
        listing(card("m", 0)),
        listing(card("m", "1024")),
    ],
)
def test_an_answer_that_does_not_tell_gives_none(answer: Any) -> None:
    assert context_length_of(answer, "m") is None


@pytest.mark.parametrize(
    "case", ["error_context_prompt", "error_context_prompt_stream", "error_context_completion"]
)
def test_c82_vllms_refusal_of_a_long_prompt_is_known(case: str) -> None:
    assert is_context_error(400, recorded(case))
    assert not is_context_error(500, recorded(case))


def test_the_error_is_known_in_the_forms_of_messages_and_of_older_servers() -> None:
    message = json.loads(recorded("error_context_prompt"))["error"]["message"]
    inner = {"type": "invalid_request_error", "message": message}
    assert is_context_error(400, json.dumps({"type": "error", "error": inner}).encode())
    assert is_context_error(400, json.dumps({"object": "error", "message": message}).encode())


OTHER_ERRORS = sorted(
    path.parent.name
    for path in RECORDINGS.glob("error_*/response.body")
    if path.parent.name
    not in ("error_context_prompt", "error_context_prompt_stream", "error_context_completion")
)


@pytest.mark.parametrize("case", OTHER_ERRORS)
def test_no_other_recorded_error_is_taken_for_it(case: str) -> None:
    assert not is_context_error(400, recorded(case))


@pytest.mark.parametrize(
    "body", [b"", b"maximum context length is 5 tokens", b"[]", b'{"error":1}']
)
def test_a_body_that_is_no_error_object_is_not_it(body: bytes) -> None:
    assert not is_context_error(400, body)


def test_a_validation_error_that_quotes_the_words_is_not_it() -> None:
    quoted = "1 validation error: {'input': \"This model's maximum context length is 5 tokens\"}"
    assert not is_context_error(400, json.dumps({"error": {"message": quoted}}).encode())


def test_our_own_error_is_known_like_vllms_and_has_its_shape() -> None:
    ours = context_error(4096, "the rollout has used it up.")
    theirs = json.loads(recorded("error_context_prompt"))
    assert is_context_error(400, json.dumps(ours).encode())
    assert {k: type(v) for k, v in ours["error"].items()} == {
        k: type(v) for k, v in theirs["error"].items()
    }
    assert ours["error"]["type"] == theirs["error"]["type"]
    assert ours["error"]["message"].endswith("4096 tokens. However, the rollout has used it up.")
