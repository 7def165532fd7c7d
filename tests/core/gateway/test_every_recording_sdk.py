"""Every recorded call of the model API, made by the official SDK that it belongs to.

The SDK makes the same request twice: to the gateway, and straight to the server that replays the
recording. What it makes of the two answers (objects, chunks, or the exception) must be equal.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import attrs
import openai
import pytest
import pytest_asyncio

from agl_core.testing.raw_http import SeenRequest
from agl_core.testing.replay import CASE_HEADER, Recording, ReplayServer, load_recordings
from agl_core.testing.service import RunningService, running_service

pytestmark = pytest.mark.asyncio(loop_scope="module")

RECORDINGS = load_recordings(Path(__file__).parents[2] / "data" / "vllm")
WITHIN = 15.0
GIVES_UP_SECONDS = 0.3

MESSAGES = "/v1/messages"
METHODS = {
    "POST /v1/chat/completions": "chat.completions.create",
    "POST /v1/completions": "completions.create",
    "POST /v1/responses": "responses.create",
    "POST /v1/embeddings": "embeddings.create",
    "POST /v1/messages": "messages.create",
    "POST /v1/messages/count_tokens": "messages.count_tokens",
    "GET /v1/models": "models.list",
}
"""Where an SDK has a method; all other requests go by its ``post`` and ``get``."""

# Why the SDK does not make the same of both answers.
FINGERPRINT = (
    "of several choices: vLLM moves the fingerprint of every finish chunk to the usage chunk that "
    "the gateway asks for, and only the last one can wait for it"
)
ABORTED = "the engine dropped it: half an answer is never passed on as a whole one"
TRUNCATED = "the gateway says so inside the stream before it cuts it, too"
OWN_MODELS = "the gateway lists the models that are registered with it"
KNOWN = {
    "chat_n2_stream": FINGERPRINT,
    "completion_batch_stream": FINGERPRINT,
    "completion_n2_stream": FINGERPRINT,
    "paused_abort": ABORTED,
    "paused_abort_stream": ABORTED,
    "kill_sigkill_stream": TRUNCATED,
    "models": OWN_MODELS,
    "lora_models": OWN_MODELS,
}
# Adapters are loaded by whoever runs vLLM, engines are run by the gateway: no SDK knows how.
NO_SDK = ("_lora_adapter",)

CASES = [
    name
    for name, case in RECORDINGS.items()
    if case.is_of_the_model_api and not case.path.endswith(NO_SDK)
]


@attrs.frozen
class Outcome:
    """What the SDK made of a call."""

    kind: str
    """``whole``, ``stream``, or the name of the exception."""
    value: Any
    """The object, or what is told by the exception."""
    events: tuple[Any, ...] = ()
    """Of a stream, those before its end or its exception."""


@attrs.frozen
class Sdks:
    """Both SDKs, with the gateway and without."""

    service: RunningService
    server: ReplayServer
    by_gateway: dict[str, Any]
    direct: dict[str, Any]

    async def both(self, case: Recording) -> tuple[Outcome, Outcome]:
        """The outcomes by way of the gateway and without it."""
        sdk = "anthropic" if case.path.startswith(MESSAGES) else "openai"
        async with asyncio.timeout(WITHIN):
            return (
                await outcome(self.by_gateway[sdk], case),
                await outcome(self.direct[sdk], case),
            )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sdks() -> AsyncIterator[Sdks]:
    # Recorded failures must not take the server out for the cases that follow.
    settings: dict[str, Any] = {"retries": 0, "failures_to_unhealthy": 10_000}
    async with (
        ReplayServer(RECORDINGS) as server,
        running_service({"gateway": settings}) as service,
    ):
        for name in sorted({model for case in RECORDINGS.values() if (model := model_of(case))}):
            await service.register(
                server.endpoint, name, policy="p", native=["messages", "responses"]
            )
        await service.rollout("r")
        token = (await service.api("POST", "/rollouts/r/token"))["token"]
        async with (
            sdk_clients(service.base("r"), token) as by_gateway,
            sdk_clients(server.endpoint, "none") as direct,
        ):
            yield Sdks(service, server, by_gateway, direct)


@asynccontextmanager
async def sdk_clients(base: str, key: str) -> AsyncIterator[dict[str, Any]]:
    """The clients of one base URL, by SDK."""
    root = base.removesuffix("/v1")
    async with (
        openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=0) as one,
        anthropic.AsyncAnthropic(base_url=root, api_key=key, max_retries=0) as two,
    ):
        yield {"openai": one, "anthropic": two}


def fields_of(case: Recording) -> dict[str, Any] | None:
    try:
        fields = json.loads(case.request)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None


def model_of(case: Recording) -> str | None:
    model = (fields_of(case) or {}).get("model")
    return model if isinstance(model, str) else None


def headers_of(case: Recording) -> dict[str, str]:
    headers = {CASE_HEADER: case.name}
    if case.content_type not in (None, "application/json"):
        headers["content-type"] = case.content_type
    return headers


async def asked(client: Any, case: Recording) -> Any:
    """Make the recorded request, by the SDK's own method where it has one that takes it."""
    fields, headers = fields_of(case), headers_of(case)
    method = client
    for part in METHODS.get(case.route, "").split("."):
        method = getattr(method, part, None)
    if callable(method) and method is not client:
        known = inspect.signature(method).parameters
        required = {k for k, p in known.items() if p.default is p.empty}
        if required <= set(fields or {}):
            own = {k: v for k, v in (fields or {}).items() if k in known}
            extra = {k: v for k, v in (fields or {}).items() if k not in known}
            if case.status is None:
                own["timeout"] = GIVES_UP_SECONDS
            return await method(**own, extra_headers=headers, extra_body=extra or None)
    path = case.path if isinstance(client, anthropic.AsyncAnthropic) else case.path[3:]
    options = {"headers": headers}
    if case.method == "GET":
        return await client.get(path, cast_to=object, options=options)
    if fields is None:
        return await client.post(path, cast_to=object, content=case.request, options=options)
    return await client.post(path, cast_to=object, body=fields, options=options)


async def outcome(client: Any, case: Recording) -> Outcome:
    """Make the recorded request, and read its answer to the end."""
    events: list[Any] = []
    try:
        answer = await asked(client, case)
        if not isinstance(answer, openai.AsyncStream | anthropic.AsyncStream):
            return Outcome("whole", plain(answer))
        async with answer:
            async for event in answer:
                events.append(plain(event))
                if case.end == "client_closed" and len(events) == case.body.count(b"\n\n"):
                    break
    except (openai.APIError, anthropic.APIError) as exc:
        told = {
            name: getattr(exc, name, None)
            for name in ("message", "status_code", "code", "param", "type", "body")
        }
        return Outcome(type(exc).__name__, told, tuple(events))
    return Outcome("stream", None, tuple(events))


def plain(answer: Any) -> Any:
    """An SDK's object as it came: its fields, those that the SDK does not know included."""
    if not hasattr(answer, "model_dump"):
        return answer
    return answer.model_dump(mode="json", warnings=False)


def without_fingerprints(events: tuple[Any, ...]) -> list[Any]:
    return [{k: v for k, v in event.items() if k != "system_fingerprint"} for event in events]


async def test_every_recorded_model_call_is_here() -> None:
    left_out = {name for name in RECORDINGS if name not in CASES}
    assert all(
        not RECORDINGS[name].is_of_the_model_api or RECORDINGS[name].path.endswith(NO_SDK)
        for name in left_out
    )
    assert set(KNOWN) <= set(CASES)
    assert {RECORDINGS[name].route for name in CASES} >= set(METHODS)


@pytest.mark.parametrize("name", [name for name in CASES if name not in KNOWN])
async def test_sdk_makes_the_same_of_the_gateways_answer_as_of_vllms(sdks: Sdks, name: str) -> None:
    case = RECORDINGS[name]
    before = len(sdks.server.requests)
    by_gateway, direct = await sdks.both(case)
    assert by_gateway == direct
    assert direct.value is not None or direct.events
    if case.status is not None and case.status >= 400:
        assert direct.value["status_code"] == case.status
    elif case.is_stream and direct.kind != "APIError":  # an error may be all that is streamed
        assert direct.events
    one, two = sdks.server.requests[before:]
    check_requests(case, one, two)


def check_requests(case: Recording, by_gateway: SeenRequest, direct: SeenRequest) -> None:
    """The SDK asked as recorded, and the gateway for no less."""
    assert by_gateway.target == direct.target == case.path
    recorded = fields_of(case)
    if recorded is None:
        assert by_gateway.body == direct.body == case.request
        return
    sent = direct.json()
    assert {name: sent[name] for name in recorded} == recorded
    assert {name: by_gateway.json()[name] for name in sent if name not in ASKED_FOR} == {
        name: value for name, value in sent.items() if name not in ASKED_FOR
    }


ASKED_FOR = {"return_token_ids", "logprobs", "top_logprobs", "stream_options"}


@pytest.mark.parametrize("name", [name for name in KNOWN if KNOWN[name] is FINGERPRINT])
async def test_sdk_reads_several_choices_alike_but_for_the_fingerprint(
    sdks: Sdks, name: str
) -> None:
    by_gateway, direct = await sdks.both(RECORDINGS[name])
    assert (by_gateway.kind, direct.kind) == ("stream", "stream")
    assert by_gateway.events != direct.events
    assert without_fingerprints(by_gateway.events) == without_fingerprints(direct.events)


@pytest.mark.parametrize("name", [name for name in KNOWN if KNOWN[name] is ABORTED])
async def test_sdk_raises_where_the_engine_dropped_the_answer(sdks: Sdks, name: str) -> None:
    by_gateway, direct = await sdks.both(RECORDINGS[name])
    assert direct.kind == ("stream" if RECORDINGS[name].is_stream else "whole")
    assert by_gateway.value["code"] == "aborted"
    if RECORDINGS[name].is_stream:
        assert by_gateway.kind == "APIError"
        assert by_gateway.events == direct.events[: len(by_gateway.events)]
    else:
        assert by_gateway.kind == "InternalServerError"


@pytest.mark.parametrize("name", [name for name in KNOWN if KNOWN[name] is TRUNCATED])
async def test_sdk_raises_on_a_cut_stream_and_is_told_why(sdks: Sdks, name: str) -> None:
    by_gateway, direct = await sdks.both(RECORDINGS[name])
    assert direct.events
    assert by_gateway.events == direct.events
    assert (by_gateway.kind, by_gateway.value["code"]) == ("APIError", "upstream_truncated")
    assert (direct.kind, direct.value["code"]) == ("APIConnectionError", None)


@pytest.mark.parametrize("name", [name for name in KNOWN if KNOWN[name] is OWN_MODELS])
async def test_sdk_lists_every_recorded_model_under_its_name(sdks: Sdks, name: str) -> None:
    by_gateway, direct = await sdks.both(RECORDINGS[name])
    listed = [
        {card["id"]: card["object"] for card in o.value["data"]} for o in (by_gateway, direct)
    ]
    assert listed[1].items() <= listed[0].items()
    assert len(listed[0]) > len(listed[1])
