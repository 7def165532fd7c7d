"""Every recorded exchange with vLLM, none left out, replayed over real sockets.

What an agent may call goes through the whole service. What only the gateway asks of an engine is
asked by the gateway's own client. A recording that no list below has fails the first test.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
import pytest_asyncio

from agl_core.gateway.dialects.sse import ends_event
from agl_core.gateway.engines import EngineClient
from agl_core.gateway.upstream import PooledUpstreamClient
from agl_core.settings import GatewaySettings
from agl_core.testing.raw_http import Exchange, RawServer
from agl_core.testing.replay import CASE_HEADER, Recording, ReplayServer, chunks_of, load_recordings
from agl_core.testing.service import Answer, RunningService, running_service

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOLDER = Path(__file__).parents[2] / "data" / "vllm"
RECORDINGS = load_recordings(FOLDER)
WITHIN = 15.0
# More than one choice: vLLM moves the fingerprint from every finish chunk to the usage chunk that
# the gateway asks for, and only the last finish chunk can wait for it without delaying the others.
FINGERPRINT_MOVES = {"chat_n2_stream", "completion_batch_stream", "completion_n2_stream"}

LISTS = [name for name, case in RECORDINGS.items() if case.route == "GET /v1/models"]
HEALTHS = [name for name, case in RECORDINGS.items() if case.route == "GET /health"]
ENGINE = [name for name, case in RECORDINGS.items() if not case.is_of_the_model_api]
CALLS = [name for name, case in RECORDINGS.items() if case.is_of_the_model_api]
ENDED = [name for name in CALLS if RECORDINGS[name].end == "complete"]
ABORTED = [name for name in ENDED if RECORDINGS[name].is_aborted]
PASSED = [name for name in ENDED if name not in {*ABORTED, *LISTS}]
CUT = [name for name in CALLS if RECORDINGS[name].end == "eof_before_end"]
LEFT = [name for name in CALLS if RECORDINGS[name].end == "client_closed"]
# What a trainer asks of an engine; all else that was recorded only tells something.
CHANGES = [
    name for name, case in RECORDINGS.items() if name.startswith("admin_") and case.method == "POST"
]
UNANSWERED = [name for name in CALLS if RECORDINGS[name].end == "TimeoutError"]


async def test_no_recording_is_left_out() -> None:
    folders = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
    tested = [*LISTS, *ENGINE, *ABORTED, *PASSED, *CUT, *LEFT, *UNANSWERED]
    assert sorted(tested) == folders
    assert set(PASSED) >= FINGERPRINT_MOVES
    # An empty list would test nothing.
    assert all((LISTS, HEALTHS, ENGINE, ABORTED, PASSED, CUT, LEFT, UNANSWERED))
    assert {case.path for case in map(RECORDINGS.__getitem__, CHANGES)} >= {
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/update_weights",
    }


@attrs.define
class Stage:
    """One service and one replay server for all cases."""

    service: RunningService
    server: ReplayServer
    count: int = 0

    async def rollout(self) -> str:
        self.count += 1
        return await self.service.rollout(f"r{self.count}")

    async def play(self, case: Recording, path: str, *, as_agent: bool = False) -> Answer:
        """Replay a case's request: as whoever trains, or with the rollout's token."""
        rollout_id = await self.rollout()
        headers = {CASE_HEADER: case.name}
        if case.content_type is not None:
            headers["content-type"] = case.content_type
        if as_agent:
            minted = await self.service.api("POST", f"/rollouts/{rollout_id}/token")
            headers["x-api-key"] = minted["token"]
        return await self.service.call(
            rollout_id, case.request, path, method=case.method, headers=headers
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Stage]:
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
        yield Stage(service, server)


def model_of(case: Recording) -> str | None:
    try:
        fields = json.loads(case.request)
    except ValueError:
        return None
    model = fields.get("model") if isinstance(fields, dict) else None
    return model if isinstance(model, str) else None


def as_recorded(case: Recording, answer: Answer) -> None:
    assert (answer.status, answer.is_clean) == (case.status, True)
    assert answer.headers.get("content-type") == dict(case.headers).get("content-type")
    if case.name in FINGERPRINT_MOVES:
        assert answer.body != case.body
        assert without_fingerprint(answer.body) == without_fingerprint(case.body)
    else:
        assert answer.body == case.body


def without_fingerprint(body: bytes) -> bytes:
    return re.sub(rb',"system_fingerprint":"[^"]*"', b"", body)


# --- what an agent may call


@pytest.mark.parametrize("name", PASSED)
async def test_agents_answer_is_the_recorded_one_byte_for_byte(stage: Stage, name: str) -> None:
    case = RECORDINGS[name]
    as_recorded(case, await stage.play(case, case.path.removeprefix("/v1/")))
    assert stage.server.requests[-1].target == case.path


@pytest.mark.parametrize("name", ENGINE)
async def test_engines_own_route_is_out_of_an_agents_reach(stage: Stage, name: str) -> None:
    case = RECORDINGS[name]
    before = len(stage.server.requests)
    # Below ``v1`` it is another path, which vLLM does not have; a server that has it is passed on.
    as_recorded(case, await stage.play(case, case.path.removeprefix("/")))
    attempt = stage.service.base(await stage.rollout())
    for url in (
        f"{stage.service.url}{case.path}",
        f"{attempt.removesuffix('/v1')}{case.path}",
        f"{attempt}/%2e%2e{case.path}",
        f"{attempt}/../v1{case.path}",
    ):
        headers = {CASE_HEADER: name}
        await stage.service.call("", case.request, url=url, method=case.method, headers=headers)
    seen = {request.target for request in stage.server.requests[before:]}
    assert seen == {f"/v1{case.path}"}


@pytest.mark.parametrize("name", CHANGES)
async def test_what_changes_the_engine_is_refused_to_an_agent(stage: Stage, name: str) -> None:
    case, before = RECORDINGS[name], len(stage.server.requests)
    answer = await stage.play(case, case.path.removeprefix("/").removeprefix("v1/"), as_agent=True)
    assert (answer.status, answer.code) == (403, "forbidden")
    assert len(stage.server.requests) == before


@pytest.mark.parametrize("name", sorted({*PASSED, *ENGINE} - {*CHANGES}))
async def test_what_changes_nothing_is_passed_on_for_an_agent(stage: Stage, name: str) -> None:
    case = RECORDINGS[name]
    below = case.path.removeprefix("/").removeprefix("v1/")
    as_recorded(case, await stage.play(case, below, as_agent=True))
    assert stage.server.requests[-1].target == f"/v1/{below}"


@pytest.mark.parametrize("name", LISTS)
async def test_agents_list_of_models_is_the_gateways_own(stage: Stage, name: str) -> None:
    before = len(stage.server.requests)
    answer = await stage.play(RECORDINGS[name], "models")
    assert len(stage.server.requests) == before
    registered = (await stage.service.api("GET", "/models"))["items"]
    assert {card["id"] for card in answer.json()["data"]} == {item["model"] for item in registered}


@pytest.mark.parametrize("name", ABORTED)
async def test_answer_that_the_engine_dropped_is_never_an_answer(stage: Stage, name: str) -> None:
    answer = await stage.play(RECORDINGS[name], "chat/completions")
    assert b'"abort"' not in answer.body
    assert (answer.status, answer.is_clean) in {(200, False), (503, True)}


@pytest.mark.parametrize("name", CUT)
async def test_answer_that_was_cut_is_cut_for_the_agent(stage: Stage, name: str) -> None:
    case = RECORDINGS[name]
    answer = await stage.play(case, "chat/completions")
    assert (answer.status, answer.is_clean) == (case.status, False)
    assert answer.body.startswith(case.body)
    assert chunks_of(answer.body)[-1]["error"]["code"] == "upstream_truncated"


@pytest.mark.parametrize("name", LEFT)
async def test_all_that_came_before_the_client_left_has_come(stage: Stage, name: str) -> None:
    case, received = RECORDINGS[name], b""
    rollout_id = await stage.rollout()
    async with asyncio.timeout(WITHIN):
        async with stage.service.client.stream(
            case.method,
            f"{stage.service.base(rollout_id)}/chat/completions",
            content=case.request,
            headers={CASE_HEADER: name},
        ) as answer:
            async for part in answer.aiter_raw():
                received += part
                if len(received) >= len(case.body):
                    break
        events = await stage.service.until_events(rollout_id)
    assert received == case.body
    assert ends_event(received)
    assert [event["status"] for event in events] == ["client_gone"]


@pytest.mark.parametrize("name", UNANSWERED)
async def test_request_without_an_answer_ends_with_its_client(stage: Stage, name: str) -> None:
    case, before = RECORDINGS[name], len(stage.server.requests)
    async with asyncio.timeout(WITHIN):
        call = asyncio.create_task(stage.play(case, "chat/completions"))
        while len(stage.server.requests) == before:
            await stage.service.state("p")
        call.cancel()
        events = await stage.service.until_events(f"r{stage.count}")
        await stage.service.until_state("p", inflight=0)
    assert [event["status"] for event in events] == ["client_gone"]


# --- what the gateway asks of an engine


@pytest.mark.parametrize("name", ENGINE)
async def test_engine_is_asked_by_the_gateways_own_client(name: str) -> None:
    case = RECORDINGS[name]
    assert case.method in {"GET", "POST"}
    method: Literal["GET", "POST"] = "GET" if case.method == "GET" else "POST"
    async with (
        ReplayServer(RECORDINGS, {case.route: name}) as server,
        PooledUpstreamClient() as client,
    ):
        engines = EngineClient(GatewaySettings(), client)
        for _ in range(2):
            assert await engines.ask(method, server.url, case.path, None) == case.status
        assert server.asked(case.route) == 2
        # The answer was read to its end: its connection served the second one too.
        assert server.open_connections == 1


async def test_pause_and_resume_are_told_to_the_engine_in_the_recorded_words() -> None:
    routes = {RECORDINGS[name].route: name for name in ("admin_pause_keep", "admin_resume")}
    async with (
        asyncio.timeout(WITHIN),
        ReplayServer(RECORDINGS, routes) as server,
        running_service() as service,
    ):
        await service.register(server.endpoint, "tiny-qwen", policy="p")
        await service.rollout("r")
        await service.api("POST", "/gateway/pause", {"mode": "keep"})
        assert [server.asked(route) for route in routes] == [1, 0]
        name = "chat_token_ids"
        held = asyncio.create_task(
            service.call("r", RECORDINGS[name].request, headers={CASE_HEADER: name})
        )
        await service.until_state("p", held=1)
        await service.api("POST", "/gateway/resume")
        assert [server.asked(route) for route in routes] == [1, 1]
        assert (await held).body == RECORDINGS[name].body


@pytest.mark.parametrize("healthy", [*HEALTHS, *LISTS])
async def test_server_that_failed_is_back_by_its_recorded_health(healthy: str) -> None:
    """A server that has no ``/health`` is asked for its list of models instead."""
    route = RECORDINGS[healthy].route
    settings = {
        "retries": 0,
        "failures_to_unhealthy": 1,
        "unhealthy_seconds": 3600.0,
        "health_seconds": 0.02,
    }
    failing, well = RECORDINGS["kill_engine_stream_next"], RECORDINGS["chat_token_ids"]
    async with (
        asyncio.timeout(WITHIN),
        ReplayServer(RECORDINGS, {"GET /health": failing.name}) as server,
        running_service({"gateway": settings}) as service,
    ):
        await service.register(server.endpoint, "tiny-qwen", policy="p")
        await service.rollout("r")
        failed = await service.call("r", failing.request, headers={CASE_HEADER: failing.name})
        assert failed.status == 500
        while server.asked("GET /health") < 2:
            await service.state("p")
        assert not await is_healthy(service)
        server.routes |= {"GET /health": "error_not_found", route: healthy}
        while not await is_healthy(service):
            pass
        assert server.asked(route) >= 1
        answer = await service.call("r", well.request, headers={CASE_HEADER: well.name})
        assert answer.body == well.body


async def is_healthy(service: RunningService) -> bool:
    (item,) = (await service.api("GET", "/models"))["items"]
    return bool(item["healthy"])


@pytest.mark.parametrize("name", LISTS)
async def test_context_length_is_read_from_the_recorded_list_of_models(name: str) -> None:
    """The probe is answered by recordings as well, all three of its questions."""
    routes = {
        "POST /v1/chat/completions": "chat_token_ids_logprobs",
        "POST /v1/completions": "completion_token_ids_logprobs",
        "GET /v1/models": name,
    }
    async with (
        asyncio.timeout(WITHIN),
        ReplayServer(RECORDINGS, routes) as server,
        running_service({"gateway": {"probe": True}}) as service,
    ):
        await service.rollout("r")
        listed = json.loads(RECORDINGS[name].body)["data"]
        await service.register(server.endpoint, "tiny", served_model=listed[-1]["id"])
        card: dict[str, Any] = {}
        while card.get("max_model_len") is None:
            (card,) = (await service.call("r", b"", "models", method="GET")).json()["data"]
        assert card["max_model_len"] == listed[0]["max_model_len"] == 1024
        (item,) = (await service.api("GET", "/models"))["items"]
        assert item["healthy"]


@pytest.mark.parametrize("name", ["tokenize_chat", "tokenize_prompt"])
async def test_tokens_of_a_message_are_counted_by_the_recorded_tokenizer(name: str) -> None:
    async with (
        asyncio.timeout(WITHIN),
        ReplayServer(RECORDINGS, {"POST /tokenize": name}) as server,
        running_service() as service,
    ):
        await service.register(server.endpoint, "tiny-qwen")
        await service.rollout("r")
        request = RECORDINGS["messages_count_tokens"].request
        counted = await service.call("r", request, "messages/count_tokens")
        assert counted.json() == {"input_tokens": json.loads(RECORDINGS[name].body)["count"]}
        if name == "tokenize_chat":
            native = json.loads(RECORDINGS["messages_count_tokens"].body)
            assert counted.json()["input_tokens"] == native["input_tokens"]
        sent = server.requests[-1].json()
        assert sent["messages"] == json.loads(RECORDINGS["tokenize_chat"].request)["messages"]


AUTH = [name for name in PASSED if name.startswith("auth_")]


class KeyedServer(RawServer):
    """Answers a chat as vLLM with a key did, by the key that came."""

    def __init__(self) -> None:
        super().__init__(self._answer)

    async def _answer(self, exchange: Exchange) -> None:
        key = exchange.request.header("authorization")
        by_key = {RECORDINGS[name].authorization: name for name in AUTH}
        case = RECORDINGS[by_key[key]]
        assert case.status is not None
        headers = [(k, v) for k, v in case.headers if k == "content-type"]
        exchange.whole(case.status, case.body, headers)


@pytest.mark.parametrize("name", AUTH)
async def test_server_gets_the_key_of_its_registration_and_never_the_agents(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = RECORDINGS[name]
    key = (case.authorization or "").removeprefix("Bearer ")
    monkeypatch.setenv("RECORDED_KEY", key or "none")
    settings = {"credentials": {"recorded": {"env": "RECORDED_KEY"}}}
    async with KeyedServer() as server, running_service({"gateway": settings}) as service:
        credential = {"credential": "recorded"} if key else {}
        await service.register(server.endpoint, "tiny-qwen", **credential)
        await service.rollout("r")
        token = (await service.api("POST", "/rollouts/r/token"))["token"]
        agents = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        as_recorded(case, await service.call("r", case.request, headers=agents))
        assert server.requests[-1].header("authorization") == case.authorization
