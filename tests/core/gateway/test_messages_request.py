"""A Messages request becomes the chat request that makes the same prompt."""

import json
from pathlib import Path
from typing import Any

import pytest

from agl_core.gateway.dialects.messages import MessagesDialect, error_of
from agl_core.gateway.dialects.translation import Translation, TranslationError

DATA = Path(__file__).parents[2] / "data"
VLLM, REPLAY = DATA / "vllm", DATA / "harness" / "vllm-replay"
MESSAGES = MessagesDialect()
TOOL = {"name": "get_weather", "input_schema": {"type": "object", "properties": {}}}
HELLO = [{"role": "user", "content": "Hello!"}]


def translate(
    *, generated: dict[str, str] | None = None, drop: str = "", **fields: Any
) -> Translation:
    body = {"model": "m", "max_tokens": 5, "messages": HELLO, **fields}
    body.pop(drop, None)
    parsed = MESSAGES.read_request(json.dumps(body).encode())
    return MESSAGES.translate(parsed, generated=generated)


def chat(**fields: Any) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(translate(**fields).request.body)
    return read


def messages(*given: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = chat(messages=list(given), **fields)["messages"]
    return sent


def user(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def tool_use(call_id: str, given: Any, name: str = "get_weather") -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def tool_result(call_id: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def refusal(**fields: Any) -> TranslationError:
    with pytest.raises(TranslationError) as caught:
        translate(**fields)
    assert caught.value.status == 400
    return caught.value


# The same prompt as vLLM's own route makes, by way of chat requests recorded beside it


@pytest.mark.parametrize(
    ("case", "twin"),
    [
        (REPLAY / "am_sys", REPLAY / "content_str"),
        (REPLAY / "am_billing", REPLAY / "content_str"),
        (REPLAY / "am_late_system", REPLAY / "role_late_system"),
        (REPLAY / "am_think_hist", REPLAY / "reason_reasoning"),
        (REPLAY / "am_reason_tool_True", REPLAY / "reason_tool_reasoning"),
        (VLLM / "messages_plain", VLLM / "chat_plain"),
        (VLLM / "messages_tools", VLLM / "chat_tools_auto"),
        (VLLM / "messages_tool_result", VLLM / "chat_tool_result"),
    ],
    ids=lambda path: path.name,
)
def test_the_prompt_is_that_of_the_recorded_chat_request(case: Path, twin: Path) -> None:
    parsed = MESSAGES.read_request((case / "request.json").read_bytes())
    sent = json.loads(MESSAGES.translate(parsed).request.body)
    wanted = json.loads((twin / "request.json").read_bytes())
    for body in (sent, wanted):
        for message in body["messages"]:
            # Ids do not get into the prompt, and null and no content are the same.
            for call in message.get("tool_calls", ()):
                call.pop("id")
            message.pop("tool_call_id", None)
    assert sent["messages"] == wanted["messages"]
    assert sent.get("tools") == wanted.get("tools")
    # The recorded answers agree: vLLM counted as many prompt tokens on both routes.
    usage = json.loads((case / "response.body").read_bytes())["usage"]
    told = json.loads((twin / "response.body").read_bytes())["usage"]
    counted = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    assert counted == told["prompt_tokens"]


# System texts


def test_system_blocks_are_joined_without_a_separator() -> None:
    assert messages(*HELLO, system=[text("Be"), text(" short.")]) == [
        {"role": "system", "content": "Be short."},
        *HELLO,
    ]


def test_c12_a_billing_line_does_not_get_into_the_prompt_and_is_recorded() -> None:
    rest = "Be short.\nx-anthropic-billing-header: is quoted here"
    prompts = []
    for stamp in ("a1", "b2"):
        line = f"x-anthropic-billing-header: {stamp}; cc_entrypoint=cli;"
        for system in (f"{line}\n{rest}", [text(line), text(rest)], [text(f"{line}\n{rest}")]):
            translation = translate(system=system)
            assert translation.normalised == {"billing_lines": [line]}
            prompts.append(json.loads(translation.request.body)["messages"])
    assert prompts == [[{"role": "system", "content": rest}, *HELLO]] * 6


def test_a_system_message_in_the_middle_stays_in_its_place() -> None:
    late = {"role": "system", "content": [text("Be "), text("short.")]}
    assert messages(*HELLO, late, *HELLO) == [
        *HELLO,
        {"role": "system", "content": "Be short."},
        *HELLO,
    ]


def test_a_system_that_is_a_billing_line_alone_makes_no_message() -> None:
    assert messages(*HELLO, system="x-anthropic-billing-header: 1") == HELLO


def test_all_billing_lines_at_the_head_are_removed() -> None:
    lines = ["x-anthropic-billing-header: 1", "x-anthropic-billing-header: 2"]
    translation = translate(system="\n".join([*lines, "Be short."]))
    assert translation.normalised == {"billing_lines": lines}
    assert json.loads(translation.request.body)["messages"][0]["content"] == "Be short."


# Normalising


def test_cache_marks_are_left_out_and_counted_but_not_in_arguments_and_schemas() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    arguments = {"cache_control": "no-store"}
    schema = {"type": "object", "properties": {"cache_control": {"type": "string"}}}
    translation = translate(
        system=[text("s", **mark)],
        tools=[{"name": "fetch", "input_schema": schema, **mark}],
        messages=[
            user(text("u", **mark)),
            assistant(tool_use("c1", arguments, "fetch")),
            user({**tool_result("c1", [text("r", **mark)]), **mark}),
        ],
    )
    assert translation.normalised == {"cache_control": 5}
    sent = json.loads(translation.request.body)
    assert sent["tools"][0]["function"]["parameters"] == schema
    call = sent["messages"][2]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == arguments
    assert translation.request.body.count(b"cache_control") == 2


def test_one_text_part_is_the_same_as_a_string() -> None:
    as_parts = messages(
        user(text("a")),
        assistant(text("b"), tool_use("c", {})),
        user(tool_result("c", [text("d")])),
    )
    as_strings = messages(
        {"role": "user", "content": "a"},
        assistant(text("b"), tool_use("c", {})),
        user(tool_result("c", "d")),
    )
    assert as_parts == as_strings
    assert as_parts[0] == {"role": "user", "content": "a"}


def test_several_text_parts_stay_parts_for_the_server_to_join() -> None:
    assert messages(user(text("a"), text(""), text("b"))) == [user(text("a"), text("b"))]


def test_arguments_go_back_as_the_model_wrote_them() -> None:
    generated = '{"city":"Z\\u00fcrich",  "n": 1.0, "deep": [true]}'
    given = {"city": "Zürich", "deep": [True], "n": 1}
    translation = translate(
        generated={"c1": generated}, messages=[*HELLO, assistant(tool_use("c1", given))]
    )
    call = json.loads(translation.request.body)["messages"][1]["tool_calls"][0]
    assert call == {
        "id": "c1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": generated},
    }
    assert translation.normalised == {"arguments_restored": ["c1"]}


@pytest.mark.parametrize(
    ("generated", "given"),
    [('{"a": true}', {"a": 1}), ('{"a": 1}', {"a": 2}), ('{"a": 1}', {}), ("[1]", {"a": 1})],
)
def test_arguments_that_the_agent_changed_stay_changed(generated: str, given: Any) -> None:
    translation = translate(
        generated={"c1": generated}, messages=[*HELLO, assistant(tool_use("c1", given))]
    )
    call = json.loads(translation.request.body)["messages"][1]["tool_calls"][0]
    assert call["function"]["arguments"] == json.dumps(given)
    assert "arguments_restored" not in translation.normalised


@pytest.mark.parametrize("raw", ["the cut text", "the cut text, shortened"])
def test_arguments_that_were_no_json_go_back_raw(raw: str) -> None:
    # As Claude Code sends back what it could not parse.
    given = {"__unparsedToolInput": {"raw": raw, "len": len(raw)}}
    sent = messages(*HELLO, assistant(tool_use("c1", given)))
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == raw


def test_an_empty_object_stands_for_arguments_that_were_no_json() -> None:
    cut = '{"city": "Par'
    sent = messages(*HELLO, assistant(tool_use("c1", {})), generated={"c1": cut})
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == cut


# Blocks


def test_tool_results_come_before_what_the_user_says_and_their_images_with_it() -> None:
    png = {"type": "base64", "media_type": "image/png", "data": "QUJD"}
    sent = messages(
        *HELLO,
        assistant(tool_use("c1", {}), tool_use("c2", {})),
        user(
            tool_result("c1", [text("a"), {"type": "image", "source": png}, text("b")]),
            tool_result("c2", None, is_error=True),
            text("and?"),
            {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}},
        ),
    )
    assert sent[2:] == [
        {"role": "tool", "tool_call_id": "c1", "content": "a\nb"},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
        user(
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}},
            text("and?"),
            {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
        ),
    ]


def test_thinking_becomes_reasoning_and_redacted_thinking_is_noted() -> None:
    translation = translate(
        messages=[
            *HELLO,
            assistant(
                {"type": "thinking", "thinking": "I ", "signature": "s"},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "thinking", "thinking": "greet.", "signature": ""},
                text("Hi."),
            ),
            *HELLO,
        ]
    )
    sent = json.loads(translation.request.body)["messages"]
    assert sent[1] == {"role": "assistant", "content": "Hi.", "reasoning": "I greet."}
    assert translation.normalised == {"redacted_thinking": 1}


def test_an_empty_assistant_message_keeps_its_place() -> None:
    contents: list[Any] = ["", []]
    for content in contents:
        sent = messages(*HELLO, {"role": "assistant", "content": content}, *HELLO)
        assert sent[1] == {"role": "assistant", "content": ""}


def test_a_call_without_text_has_null_content() -> None:
    sent = messages(*HELLO, assistant(tool_use("c1", {"a": 1})))
    assert sent[1]["content"] is None


def test_documents_of_text_are_read_and_others_refused() -> None:
    plain = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": "d"},
    }
    assert messages(user(plain, text("?"))) == [user(text("d"), text("?"))]
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}}
    assert "messages.0.content.0.source" in str(refusal(messages=[user(pdf)]))


def test_an_answer_that_the_agent_began_is_continued() -> None:
    sent = chat(messages=[*HELLO, assistant(text("Hel"))])
    assert (sent["add_generation_prompt"], sent["continue_final_message"]) == (False, True)
    assert "continue_final_message" not in chat(messages=[*HELLO, assistant(tool_use("c", {}))])


# Tools


def test_tools_and_the_choice_among_them() -> None:
    sent = chat(
        tools=[{**TOOL, "description": "d", "strict": True}, {"name": "x", "input_schema": {}}],
        tool_choice={"type": "tool", "name": "x", "disable_parallel_tool_use": True},
    )
    assert sent["tools"] == [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "d",
                "parameters": TOOL["input_schema"],
                "strict": True,
            },
        },
        {"type": "function", "function": {"name": "x", "parameters": {"type": "object"}}},
    ]
    assert sent["tool_choice"] == {"type": "function", "function": {"name": "x"}}
    assert sent["parallel_tool_calls"] is False


@pytest.mark.parametrize(
    ("kind", "wanted"), [("auto", "auto"), ("any", "required"), ("none", "none")]
)
def test_tool_choice_is_said_in_chats_words(kind: str, wanted: str) -> None:
    sent = chat(tools=[TOOL], tool_choice={"type": kind})
    assert sent["tool_choice"] == wanted
    assert "parallel_tool_calls" not in sent


def test_a_server_tool_is_refused_in_vllms_words() -> None:
    given = json.loads((REPLAY / "am_server_tool" / "request.json").read_bytes())
    told = json.loads((REPLAY / "am_server_tool" / "response.body").read_bytes())
    assert str(refusal(tools=given["tools"])) == told["error"]["message"]


def test_a_deferred_tool_is_shown_once_a_search_found_it() -> None:
    deferred = {"name": "rare", "defer_loading": True, "input_schema": {"type": "object"}}
    search = [*HELLO, assistant(tool_use("c1", {"q": "rare"}, "ToolSearch"))]
    before = translate(tools=[TOOL, deferred], messages=search)
    assert [t["function"]["name"] for t in json.loads(before.request.body)["tools"]] == [
        "get_weather"
    ]
    assert before.normalised == {"deferred_tools": ["rare"]}
    found = user(tool_result("c1", [{"type": "tool_reference", "tool_name": "rare"}]))
    after = chat(tools=[TOOL, deferred], messages=[*search, found])
    assert [t["function"]["name"] for t in after["tools"]] == ["get_weather", "rare"]
    assert "defer_loading" not in json.dumps(after)
    assert after["messages"][-1]["content"] == "Tool loaded: rare"


# Fields


def test_sampling_and_output_fields_are_carried_over_and_the_rest_is_noted() -> None:
    schema = {"type": "object"}
    translation = translate(
        temperature=0,
        top_p=0.5,
        top_k=3,
        stop_sequences=["."],
        chat_template_kwargs={"enable_thinking": False},
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": schema}},
        thinking={"type": "adaptive"},
        metadata={"user_id": "u"},
        service_tier="auto",
    )
    sent = json.loads(translation.request.body)
    assert sent == {
        "model": "m",
        "messages": HELLO,
        "max_tokens": 5,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "chat_template_kwargs": {"enable_thinking": False},
        "stop": ["."],
        "reasoning_effort": "high",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema},
        },
    }
    assert translation.normalised == {"dropped": ["thinking", "metadata", "service_tier"]}


def test_c26_a_stream_is_asked_for_with_its_usage() -> None:
    sent = chat(stream=True)
    assert sent["stream"] is True
    assert sent["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


# Refusals


def test_a_missing_max_tokens_is_refused_in_vllms_words() -> None:
    told = json.loads((VLLM / "messages_error_missing" / "response.body").read_bytes())
    assert str(refusal(drop="max_tokens")) == told["error"]["message"]


def test_a_thread_is_refused_as_the_sdk_reads_it() -> None:
    case = DATA / "harness" / "anthropic-python" / "runner_threadunsup" / "00_v1_messages"
    parsed = MESSAGES.read_request((case / "request.json").read_bytes())
    with pytest.raises(TranslationError) as caught:
        MESSAGES.translate(parsed)
    answer = error_of(caught.value)
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
        ({"messages": [user({"type": "text"})]}, "messages.0.content.0.text"),
        ({"messages": [user({"type": "container_upload"})]}, "messages.0.content.0.type"),
        ({"messages": [assistant({"type": "server_tool_use"})]}, "messages.0.content.0.type"),
        ({"messages": [assistant({"type": "tool_use"})]}, "messages.0.content.0"),
        ({"messages": [user({"type": "image", "source": {"type": "file"}})]}, "source"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"name": "x", "input_schema": 1}]}, "tools.0.input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ],
)
def test_what_cannot_be_said_is_refused_with_its_place(fields: dict[str, Any], where: str) -> None:
    assert where in str(refusal(**fields))


def test_a_body_that_is_no_object_is_refused() -> None:
    for body in (b"[]", b"{", b"", b'{"system": "\\ud83d"}'):
        with pytest.raises(TranslationError, match="not a JSON object"):
            MESSAGES.translate(MESSAGES.read_request(body))


def test_a_field_that_cannot_be_read_is_named() -> None:
    body = b'{"max_tokens": 5, "messages": [], "metadata": 1e999}'
    with pytest.raises(TranslationError, match="metadata: Input is not readable"):
        MESSAGES.translate(MESSAGES.read_request(body))
    null = b'{"max_tokens": 5, "system": null, "messages": [{"role": "user", "content": "a"}]}'
    sent = json.loads(MESSAGES.translate(MESSAGES.read_request(null)).request.body)
    assert sent["messages"] == [{"role": "user", "content": "a"}]
