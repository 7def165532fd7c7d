"""What the gateway sends upstream for a Responses request, replayed from recorded harnesses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agl_core.gateway.dialects.responses import ResponsesDialect, error_of
from agl_core.gateway.dialects.responses.tools import (
    InputReader,
    Tools,
    custom_arguments,
    custom_input,
)
from agl_core.gateway.dialects.translation import Translation, TranslationError

HARNESS = Path(__file__).parents[2] / "data" / "harness"
DIALECT = ResponsesDialect()
CHAT_ROLES = {"system", "user", "assistant", "tool"}
FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}\Z")
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def requests() -> list[str]:
    paths = [
        *HARNESS.glob("*/*/*_v1_responses/request.json"),
        *HARNESS.glob("vllm-replay/*/request.json"),
    ]
    return sorted(
        str(p.relative_to(HARNESS)) for p in paths if "input" in json.loads(p.read_text())
    )


RECORDED = requests()
# These refer to answers of the recording's own server.
REFERRING = {
    name
    for name in RECORDED
    if DIALECT.references(DIALECT.read_request((HARNESS / name).read_bytes()))
}


def body_of(name: str) -> dict[str, Any]:
    return json.loads((HARNESS / name).read_bytes())


def translate(body: dict[str, Any], **known: Any) -> Translation:
    return DIALECT.translate(DIALECT.read_request(json.dumps(body).encode()), **known)


def chat(body: dict[str, Any], **known: Any) -> dict[str, Any]:
    return json.loads(translate(body, **known).request.body)


def messages(items: Any, **known: Any) -> list[dict[str, Any]]:
    return chat({"model": "m", "input": items}, **known)["messages"]


def refusal(body: dict[str, Any], **known: Any) -> TranslationError:
    with pytest.raises(TranslationError) as caught:
        translate(body, **known)
    return caught.value


def call(call_id: str, arguments: str = "{}", name: str = "f", **more: Any) -> dict[str, Any]:
    return {
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    } | more


def result(call_id: str, output: Any = "ok") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def said(text: str, **more: Any) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "content": [part]} | more


def thought(text: str) -> dict[str, Any]:
    return {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
    }


# Recorded harnesses


def test_there_are_recordings_of_every_harness_that_speaks_responses() -> None:
    assert {name.split("/")[0] for name in RECORDED} >= {
        "ai-sdk", "codex", "litellm", "openai-agents", "openai-agents-js", "openai-node",
        "openai-python", "opencode", "pydantic-ai", "vllm-replay",
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(RECORDED) - REFERRING))
def test_every_recorded_request_becomes_a_valid_chat_request(name: str) -> None:
    asked = body_of(name)
    translation = translate(asked)
    body = json.loads(translation.request.body)
    assert translation.path == "chat/completions"
    assert body["model"] == asked["model"]
    assert translation.request.stream is (asked.get("stream") is True)
    assert translation.request.wants_usage is translation.request.stream
    open_calls: set[str] = set()
    for message in body["messages"]:
        assert message["role"] in CHAT_ROLES
        if message["role"] == "tool":
            assert message["tool_call_id"] in open_calls
            open_calls.remove(message["tool_call_id"])
        else:
            assert not open_calls, "each call is answered before anything else"
        open_calls |= {made["id"] for made in message.get("tool_calls", ())}
    names = [tool["function"]["name"] for tool in body.get("tools", ())]
    assert len(set(names)) == len(names)
    assert all(FUNCTION_NAME.match(name) for name in names)
    assert {tool["type"] for tool in body.get("tools", ())} <= {"function"}


@pytest.mark.parametrize("name", sorted(REFERRING))
def test_a_reference_to_what_is_not_known_is_a_404_that_names_it(name: str) -> None:
    asked = body_of(name)
    error = refusal(asked)
    wanted = DIALECT.references(DIALECT.read_request((HARNESS / name).read_bytes()))[0]
    assert error.status == 404
    told = error_of(error)["error"]
    assert wanted in told["message"]
    assert told["type"] == "invalid_request_error"
    kind = "previous_response" if asked.get("previous_response_id") else "item"
    assert told["code"] == f"{kind}_not_found"


@pytest.mark.parametrize("case", ["edit", "think"])
def test_a_second_call_of_codex_extends_the_first(case: str) -> None:
    first, second = (chat(body_of(f"codex/{case}/0{n}_v1_responses/request.json")) for n in (0, 1))
    count = len(first["messages"])
    assert second["messages"][:count] == first["messages"]
    assert second["tools"] == first["tools"]
    turn, answer = second["messages"][count:]
    assert turn["content"] == "I will do it."
    assert [made["function"]["name"] for made in turn["tool_calls"]] == ["exec_command"]
    assert turn.get("reasoning") == ("I should write the file first." if case == "think" else None)
    assert (answer["role"], answer["tool_call_id"]) == ("tool", turn["tool_calls"][0]["id"])


def test_the_developers_of_the_opening_are_one_system_message() -> None:
    asked = body_of("codex/edit/00_v1_responses/request.json")
    system, environment, prompt = chat(asked)["messages"]
    texts = [part["text"] for item in asked["input"][:2] for part in item["content"]]
    assert len(texts) == 3
    assert system == {"role": "system", "content": "\n".join(texts)}
    assert (environment["role"], prompt["role"]) == ("user", "user")
    assert prompt["content"] == "Create the file note.txt with one line."


def test_a_system_message_later_on_stays_in_its_place() -> None:
    items = [{"role": role, "content": role} for role in ("user", "developer", "system", "user")]
    assert [m["role"] for m in messages(items)] == ["user", "system", "system", "user"]


def test_several_texts_of_a_user_stay_parts() -> None:
    parts = [{"type": "input_text", "text": text} for text in "ab"]
    (message,) = messages([{"role": "user", "content": parts}])
    assert message["content"] == [{"type": "text", "text": text} for text in "ab"]
    (message,) = messages([{"role": "user", "content": parts[:1]}])
    assert message["content"] == "a"


def test_assistant_items_without_type_and_id_are_read() -> None:
    body = chat(body_of("opencode/openai_responses/02_v1_responses/request.json"))
    system, user, turn, answer = body["messages"]
    assert (system["role"], user["role"], answer["role"]) == ("system", "user", "tool")
    assert turn["content"] == "I will do it."
    assert turn["tool_calls"][0]["id"] == answer["tool_call_id"]


def test_what_is_volatile_stays_out_of_the_request_and_is_noted() -> None:
    first = translate(body_of("codex/edit/00_v1_responses/request.json"))
    assert set(first.normalised["dropped"]) >= {"client_metadata", "prompt_cache_key", "store"}
    assert first.normalised["tools_left_out"] == ["web_search"]
    assert b"client_metadata" not in first.request.body


# Tools


def test_functions_of_a_namespace_get_names_that_lead_back() -> None:
    asked = body_of("codex/subagent/01_v1_responses/request.json")
    body = chat(asked)
    names = [tool["function"]["name"] for tool in body["tools"]]
    assert "exec_command" in names
    assert "multi_agent_v1__spawn_agent" in names
    calls = [made for m in body["messages"] for made in m.get("tool_calls", ())]
    assert [made["function"]["name"] for made in calls] == ["multi_agent_v1__spawn_agent"]


def test_tools_of_an_additional_tools_item_are_offered() -> None:
    asked = body_of("codex/model_gpt-6-sol/01_v1_responses/request.json")
    assert "tools" not in asked
    body = chat(asked)
    tools = {tool["function"]["name"]: tool["function"] for tool in body["tools"]}
    assert {"functions__exec", "functions__wait", "clock__sleep"} <= set(tools)
    assert tools["functions__exec"]["parameters"]["required"] == ["input"]
    assert "lark grammar" in tools["functions__exec"]["description"]
    made = next(made for m in body["messages"] for made in m.get("tool_calls", ()))
    assert made["function"]["name"] == "functions__exec"
    assert json.loads(made["function"]["arguments"]) == {
        "input": "const r = await tools.exec_command({cmd: 'echo written by a tool > note.txt'}); "
        "text(r.output);\n"
    }
    assert body["messages"][-1] == {
        "role": "tool",
        "tool_call_id": made["id"],
        "content": "Script completed\nWall time 0.1 seconds\nOutput:\n",
    }
    assert body["tool_choice"] == "auto"


def test_names_that_would_be_the_same_or_too_long_differ() -> None:
    tools = Tools()
    long = "n" * 60
    tools.add([{"type": "function", "name": "a__b"}])
    for space in ("a", long, long + "x", "spaß"):
        tools.add([{"type": "namespace", "name": space, "tools": [WEATHER | {"name": "b"}]}])
    assert len(tools.chat) == 5
    assert all(FUNCTION_NAME.match(name) for name in tools.chat)
    back = [tools.original(name) for name in tools.chat]
    assert [(t.namespace, t.name) for t in back] == [
        (None, "a__b"), ("a", "b"), (long, "b"), (long + "x", "b"), ("spaß", "b"),
    ]  # fmt: skip
    assert all(
        tools.chat_name(t.name, t.namespace) == n for n, t in zip(tools.chat, back, strict=True)
    )


def test_a_call_sent_back_without_its_namespace_keeps_its_name() -> None:
    space = {"type": "namespace", "name": "fs", "tools": [WEATHER | {"name": "read"}]}
    history = [call("c", name="read"), result("c")]
    body = chat({"input": history, "tools": [space]})
    assert body["messages"][0]["tool_calls"][0]["function"]["name"] == "fs__read"


def test_a_namespaced_call_has_the_same_name_when_no_tools_are_offered() -> None:
    history = [call("c", name="read", namespace="fs"), result("c")]
    assert messages(history)[0]["tool_calls"][0]["function"]["name"] == "fs__read"


def test_a_function_tool_is_nested_and_keeps_what_it_says() -> None:
    body = chat({"input": "x", "tools": [WEATHER | {"strict": True}], "parallel_tool_calls": False})
    assert body["tools"] == [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "Weather of a city",
                "parameters": WEATHER["parameters"],
                "strict": True,
            },
        }
    ]
    assert body["parallel_tool_calls"] is False
    assert "tool_choice" not in body


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_a_plain_tool_choice_is_kept(choice: str) -> None:
    assert chat({"input": "x", "tools": [WEATHER], "tool_choice": choice})["tool_choice"] == choice


def test_a_tool_choice_names_the_tool_as_chat_does() -> None:
    space = {"type": "namespace", "name": "fs", "tools": [WEATHER | {"name": "read"}]}
    patch = {"type": "custom", "name": "patch"}
    asked = {"input": "x", "tools": [WEATHER, space, patch]}
    for choice, name in [
        ({"type": "function", "name": "get_weather"}, "get_weather"),
        ({"type": "function", "name": "read", "namespace": "fs"}, "fs__read"),
        ({"type": "custom", "name": "patch"}, "patch"),
    ]:
        body = chat(asked | {"tool_choice": choice})
        assert body["tool_choice"] == {"type": "function", "function": {"name": name}}


def test_allowed_tools_leaves_the_others_out() -> None:
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "get_weather"}],
    }
    other = WEATHER | {"name": "other"}
    body = chat({"input": "x", "tools": [other, WEATHER], "tool_choice": choice})
    assert [tool["function"]["name"] for tool in body["tools"]] == ["get_weather"]
    assert body["tool_choice"] == "required"


def test_a_choice_between_no_tools_is_not_sent() -> None:
    body = chat({"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "auto"})
    assert not {"tools", "tool_choice"} & set(body)


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        "sometimes",
        {"type": "web_search"},
        {"type": "function", "name": "gone"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "gone"}]},
    ],
)
def test_a_choice_of_what_is_not_there_is_refused(choice: Any) -> None:
    error = refusal({"input": "x", "tools": [], "tool_choice": choice})
    assert (error.status, error.details["param"]) == (400, "tool_choice")


# The conversation


def test_the_items_of_one_turn_are_one_message() -> None:
    turn, one, two, after = messages(
        [
            thought("hm"),
            said("I look."),
            call("c1"),
            call("c2"),
            result("c1"),
            result("c2"),
            said("Done."),
        ]
    )
    assert (turn["role"], turn["reasoning"], turn["content"]) == ("assistant", "hm", "I look.")
    assert [made["id"] for made in turn["tool_calls"]] == ["c1", "c2"]
    assert [one["tool_call_id"], two["tool_call_id"]] == ["c1", "c2"]
    assert after == {"role": "assistant", "content": "Done."}


def test_text_after_a_call_belongs_to_the_same_turn() -> None:
    (turn,) = messages([said("a"), call("c"), said("b")])
    assert turn["content"] == "ab"


def test_two_messages_in_a_row_are_two_turns() -> None:
    # A client that repeats a call whose stream broke keeps the item that was done.
    assert [m["content"] for m in messages([said("a"), said("b")])] == ["a", "b"]


def test_reasoning_is_read_from_its_summary_where_it_has_no_content() -> None:
    summary = [{"type": "summary_text", "text": "in short"}]
    (turn,) = messages([{"type": "reasoning", "summary": summary}, said("a")])
    assert turn["reasoning"] == "in short"


def test_reasoning_that_cannot_be_read_is_left_out_and_counted() -> None:
    asked = {
        "input": [{"type": "reasoning", "summary": [], "encrypted_content": "AAAA"}, said("a")]
    }
    translation = translate(asked)
    assert translation.normalised["items_left_out"] == {"reasoning": 1}
    assert b"AAAA" not in translation.request.body


def test_instructions_come_first() -> None:
    body = chat({"input": "hi", "instructions": "Be short."})
    assert body["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "hi"},
    ]
    items = [{"role": "developer", "content": "Use tools."}, {"role": "user", "content": "hi"}]
    body = chat({"input": items, "instructions": "Be short."})
    assert body["messages"][0]["content"] == "Be short.\nUse tools."


def test_images_are_image_parts() -> None:
    content = [
        {"type": "input_text", "text": "what is it?"},
        {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "high"},
    ]
    (message,) = messages([{"role": "user", "content": content}])
    assert message["content"] == [
        {"type": "text", "text": "what is it?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "high"}},
    ]


def test_images_in_results_follow_after_all_results_of_the_turn() -> None:
    tail = body_of("codex/edge/02_v1_responses/request.tail.json")["_last_input"]
    items = [tail[0], tail[1], call("other"), tail[2], result("other", "text")]
    turn, shown, other, images = messages(items)
    assert [made["id"] for made in turn["tool_calls"]] == [tail[1]["call_id"], "other"]
    assert (shown["content"], other["content"]) == ("", "text")
    (image,) = images["content"]
    assert images["role"] == "user"
    assert image["image_url"]["url"].startswith("data:image/png;base64,")


def test_what_built_in_tools_left_is_left_out_and_counted() -> None:
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}}
    translation = translate({"input": [search, search, said("a")]})
    assert translation.normalised["items_left_out"] == {"web_search_call": 2}
    assert len(json.loads(translation.request.body)["messages"]) == 1


@pytest.mark.parametrize(
    ("items", "param"),
    [
        (None, "input"),
        (5, "input"),
        (["text"], "input[0]"),
        ([{"type": "telepathy"}], "input[0].type"),
        ([{"role": "narrator", "content": "x"}], "input[0].role"),
        ([{"role": "user", "content": 5}], "input[0].content"),
        (
            [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}],
            "input[0].content",
        ),
        ([{"role": "user", "content": [{"type": "smell"}]}], "input[0].content"),
        ([{"type": "function_call", "name": "f"}], "input[0]"),
        ([{"type": "function_call_output", "output": "x"}], "input[0].call_id"),
    ],
)
def test_an_item_that_cannot_be_said_is_named(items: Any, param: str) -> None:
    error = refusal({"model": "m", "input": items})
    assert (error.status, error.details["param"]) == (400, param)


@pytest.mark.parametrize("field", ["background", "prompt", "conversation"])
def test_what_needs_a_store_is_refused(field: str) -> None:
    error = refusal({"input": "x", field: True if field == "background" else {"id": "p"}})
    assert error.status == 400
    assert field in error.message


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff"])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(TranslationError):
        DIALECT.translate(DIALECT.read_request(body))


# What was generated


@pytest.mark.parametrize(
    ("generated", "sent", "put_back"),
    [
        ('{"city": "Paris", "n": 1}', '{"n":1.0,"city":"Paris"}', True),
        ('{"t": "\\u00fc"}', '{"t":"ü"}', True),
        ('{"city": "Paris"}', '{"city":"Rome"}', False),
        ('{"a": 1}', '{"a": true}', False),
        ('{"city": "Par', "{}", False),
    ],
)
def test_arguments_go_back_as_they_were_generated_while_they_say_the_same(
    generated: str, sent: str, put_back: bool
) -> None:
    translation = translate({"input": [call("c", sent)]}, generated={"c": generated})
    (turn,) = json.loads(translation.request.body)["messages"]
    assert turn["tool_calls"][0]["function"]["arguments"] == (generated if put_back else sent)
    assert translation.normalised.get("arguments_restored", []) == (["c"] if put_back else [])


def test_the_input_of_a_custom_tool_goes_back_as_it_was_generated() -> None:
    item = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "é\n"}
    generated = '{"input":"\\u00e9\\n"}'
    (turn,) = messages([item], generated={"c": generated})
    assert turn["tool_calls"][0]["function"]["arguments"] == generated
    (turn,) = messages([item | {"input": "other"}], generated={"c": generated})
    assert turn["tool_calls"][0]["function"]["arguments"] == '{"input": "other"}'


@pytest.mark.parametrize(
    "text", ["", "plain", 'quo"te \\ back', "line\nbreak\ttab", "üß€😀", "\\u0041"]
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_custom_input_is_read_piece_by_piece_whatever_the_pieces(
    text: str, ascii_only: bool
) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    assert custom_input(arguments) == text
    for size in (1, 2, 3, 7, 1000):
        reader = InputReader()
        pieces = [arguments[at : at + size] for at in range(0, len(arguments), size)]
        assert "".join(map(reader.feed, pieces)) == text


def test_a_custom_input_round_trips_through_its_arguments() -> None:
    assert custom_input(custom_arguments("*** Begin Patch\n")) == "*** Begin Patch\n"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"input": "cut in the mid', "cut in the mid"),
        ('{"input": "cut \\u00', "cut "),
        ("*** Begin Patch\n", "*** Begin Patch\n"),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input": "raw\nnewline"}', "raw\nnewline"),
    ],
)
def test_a_custom_input_of_another_form_is_handed_over(arguments: str, shown: str) -> None:
    assert custom_input(arguments) == shown


# What was remembered


def test_a_previous_response_is_put_before_the_input() -> None:
    stored = {"resp_1": {"input": [{"role": "user", "content": "a"}], "output": [said("b")]}}
    asked = {"input": "c", "previous_response_id": "resp_1", "instructions": "Now."}
    assert [m["content"] for m in chat(asked, stored=stored)["messages"]] == ["Now.", "a", "b", "c"]


def test_a_referenced_item_is_put_in_its_place() -> None:
    asked = body_of("ai-sdk/responses/01_v1_responses/request.json")
    (item_id,) = DIALECT.references(DIALECT.read_request(json.dumps(asked).encode()))
    body = chat(asked, stored={item_id: said("I will do it.", id=item_id)})
    _, _, turn, answer = body["messages"]
    assert turn["content"] == "I will do it."
    assert turn["tool_calls"][0]["id"] == answer["tool_call_id"]


def test_a_reference_needs_no_type_and_must_be_to_an_item() -> None:
    asked = {"input": [{"id": "msg_1"}]}
    assert chat(asked, stored={"msg_1": said("a")})["messages"][0]["content"] == "a"
    error = refusal(asked, stored={"msg_1": {"input": [], "output": []}})
    assert (error.status, error.code) == (404, "item_not_found")


# Settings


def test_settings_are_handed_on() -> None:
    asked = {
        "input": "x",
        "temperature": 0,
        "top_p": 0.5,
        "max_output_tokens": 7,
        "seed": 3,
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
        "top_logprobs": 2,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "json_object"}, "verbosity": "low"},
        "user": "me",
        "temperature_like": 1,
    }
    translation = translate(asked)
    body = json.loads(translation.request.body)
    del body["messages"]
    assert body == {
        "temperature": 0,
        "top_p": 0.5,
        "seed": 3,
        "max_tokens": 7,
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": {"type": "json_object"},
        "reasoning_effort": "low",
    }
    assert translation.normalised["dropped"] == [
        "user", "temperature_like", "text.verbosity", "reasoning.summary",
    ]  # fmt: skip


def test_logprobs_are_asked_for_only_where_they_are_included() -> None:
    assert "logprobs" not in chat({"input": "x", "top_logprobs": 2})


def test_a_schema_is_a_response_format() -> None:
    asked = body_of("openai-agents/responses_structured/00_v1_responses/request.json")
    form = asked["text"]["format"]
    assert chat(asked)["response_format"] == {
        "type": "json_schema",
        "json_schema": {k: form[k] for k in ("name", "schema", "strict")},
    }


def test_an_effort_that_chat_does_not_know_reaches_the_template() -> None:
    asked = {"input": "x", "reasoning": {"effort": "xhigh"}, "chat_template_kwargs": {"a": 1}}
    body = chat(asked)
    assert "reasoning_effort" not in body
    assert body["chat_template_kwargs"] == {"reasoning_effort": "xhigh", "a": 1}


def test_the_request_is_read_as_any_other() -> None:
    parsed = DIALECT.read_request(b'{"model": "m", "stream": true, "input": "x"}')
    assert (parsed.model, parsed.stream) == ("m", True)
    assert DIALECT.references(parsed) == ()
    assert DIALECT.capture_changes(parsed) == {}
