"""Which sampling a call is sent with, parameter by parameter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from agl_core.gateway.dialects import ParsedRequest
from agl_core.gateway.dialects.chat import ChatDialect
from agl_core.gateway.sampling import (
    PARAMETERS,
    ModeSampling,
    SamplingSettings,
    is_constrained,
    sampling_changes,
)

RECORDINGS = Path(__file__).parents[2] / "data" / "vllm"
CHAT = ChatDialect()
NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
# Parameter, what an agent says, what the trainer wants.
ROWS: list[tuple[str, Any, Any]] = [
    ("temperature", 0.2, 0.8),
    ("top_p", 0.9, 0.5),
    ("top_k", 20, 40),
    ("min_p", 0.1, 0.05),
    ("presence_penalty", 1.0, 0.5),
    ("frequency_penalty", -1.0, 0.25),
    ("repetition_penalty", 1.1, 1.05),
]
REMOVED: list[tuple[str, Any]] = [
    ("seed", 7),
    ("logit_bias", {"50256": -100}),
    ("use_beam_search", True),
    ("best_of", 4),
]


def parsed(**fields: Any) -> ParsedRequest:
    return CHAT.read_request(json.dumps({"messages": [], **fields}).encode())


def settings(mode: str = "train", **sampling: Any) -> SamplingSettings:
    return SamplingSettings(**{mode: ModeSampling(**sampling)})


def test_every_parameter_has_a_row() -> None:
    assert {row[0] for row in ROWS} == set(NEUTRAL) == set(PARAMETERS)


def test_without_settings_training_is_forced_to_the_models_own_distribution() -> None:
    assert sampling_changes(SamplingSettings(), "train", parsed(), "chat") == NEUTRAL


def test_without_settings_validation_fills_in_what_the_agent_left_out() -> None:
    expected = {**NEUTRAL}
    del expected["temperature"]
    said = parsed(temperature=0.2, seed=7)
    assert sampling_changes(SamplingSettings(), "val", said, "chat") == expected


@pytest.mark.parametrize("mode", ["train", "val"])
@pytest.mark.parametrize(("name", "said", "wanted"), ROWS)
def test_force_overrides_the_agent(mode: Any, name: str, said: Any, wanted: Any) -> None:
    forced = settings(mode, policy="force", **{name: wanted})
    assert sampling_changes(forced, mode, parsed(**{name: said}), "chat")[name] == wanted
    assert sampling_changes(forced, mode, parsed(), "chat")[name] == wanted


@pytest.mark.parametrize("mode", ["train", "val"])
@pytest.mark.parametrize(("name", "said", "wanted"), ROWS)
def test_default_leaves_what_the_agent_said(mode: Any, name: str, said: Any, wanted: Any) -> None:
    default = settings(mode, policy="default", **{name: wanted})
    assert name not in sampling_changes(default, mode, parsed(**{name: said}), "chat")
    assert sampling_changes(default, mode, parsed(), "chat")[name] == wanted
    assert sampling_changes(default, mode, parsed(**{name: None}), "chat")[name] == wanted


@pytest.mark.parametrize("mode", ["train", "val"])
@pytest.mark.parametrize(("name", "said", "wanted"), ROWS)
def test_agent_changes_nothing(mode: Any, name: str, said: Any, wanted: Any) -> None:
    agent = settings(mode, policy="agent", **{name: wanted})
    assert sampling_changes(agent, mode, parsed(**{name: said}, seed=7), "chat") == {}


@pytest.mark.parametrize(("name", "said", "wanted"), ROWS)
def test_what_the_agent_says_already_is_no_change(name: str, said: Any, wanted: Any) -> None:
    forced = settings(**{name: said})
    assert name not in sampling_changes(forced, "train", parsed(**{name: said}), "chat")


def test_an_integer_is_the_number_it_is() -> None:
    assert "temperature" not in sampling_changes(
        SamplingSettings(), "train", parsed(temperature=1), "chat"
    )


@pytest.mark.parametrize("said", [True, "1.0", [1.0]])
def test_what_is_no_number_is_overridden(said: Any) -> None:
    changes = sampling_changes(SamplingSettings(), "train", parsed(temperature=said), "chat")
    assert changes["temperature"] == 1.0


def test_both_of_vllms_values_for_all_tokens_are_the_same() -> None:
    assert "top_k" not in sampling_changes(SamplingSettings(), "train", parsed(top_k=-1), "chat")
    assert "top_k" in sampling_changes(settings(top_k=5), "train", parsed(top_k=-1), "chat")


@pytest.mark.parametrize("policy", ["force", "default"])
@pytest.mark.parametrize(("name", "said"), REMOVED)
def test_training_removes_what_is_not_the_policys_own(policy: str, name: str, said: Any) -> None:
    changes = sampling_changes(settings(policy=policy), "train", parsed(**{name: said}), "chat")
    assert name in changes
    assert changes[name] is None


@pytest.mark.parametrize(("name", "said"), REMOVED)
def test_validation_keeps_it(name: str, said: Any) -> None:
    forced = settings("val", policy="force")
    assert name not in sampling_changes(forced, "val", parsed(**{name: said}), "chat")


@pytest.mark.parametrize("name", [name for name, _ in REMOVED])
def test_nothing_is_removed_that_is_not_there(name: str) -> None:
    for request in (parsed(), parsed(**{name: None})):
        assert name not in sampling_changes(SamplingSettings(), "train", request, "chat")


def test_stop_tools_and_max_tokens_stay_the_agents() -> None:
    request = parsed(stop=["END"], max_tokens=5, tools=[{"type": "function"}], n=2)
    assert sampling_changes(SamplingSettings(), "train", request, "chat") == NEUTRAL


def test_a_recorded_request_is_sent_as_the_trainer_wants_it() -> None:
    body = (RECORDINGS / "chat_seeded" / "request.json").read_bytes()
    request = CHAT.read_request(body)
    changes = sampling_changes(SamplingSettings(), "train", request, "chat")
    sent = json.loads(CHAT.reshape(request, changes).body)
    assert {name: sent[name] for name in NEUTRAL} == NEUTRAL
    assert "seed" not in sent
    assert sent["max_tokens"] == 64


@pytest.mark.parametrize(
    ("api", "names"),
    [
        ("completions", set(NEUTRAL)),
        ("responses", set(NEUTRAL)),
        ("messages", {"temperature", "top_p", "top_k"}),
        ("other", set()),
    ],
)
def test_each_api_gets_the_parameters_that_it_has(api: str, names: set[str]) -> None:
    assert set(sampling_changes(SamplingSettings(), "train", parsed(), api)) == names


def test_a_body_that_is_no_object_is_left_alone() -> None:
    request = CHAT.read_request(b"[1]")
    assert sampling_changes(SamplingSettings(), "train", request, "chat") == {}


@pytest.mark.parametrize(
    "sampling",
    [
        {"policy": "forced"},
        {"temperature": 2.1},
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_k": -2},
        {"min_p": 1.1},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"repetition_penalty": 0.0},
    ],
)
def test_settings_that_vllm_would_refuse_are_refused(sampling: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(sampling))):
        ModeSampling(**sampling)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        {"response_format": {"type": "json_object"}},
        {"text": {"format": {"type": "json_schema", "schema": {}}}},
        {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required"}}},
        {"guided_json": {"type": "object"}},
        {"guided_regex": "a+"},
        {"guided_choice": ["a", "b"]},
        {"guided_grammar": "root ::= 'a'"},
        {"guided_json_object": True},
        {"structured_outputs": {"regex": "a+"}},
        {"structured_outputs": {"json_object": True}},
        {"structural_tag": "{}"},
        {"allowed_token_ids": [1, 2]},
        {"bad_words": ["no"]},
        {"min_tokens": 5},
    ],
)
def test_what_bars_tokens_is_constrained_and_stays(fields: dict[str, Any]) -> None:
    request = parsed(**fields)
    assert is_constrained(request)
    changes = sampling_changes(SamplingSettings(), "train", request, "chat")
    assert not set(changes) & set(fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"text": {"format": {"type": "text"}}},
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"tool_choice": {"type": "auto"}},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
        {"guided_json": None},
        {"guided_json_object": False},
        {"structured_outputs": {"disable_any_whitespace": True}},
        {"min_tokens": 0},
    ],
)
def test_free_calls_are_not_constrained(fields: dict[str, Any]) -> None:
    assert not is_constrained(parsed(**fields))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("chat_json_schema", True),
        ("chat_json_object", True),
        ("chat_tools_named", True),
        ("chat_tools_required", True),
        ("chat_tools_auto", False),
        ("chat_plain", False),
    ],
)
def test_recorded_requests_are_told_apart(case: str, expected: bool) -> None:
    request = CHAT.read_request((RECORDINGS / case / "request.json").read_bytes())
    assert is_constrained(request) is expected


def test_the_settings_are_plain_classes_for_the_file() -> None:
    assert attrs.asdict(SamplingSettings())["train"] == {"policy": "force", **NEUTRAL}
