"""Every recorded chat and completions exchange, through the whole service over real sockets."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import pytest_asyncio

from agl_core.testing.replay import (
    CASE_HEADER,
    SPLIT_HEADER,
    Recording,
    ReplayServer,
    body_as_sent,
    chunks_of,
    load_recordings,
)
from agl_core.testing.service import Answer, RunningService, running_service

pytestmark = pytest.mark.asyncio(loop_scope="module")

RECORDINGS = load_recordings(Path(__file__).parents[2] / "data" / "vllm")
OURS = ("return_token_ids", "logprobs", "top_logprobs", "stream_options")
PATHS = ("/v1/chat/completions", "/v1/completions")

PROXIED = {
    name: case
    for name, case in RECORDINGS.items()
    # The gateway answers the list of models itself; adapters are loaded by whoever runs vLLM.
    if case.path.startswith("/v1/") and not case.path.endswith(("/models", "_lora_adapter"))
}
ENDED = [name for name, case in PROXIED.items() if case.end == "complete"]
ABORTED = [name for name in ENDED if b'"finish_reason":"abort"' in RECORDINGS[name].body]
PASSED = [name for name in ENDED if name not in ABORTED]
UNANSWERED = [name for name, case in RECORDINGS.items() if case.status is None]
# What the agent of `twin` gets when vLLM is asked for ids and so answers as in `case`.
TWINS = {
    "chat_token_ids": "chat_plain",
    "chat_tools_auto": "chat_tools_auto_plain",
    "chat_unicode": "chat_unicode_plain",
    "reasoning_chat": "reasoning_chat_plain",
    "completion_token_ids": "completion_plain",
    "completion_token_ids_logprobs": "completion_plain",
    "chat_token_ids_stream": "chat_plain_stream",
    "chat_tools_auto_stream": "chat_tools_auto_plain_stream",
    "reasoning_chat_stream": "reasoning_chat_plain_stream",
    "completion_token_ids_stream": "completion_plain_stream",
    "completion_token_ids_logprobs_stream": "completion_plain_stream",
}
SPLITS = ("recorded", "bytes")


@attrs.frozen
class Replayed:
    """What came of one case."""

    answer: Answer
    event: dict[str, Any]
    sent: bytes
    """The body of the request that the model server got."""


@attrs.define
class Stage:
    """One service and one replay server for all cases."""

    service: RunningService
    server: ReplayServer
    count: int = 0

    async def play(
        self, case: Recording, request: bytes, split: str, method: str | None = None
    ) -> Replayed:
        self.count += 1
        rollout_id = await self.service.rollout(f"r{self.count}")
        headers = {CASE_HEADER: case.name, SPLIT_HEADER: split}
        if case.content_type is not None:
            headers["content-type"] = case.content_type
        before = len(self.server.requests)
        answer = await self.service.call(
            rollout_id,
            request,
            case.path.removeprefix("/v1/"),
            method=method or case.method,
            headers=headers,
        )
        events = await self.service.events(rollout_id)
        assert [event["call_id"] for event in events] == [answer.call_id]
        return Replayed(answer, events[0], self.server.requests[before].body)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Stage]:
    async with ReplayServer(RECORDINGS) as server, running_service() as service:
        names = {model for case in RECORDINGS.values() if (model := model_of(case.request))}
        for name in sorted(names):
            await service.register(
                server.endpoint, name, policy="p", native=["messages", "responses"]
            )
        yield Stage(service, server)


def model_of(request: bytes) -> str | None:
    try:
        fields = json.loads(request)
    except ValueError:
        return None
    model = fields.get("model") if isinstance(fields, dict) else None
    return model if isinstance(model, str) else None


def without_ours(request: bytes) -> bytes:
    """The request of an agent that wants text alone."""
    fields = {name: value for name, value in json.loads(request).items() if name not in OURS}
    return json.dumps(fields).encode()


def without_chance(body: bytes) -> bytes:
    """The body without what differs between two equal calls: ids, times, how much was cached."""
    body = re.sub(rb'"id":"(chatcmpl|cmpl|call|chatcmpl-tool)-[^"]*"', b'"id":"-"', body)
    body = re.sub(rb'"(cached_tokens|created_cache_tokens)":\d+', rb'"\1":0', body)
    return re.sub(rb'"created":\d+', b'"created":0', body)


def without_fingerprint(body: bytes) -> bytes:
    return re.sub(rb',"system_fingerprint":"[^"]*"', b"", body)


def answers_of(case: Recording, body: bytes) -> list[dict[str, Any]]:
    """The whole answer, or the chunks of a stream."""
    answers = chunks_of(body) if case.is_stream else [json.loads(body)]
    return [answer for answer in answers if isinstance(answer, dict)]


def choices_of(case: Recording, body: bytes) -> list[dict[str, Any]]:
    return [choice for answer in answers_of(case, body) for choice in answer.get("choices") or ()]


def said(case: Recording, body: bytes) -> dict[int, dict[str, Any]]:
    """Text, reasoning, tool calls and finish reason of each choice, however they were cut."""
    found: dict[int, dict[str, Any]] = {}
    for choice in choices_of(case, body):
        seen = found.setdefault(choice["index"], {"finish": None, "tools": "", "text": ""})
        part = choice.get("delta") or choice.get("message") or {}
        for name in ("content", "reasoning", "reasoning_content"):
            seen[name] = seen.get(name, "") + (part.get(name) or "")
        seen["text"] += choice.get("text") or ""
        for call in part.get("tool_calls") or ():
            function = call["function"]
            seen["tools"] += f"{function.get('name') or ''}{function.get('arguments') or ''}"
        seen["finish"] = choice.get("finish_reason") or seen["finish"]
    return found


def tokens_of(case: Recording, body: bytes) -> dict[int, tuple[list[int], list[float], list[int]]]:
    """Ids, logprobs and prompt ids of each choice."""
    found: dict[int, tuple[list[int], list[float], list[int]]] = {}
    for answer in answers_of(case, body):
        for choice in answer.get("choices") or ():
            ids, logprobs, prompt = found.setdefault(choice["index"], ([], [], []))
            ids += choice.get("token_ids") or ()
            values = choice.get("logprobs") or {}
            logprobs += values.get("token_logprobs") or ()
            logprobs += [item["logprob"] for item in values.get("content") or ()]
            prompt[:] = answer.get("prompt_token_ids") or choice.get("prompt_token_ids") or prompt
    return found


def is_model_call(case: Recording) -> bool:
    return case.path in PATHS and case.method == "POST"


def fits(case: Recording) -> bool:
    """Whether vLLM would have sent these bytes to the gateway's request as well.

    Asked for ids, it leaves an echoed prompt out of a completion: those calls are not changed.
    """
    if not is_model_call(case) or case.status != 200:
        return False
    fields = json.loads(case.request)
    return bool(fields.get("return_token_ids")) and not fields.get("echo")


CAPTURED = [name for name in PASSED if fits(RECORDINGS[name])]


async def test_the_recordings_are_all_there() -> None:
    assert len(PASSED) + len(ABORTED) >= 180
    assert len(CAPTURED) >= 90
    assert len(ABORTED) == 2
    assert len(UNANSWERED) == 2


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", PASSED)
async def test_what_an_agent_asked_for_itself_comes_byte_for_byte(
    stage: Stage, name: str, split: str
) -> None:
    case = RECORDINGS[name]
    played = await stage.play(case, case.request, split)
    answer, event = played.answer, played.event
    assert (answer.status, answer.is_clean) == (case.status, True)
    if len(said(case, case.body)) > 1 and b"stream_options" in played.sent:
        # vLLM moves the fingerprint from every finish chunk to the usage chunk that we asked for;
        # only the last finish chunk can wait for it without holding up the others.
        assert without_fingerprint(answer.body) == without_fingerprint(case.body)
    else:
        assert answer.body == case.body
    assert answer.headers.get("content-type") == dict(case.headers).get("content-type")
    failed = case.status != 200 or b'data: {"error"' in case.body
    assert event["status"] == ("upstream_error" if failed else "ok")
    assert event["http_status"] == case.status
    assert ("error" in event) == failed


@pytest.mark.parametrize("name", PASSED)
async def test_the_model_server_gets_the_agents_request_and_what_is_said_to_be_changed(
    stage: Stage, name: str
) -> None:
    case = RECORDINGS[name]
    played = await stage.play(case, case.request, "recorded")
    adjusted = played.event["adjusted"]
    if not adjusted:
        assert played.sent == case.request
        return
    assert json.loads(played.sent) == {**json.loads(case.request), **adjusted}
    assert set(adjusted) <= {*OURS, "model"}
    assert "model" not in adjusted or model_of(case.request) is None


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", CAPTURED)
async def test_c18_an_agent_that_wants_text_gets_text_and_the_record_has_the_tokens(
    stage: Stage, name: str, split: str
) -> None:
    case = RECORDINGS[name]
    request = without_ours(case.request)
    played = await stage.play(case, request, split)
    answer, event = played.answer, played.event
    assert (answer.status, answer.is_clean) == (200, True)
    for chunk in answers_of(case, answer.body):
        assert chunk.get("prompt_token_ids") is None
        assert chunk.get("error") is not None or chunk["choices"]
        assert not (case.is_stream and "usage" in chunk)
    for choice in choices_of(case, answer.body):
        assert choice.get("token_ids") is None
        assert choice.get("prompt_token_ids") is None
        assert choice["logprobs"] is None
    assert said(case, answer.body) == said(case, case.body)
    if case.is_stream:
        assert answer.body.endswith(b"data: [DONE]\n\n")
    sent_body = body_as_sent(case, played.sent)
    expected = tokens_of(case, sent_body)
    for choice in event["choices"]:
        ids, logprobs, prompt = expected[choice["index"]]
        assert (choice["token_ids"] or []) == ids
        assert (choice["logprobs"] or []) == logprobs
        assert choice["prompt_token_ids"] == prompt
        assert choice["finish_reason"] == said(case, case.body)[choice["index"]]["finish"]
        broke = b'data: {"error"' in case.body
        provable = len(ids) == len(logprobs) and not broke
        proof = "complete" if provable else "incomplete"
        # With reasoning left out vLLM sends no ids either.
        assert choice["tokens"] == (proof if ids else "absent")
    assert len(event["choices"]) == len(expected)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("name", "twin"), TWINS.items())
async def test_a_captured_answer_is_what_vllm_sends_to_one_who_asks_for_text_alone(
    stage: Stage, name: str, twin: str, split: str
) -> None:
    case, plain = RECORDINGS[name], RECORDINGS[twin]
    played = await stage.play(case, plain.request, split)
    assert without_chance(played.answer.body) == without_chance(plain.body)
    assert {choice["tokens"] for choice in played.event["choices"]} <= {"complete", "incomplete"}


async def test_broken_recording_ends_uncleanly_with_an_error_event(stage: Stage) -> None:
    case = RECORDINGS["kill_sigkill_stream"]
    assert case.end == "eof_before_end"
    for split in SPLITS:
        played = await stage.play(case, case.request, split)
        answer, event = played.answer, played.event
        assert (answer.status, answer.is_clean) == (200, False)
        assert answer.body.startswith(case.body)
        last = chunks_of(answer.body)[-1]
        assert last["error"]["code"] == "upstream_truncated"
        assert b"[DONE]" not in answer.body
        assert event["status"] == "truncated"
        ids, logprobs, _ = tokens_of(case, case.body)[0]
        assert event["choices"][0]["token_ids"] == ids
        assert event["choices"][0]["logprobs"] == logprobs
        assert event["choices"][0]["tokens"] == "incomplete"


async def test_error_inside_a_stream_is_passed_on_and_recorded(stage: Stage) -> None:
    case = RECORDINGS["kill_engine_stream"]
    played = await stage.play(case, without_ours(case.request), "recorded")
    assert chunks_of(played.answer.body)[-1]["error"]["code"] == 500
    assert played.event["status"] == "upstream_error"
    assert played.event["error"]["code"] == 500


@pytest.mark.parametrize("name", ABORTED)
async def test_answer_that_the_engine_aborted_is_never_delivered(stage: Stage, name: str) -> None:
    case = RECORDINGS[name]
    stage.count += 1
    rollout_id = await stage.service.rollout(f"r{stage.count}")
    answer = await stage.service.call(rollout_id, case.request, headers={CASE_HEADER: name})
    events = await stage.service.events(rollout_id)
    assert {event["status"] for event in events} == {"aborted"}
    assert b'"abort"' not in answer.body
    if case.is_stream:
        assert not answer.is_clean
        assert chunks_of(answer.body)[-1]["error"]["code"] == "aborted"
    else:
        assert (answer.status, answer.code) == (503, "aborted")
        assert "retry-after" in answer.headers
        assert "x-should-retry" not in answer.headers


@pytest.mark.parametrize("name", UNANSWERED)
async def test_c01_client_that_gives_up_unanswered_is_recorded_as_gone(
    stage: Stage, name: str
) -> None:
    case = RECORDINGS[name]
    stage.count += 1
    rollout_id = await stage.service.rollout(f"r{stage.count}")
    before = len(stage.server.requests)
    call = asyncio.create_task(
        stage.service.call(rollout_id, case.request, headers={CASE_HEADER: name})
    )
    async with asyncio.timeout(10):
        while len(stage.server.requests) == before:
            await stage.service.api("GET", "/gateway/state")
        call.cancel()
        events = await stage.service.until_events(rollout_id)
        await stage.service.until_state("p", inflight=0)
    assert events[0]["status"] == "client_gone"


async def test_c01_client_that_leaves_in_the_middle_is_recorded_as_gone(stage: Stage) -> None:
    case = RECORDINGS["disconnect_stream"]
    stage.count += 1
    rollout_id = await stage.service.rollout(f"r{stage.count}")
    received = b""
    async with asyncio.timeout(10):
        async with stage.service.client.stream(
            "POST",
            f"{stage.service.base(rollout_id)}/chat/completions",
            content=case.request,
            headers={CASE_HEADER: case.name},
        ) as answer:
            async for part in answer.aiter_raw():
                received += part
                if received == case.body:
                    break
        events = await stage.service.until_events(rollout_id)
    assert events[0]["status"] == "client_gone"
    ids, _, _ = tokens_of(case, case.body)[0]
    assert events[0]["choices"][0]["token_ids"] == ids
    assert events[0]["choices"][0]["tokens"] == "incomplete"
