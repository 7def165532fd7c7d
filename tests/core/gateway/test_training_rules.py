"""What training asks of calls, through the whole service: sampling, limits, labels, headers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agl_core.clock import Clock
from agl_core.gateway.context import is_context_error
from agl_core.hookspecs import hookimpl
from agl_core.interfaces import Store
from agl_core.testing.fake_vllm import FakeVllm, Output, VllmAnswer, answer, answering
from agl_core.testing.raw_http import Exchange
from agl_core.testing.service import Answer, RunningService, chat, running_service
from agl_memory import MemoryStore

WITHIN = 10.0
NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
MESSAGES = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
RESPONSES = {"model": "m", "input": "Hi"}


def sampling_tables(train: str, val: str = "default", **values: float) -> dict[str, Any]:
    return {"train": {"policy": train, **values}, "val": {"policy": val, **values}}


@pytest.fixture
async def vllm(open_vllm: Any) -> FakeVllm:
    server: FakeVllm = await open_vllm()
    return server


# Sampling


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", chat()),
        ("completions", {"model": "m", "prompt": "Hi"}),
        ("messages", MESSAGES),
        ("responses", RESPONSES),
    ],
    ids=["chat", "completions", "messages", "responses"],
)
async def test_forced_sampling_is_sent_whole_whatever_the_agent_says(
    open_service: Any, vllm: FakeVllm, path: str, body: dict[str, Any]
) -> None:
    service = await open_service(sampling=sampling_tables("force", temperature=0.7))
    await service.register(vllm.endpoint, logprobs_mode="processed")
    await service.rollout("r")
    asked = {**body, "temperature": 0.1, "top_p": 0.5}
    assert (await service.call("r", asked, path)).status == 200
    sent = vllm.requests[-1].json()
    forced = {**NEUTRAL, "temperature": 0.7}
    assert {name: sent.get(name) for name in forced} == forced
    (event,) = await service.events("r")
    assert {name: event["adjusted"].get(name) for name in forced} == forced
    assert event["sampling"] == {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "logprobs_mode": "processed",
    }
    assert event["request"] == asked


async def test_default_sampling_fills_in_what_the_agent_leaves_out(
    open_service: Any, vllm: FakeVllm
) -> None:
    service = await open_service(sampling=sampling_tables("default", temperature=0.7))
    await service.register(vllm.endpoint)
    await service.rollout("r")
    await service.call("r", chat(temperature=0.25))
    sent = vllm.requests[-1].json()
    assert {name: sent.get(name) for name in NEUTRAL} == {**NEUTRAL, "temperature": 0.25}
    (event,) = await service.events("r")
    assert "temperature" not in event["adjusted"]
    assert event["sampling"]["temperature"] == 0.25


async def test_agents_own_sampling_goes_as_it_came(open_service: Any, vllm: FakeVllm) -> None:
    service = await open_service(sampling=sampling_tables("agent", "agent"))
    await service.register(vllm.endpoint)
    await service.rollout("r")
    await service.call("r", chat(temperature=0.25, seed=7))
    sent = vllm.requests[-1].json()
    assert (sent["temperature"], sent["seed"]) == (0.25, 7)
    assert not (NEUTRAL.keys() - {"temperature"}) & sent.keys()


async def test_seed_and_bias_go_in_training_and_stay_in_validation(
    open_service: Any, vllm: FakeVllm
) -> None:
    service = await open_service(sampling=sampling_tables("force"))
    await service.register(vllm.endpoint)
    body = chat(seed=7, logit_bias={"11": 1.0}, stop=["x"], max_tokens=5)
    for mode in ("train", "val"):
        await service.rollout(mode, mode=mode)
        assert (await service.call(mode, body)).status == 200
    train, val = (request.json() for request in vllm.requests)
    assert not {"seed", "logit_bias"} & train.keys()
    assert (train["stop"], train["max_tokens"]) == (["x"], 5)
    assert (val["seed"], val["logit_bias"]) == (7, {"11": 1.0})
    (event,) = await service.events("train")
    assert event["adjusted"]["seed"] is None
    assert event["request"]["seed"] == 7


async def test_helper_models_are_sampled_and_answer_as_the_agent_asks(
    open_service: Any, vllm: FakeVllm
) -> None:
    service = await open_service(sampling=sampling_tables("force"))
    await service.register(vllm.endpoint, "judge", trained=False, salt=True)
    await service.rollout("r", config={"limits": {"calls": 5}})
    body = chat(model="judge", temperature=0, seed=7)
    assert (await service.call("r", body)).status == 200
    assert vllm.requests[-1].json() == body
    (event,) = await service.events("r")
    assert (event["trained"], event["adjusted"]) == (False, {})
    assert event["sampling"]["temperature"] == 0


async def test_guided_decoding_stays_and_is_marked(open_service: Any, vllm: FakeVllm) -> None:
    service = await open_service(sampling=sampling_tables("force"))
    await service.register(vllm.endpoint)
    await service.rollout("r")
    form = {"type": "json_object"}
    await service.call("r", chat(response_format=form))
    await service.call(
        "r", {**MESSAGES, "tools": [TOOL], "tool_choice": {"type": "any"}}, "messages"
    )
    await service.call("r")
    assert vllm.requests[0].json()["response_format"] == form
    marks = [event.get("constrained") for event in await service.events("r")]
    assert marks == [True, True, None]


TOOL = {"name": "f", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(("path", "body"), [("messages", MESSAGES), ("responses", RESPONSES)])
async def test_salt_is_sent_with_translated_calls_too(
    open_service: Any, vllm: FakeVllm, path: str, body: dict[str, Any]
) -> None:
    service = await open_service()
    await service.register(vllm.endpoint, version=3, salt=True)
    await service.rollout("r")
    assert (await service.call("r", body, path)).status == 200
    assert vllm.requests[-1].json()["cache_salt"] == "m@3"


async def test_server_that_speaks_messages_natively_is_asked_in_it(
    open_service: Any, open_vllm: Any
) -> None:
    told = {"id": "msg", "type": "message", "role": "assistant", "content": []}
    server = await open_vllm(answering(200, told))
    service = await open_service(sampling=sampling_tables("agent", "agent"))
    await service.register(server.endpoint, native=["messages"])
    await service.rollout("r")
    got = await service.call("r", MESSAGES, "messages?beta=true")
    assert got.json() == told
    assert server.requests[-1].target == "/v1/messages?beta=true"
    assert server.requests[-1].json() == MESSAGES
    (event,) = await service.events("r")
    assert (event["api"], event["choices"]) == ("messages", [])
    assert "sent" not in event


# Limits


def limit_of(got: Answer) -> str:
    """The text of a refusal by a limit, which must be one that harnesses know."""
    assert got.status == 400
    assert is_context_error(got.status, got.body)
    return str(got.json()["error"]["message"])


@pytest.mark.parametrize(
    ("limits", "allowed", "name"),
    [
        ({"calls": 2}, 2, "calls"),
        ({"completion_tokens": 8}, 2, "completion_tokens"),
        ({"completion_tokens": 9}, 3, "completion_tokens"),
        ({"context_tokens": 4}, 1, "context_tokens"),
        ({"calls": 9, "completion_tokens": 1}, 1, "completion_tokens"),
    ],
)
async def test_limit_ends_the_rollouts_calls_and_no_others(
    world: RunningService, vllm: FakeVllm, limits: dict[str, int], allowed: int, name: str
) -> None:
    await world.register(vllm.endpoint, "fake")
    await world.rollout("limited", config={"limits": limits})
    body = chat(model="fake")
    for _ in range(allowed):
        assert (await world.call("limited", body)).status == 200
    for path, refused in (
        ("chat/completions", body),
        ("messages", {**MESSAGES, "model": "fake"}),
        ("responses", {**RESPONSES, "model": "fake", "instructions": "x" * 99}),
    ):
        got = await world.call("limited", refused, path)
        assert f"limits.{name}" in limit_of(got)
        assert "x-should-retry" not in got.headers
    assert len(vllm.requests) == len(await world.events("limited")) == allowed
    assert (await world.call("r", body)).status == 200


async def test_calls_at_the_same_time_cannot_pass_a_limit_together(
    world: RunningService, manual_vllm: FakeVllm
) -> None:
    await world.rollout("limited", config={"limits": {"calls": 2}})
    calls = [asyncio.ensure_future(world.call("limited")) for _ in range(5)]
    async with asyncio.timeout(WITHIN):
        for _ in range(2):
            exchange = await manual_vllm.take()
            answer(exchange, VllmAnswer(exchange.request.json()))
        statuses = [(await call).status for call in calls]
    assert sorted(statuses) == [200, 200, 400, 400, 400]
    assert len(manual_vllm.requests) == 2


async def test_call_that_failed_before_a_server_saw_it_does_not_count(
    open_service: Any, vllm: FakeVllm
) -> None:
    service = await open_service(hold_seconds=0.05)
    await service.rollout("r", config={"limits": {"calls": 1}})
    assert (await service.call("r")).code == "held_too_long"
    await service.register(vllm.endpoint)
    assert (await service.call("r", chat(model="nobody"))).status == 404
    assert (await service.call("r")).status == 200
    assert "limits.calls" in limit_of(await service.call("r"))


async def test_call_that_an_update_aborted_counts_once(
    world: RunningService, manual_vllm: FakeVllm
) -> None:
    await world.rollout("limited", config={"limits": {"calls": 1}})
    call = asyncio.ensure_future(world.call("limited"))
    async with asyncio.timeout(WITHIN):
        await manual_vllm.take()
        await world.api("POST", "/gateway/pause", {"policy": "m", "mode": "abort"})
        await world.api("POST", "/gateway/resume", {"policy": "m"})
        exchange = await manual_vllm.take()
        answer(exchange, VllmAnswer(exchange.request.json()))
        assert (await call).status == 200
    assert "limits.calls" in limit_of(await world.call("limited"))
    assert [e["status"] for e in await world.events("limited")] == ["aborted", "ok"]


class KeptStore:
    """Offers one memory store to one service after the other, as a database outlives them."""

    def __init__(self) -> None:
        self.store: MemoryStore | None = None

    @hookimpl
    def provide_store(self, clock: Clock) -> Store:
        if self.store is None:
            self.store = MemoryStore(clock)
        return self.store


async def test_restarted_service_counts_what_was_called_before_it(vllm: FakeVllm) -> None:
    kept = KeptStore()

    @asynccontextmanager
    async def life() -> AsyncIterator[RunningService]:
        async with running_service(plugins=(kept,), enabled=("vllm", "verl")) as service:
            yield service

    async with life() as service:
        await service.register(vllm.endpoint)
        await service.rollout("r", config={"limits": {"calls": 3}})
        await service.rollout("other", config={"limits": {"completion_tokens": 9}})
        for _ in range(2):
            assert (await service.call("r")).status == 200
            assert (await service.call("other")).status == 200
        assert (await service.call("r", chat(model="nobody"))).status == 404
    async with life() as service:
        assert (await service.call("r")).status == 200
        assert "is at 3 model calls" in limit_of(await service.call("r"))
        assert (await service.call("other")).status == 200
        assert "is at 12 completion tokens" in limit_of(await service.call("other"))


# What a probe finds out: context and logprobs mode


async def until_known(service: RunningService, model: str, tokens: int) -> None:
    """Wait until the context length of a model is known, bounded by the caller."""
    while True:
        cards = (await service.client.get(f"{service.base('r')}/models")).json()["data"]
        if any(card["id"] == model and card["max_model_len"] == tokens for card in cards):
            return


async def until_ready(service: RunningService) -> None:
    while (await service.client.get(f"{service.url}/readyz")).status_code != 200:
        pass


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"max_completion_tokens": 5000, "max_tokens": 90}),
        ("messages", {**MESSAGES, "max_tokens": 32_000}),
        ("responses", {**RESPONSES, "max_output_tokens": 32_000}),
    ],
)
async def test_c82_output_limits_are_clamped_to_the_context_that_the_server_tells(
    open_service: Any, vllm: FakeVllm, path: str, body: dict[str, Any]
) -> None:
    vllm.cards = [
        {"id": "base", "max_model_len": 1024},
        {"id": "adapter", "max_model_len": None, "parent": "base"},
    ]
    service = await open_service(probe=True)
    await service.rollout("r")
    await service.register(vllm.endpoint, served_model="adapter")
    async with asyncio.timeout(WITHIN):
        await until_known(service, "m", 1024)
    asked = chat(**body) if path.startswith("chat") else body
    assert (await service.call("r", asked, path)).status == 200
    sent = [r for r in vllm.requests if r.method == "POST"][-1].json()
    if path.startswith("chat"):
        assert (sent["max_completion_tokens"], sent["max_tokens"]) == (1024, 90)
    else:
        assert sent["max_tokens"] == 1024
    (event,) = await service.events("r")
    assert 1024 in event["adjusted"].values()
    assert event["request"] == asked


def engine(logprobs: dict[str, float]) -> Any:
    """A server whose chosen tokens have these logprobs, by path."""

    async def script(exchange: Exchange) -> None:
        value = logprobs[exchange.request.target.rpartition("/v1/")[2]]
        fields = exchange.request.json()
        output = Output(texts=("a",), token_ids=(7,), logprobs=(value,))
        answer(exchange, VllmAnswer(fields, [output]))

    return script


@pytest.mark.parametrize(("value", "mode"), [(0.0, "processed"), (-0.5, "raw")])
async def test_logprobs_mode_is_found_out_and_recorded_but_not_registered(
    open_service: Any, open_vllm: Any, value: float, mode: str
) -> None:
    server = await open_vllm(engine({"completions": value, "chat/completions": -0.1}))
    service = await open_service(probe=True)
    await service.rollout("r")
    await service.register(server.endpoint)
    async with asyncio.timeout(WITHIN):
        while True:
            assert (await service.call("r")).status == 200
            event = (await service.events("r"))[-1]
            if event["sampling"]["logprobs_mode"] != "unknown":
                break
    assert event["sampling"]["logprobs_mode"] == mode
    (registered,) = (await service.api("GET", "/models"))["items"]
    assert registered["logprobs_mode"] == "unknown"
    probes = [r.json() for r in server.requests if r.method == "POST"]
    assert [p["top_k"] for p in probes if "top_k" in p] == [1]


async def test_registered_logprobs_mode_stands_and_nothing_is_probed_for_it(
    open_service: Any, open_vllm: Any
) -> None:
    server = await open_vllm(engine({"chat/completions": 0.0}))
    server.cards = [{"id": "m", "max_model_len": 100}]
    service = await open_service(probe=True)
    await service.rollout("r")
    await service.register(server.endpoint, logprobs_mode="raw")
    async with asyncio.timeout(WITHIN):
        await until_known(service, "m", 100)
    assert (await service.call("r")).status == 200
    (event,) = await service.events("r")
    assert event["sampling"]["logprobs_mode"] == "raw"
    assert [request.target for request in server.requests] == [
        "/v1/chat/completions",
        "/v1/models",
        "/v1/chat/completions",
    ]


async def test_server_is_left_alone_by_probes_while_its_policy_is_paused(
    open_service: Any, manual_vllm: FakeVllm
) -> None:
    service = await open_service(probe=True)
    async with asyncio.timeout(WITHIN):
        await service.register(manual_vllm.endpoint)
        first = await manual_vllm.take()
        await service.api("POST", "/gateway/pause", {"policy": "m", "mode": "keep"})
        answer(first, VllmAnswer(first.request.json()))
        await until_ready(service)
        assert [r.target for r in manual_vllm.requests] == ["/v1/chat/completions"]
        await service.api("POST", "/gateway/resume", {"policy": "m"})
        mode = await manual_vllm.take()
    assert mode.request.target == "/v1/completions"
    assert mode.request.json()["top_k"] == 1
    assert [r.target for r in manual_vllm.requests][1] == "/v1/models"


# Headers and labels


async def test_c93_every_answer_says_whose_it_is_as_its_record_does(
    world: RunningService, open_vllm: Any
) -> None:
    server = await open_vllm()
    await world.register(server.endpoint, "fake", version=4)
    got = {
        "whole": await world.call("r", chat(model="fake")),
        "stream": await world.call("r", chat(model="fake", stream=True)),
        "messages": await world.call("r", {**MESSAGES, "model": "fake"}, "messages"),
    }
    server.script = answering(400, {"error": {"message": "no"}})
    got["400"] = await world.call("r", chat(model="fake"))
    server.refuse()
    got["502"] = await world.call("r", chat(model="fake"))
    got["404"] = await world.call("r", chat(model="nobody"))
    events = {event["call_id"]: event for event in await world.events("r")}
    assert [a.status for a in got.values()] == [200, 200, 200, 400, 502, 404]
    for name, said in got.items():
        event = events.pop(said.call_id)
        assert said.headers["x-agl-rollout-id"] == "r"
        assert said.headers["x-agl-attempt-id"] == "a-1"
        if name not in ("404", "502"):
            assert said.headers["x-agl-policy"] == event["policy"] == "fake"
            assert said.headers["x-agl-version"] == str(event["version_start"]) == "4"
            assert said.headers["x-agl-server"].startswith("fake@")
    assert events == {}
    unknown = await world.call("nobody")
    assert (unknown.status, bool(unknown.call_id)) == (404, True)


async def test_conversations_are_labelled_as_harnesses_name_them(
    world: RunningService, vllm: FakeVllm
) -> None:
    await world.register(vllm.endpoint, "fake")
    body = {**MESSAGES, "model": "fake", "tools": [TOOL]}
    session = {"x-claude-code-session-id": "s"}
    for headers in ({}, session, {**session, "x-claude-code-agent-id": "sub"}):
        assert (await world.call("r", body, "messages", headers=headers)).status == 200
    labels = [event.get("conversation") for event in await world.events("r")]
    assert labels == [
        None,
        {"agent": "s", "kind": "main"},
        {"agent": "sub", "parent": "s", "kind": "subagent"},
    ]


# What the gateway answers itself


async def test_c11_models_and_knocks_are_answered_without_a_model_server(
    world: RunningService, vllm: FakeVllm
) -> None:
    await world.register(vllm.endpoint, "fake", aliases=["other", "claude-*"])
    listed = await world.call("r", b"", "models", method="GET")
    assert [card["id"] for card in listed.json()["data"]] == ["m", "fake", "other"]
    one = await world.call("r", b"", "models/other", method="GET")
    assert (one.status, one.json()["root"]) == (200, "fake")
    none = await world.call("r", b"", "models/gone", method="GET")
    assert (none.status, none.code) == (404, "model_not_found")
    base = world.base("r").removesuffix("/v1")
    for url in (base, f"{base}/api/hello", f"{base}/v1/messages"):
        knock = await world.client.head(url)
        assert (knock.status_code, knock.headers["x-request-id"] != "") == (200, True)
    assert vllm.requests == []
    assert await world.events("r") == []


async def test_websocket_is_refused_with_426_so_that_http_is_used(world: RunningService) -> None:
    reader, writer = await world.connect()
    head = world.head(
        "r",
        "upgrade: websocket",
        "connection: Upgrade",
        "sec-websocket-version: 13",
        "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
        path="responses",
        method="GET",
    )
    writer.write(head)
    async with asyncio.timeout(WITHIN):
        answered = await reader.read()
    writer.close()
    assert answered.startswith(b"HTTP/1.1 426 ")
    assert await world.events("r") == []
