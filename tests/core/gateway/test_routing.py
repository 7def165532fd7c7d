"""Which server a request goes to, and what goes there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agl_core.hookspecs import hookimpl
from agl_core.testing.fake_vllm import FakeVllm, VllmAnswer, answer, answering, each, saying
from agl_core.testing.service import chat

WITHIN = 10.0
CAPTURE = {"return_token_ids", "logprobs", "top_logprobs", "stream_options"}


class Broken:
    """A resolver that fails, comes first, and names itself in the error."""

    @hookimpl
    def provide_route_resolver(self) -> Broken:
        return self

    async def resolve(self, request: Any, candidates: Any) -> Any:
        raise RuntimeError("no idea")

    def forget(self, rollout_id: str) -> None:
        return None


@pytest.mark.parametrize(
    "name", ["base", "trained-policy", "gpt-4o", "claude-opus-9", "claude-x", ...]
)
async def test_model_policy_alias_and_pattern_lead_to_the_same_server(
    open_service: Any, open_vllm: Any, name: Any
) -> None:
    server, judge = await open_vllm(), await open_vllm()
    service = await open_service()
    await service.register(
        server.endpoint,
        "base",
        policy="trained-policy",
        served_model="/models/base",
        aliases=["gpt-4o", "claude-*"],
    )
    await service.register(judge.endpoint, "judge", trained=False)
    await service.rollout("r")
    assert (await service.call("r", chat(model=name))).status == 200
    assert judge.requests == []
    (request,) = server.requests
    assert request.json()["model"] == "/models/base"
    (recorded,) = await service.events("r")
    assert recorded["policy"] == "trained-policy"
    assert recorded["model"] == (None if name is ... else name)
    assert recorded["adjusted"]["model"] == "/models/base"
    assert recorded["server"] == {"endpoint": server.endpoint, "model": "/models/base"}


async def test_longest_pattern_wins_and_an_exact_alias_over_any(
    open_service: Any, open_vllm: Any
) -> None:
    wide, narrow, exact = await open_vllm(), await open_vllm(), await open_vllm()
    service = await open_service()
    await service.register(wide.endpoint, "a", aliases=["claude-*"])
    await service.register(narrow.endpoint, "b", aliases=["claude-opus-*"])
    await service.register(exact.endpoint, "c", aliases=["claude-opus-4"])
    await service.rollout("r")
    for name in ("claude-haiku", "claude-opus-5", "claude-opus-4"):
        assert (await service.call("r", chat(model=name))).status == 200
    assert [len(server.requests) for server in (wide, narrow, exact)] == [1, 1, 1]
    assert [item["policy"] for item in await service.events("r")] == ["a", "b", "c"]


async def test_unknown_name_is_404_with_the_names_and_recorded(
    open_service: Any, open_vllm: Any
) -> None:
    server = await open_vllm()
    service = await open_service()
    await service.register(server.endpoint, "base", policy="p", aliases=["claude-*"])
    await service.rollout("r")
    called = await service.call("r", chat(model="gpt-5"))
    assert (called.status, called.code) == (404, "model_not_found")
    for name in ("gpt-5", "base", "p", "claude-*"):
        assert name in called.json()["error"]["message"]
    (recorded,) = await service.events("r")
    assert recorded["call_id"] == called.call_id
    assert (recorded["status"], recorded["http_status"]) == ("upstream_error", 404)
    assert recorded["error"]["code"] == "model_not_found"
    assert recorded["model"] == "gpt-5"
    assert server.requests == []


async def test_no_model_is_ambiguous_with_two_trained_policies(
    open_service: Any, open_vllm: Any
) -> None:
    server = await open_vllm()
    service = await open_service()
    await service.register(server.endpoint, "a")
    await service.register(server.endpoint, "b")
    await service.rollout("r")
    called = await service.call("r", chat(model=...))
    assert (called.status, called.code) == (404, "model_not_found")


async def test_no_model_means_the_only_policy_even_if_it_is_not_trained(
    open_service: Any, open_vllm: Any
) -> None:
    server = await open_vllm()
    service = await open_service()
    await service.register(server.endpoint, "judge", trained=False)
    await service.rollout("r")
    assert (await service.call("r", chat(model=...))).status == 200
    assert server.requests[0].json()["model"] == "judge"


async def test_request_waits_while_nothing_is_registered(open_service: Any, open_vllm: Any) -> None:
    server = await open_vllm()
    service = await open_service()
    await service.rollout("r")
    calls = [asyncio.create_task(service.call("r", chat(model=name))) for name in ("m", ...)]
    async with asyncio.timeout(WITHIN):
        while len((await service.api("GET", "/rollouts/r"))["attempts"]) < 1:
            pass
        assert not any(call.done() for call in calls)
        await service.register(server.endpoint)
        assert [(await call).status for call in calls] == [200, 200]


async def test_known_policy_without_a_server_is_waited_for(
    open_service: Any, open_vllm: Any
) -> None:
    server, judge, successor = await open_vllm(), await open_vllm(), await open_vllm()
    service = await open_service()
    await service.register(judge.endpoint, "judge", trained=False)
    await service.register(server.endpoint)
    await service.rollout("r")
    await service.api("DELETE", "/models?model=m")
    async with asyncio.timeout(WITHIN):
        calling = asyncio.create_task(service.call("r"))
        await service.until_state(held=1, inflight=0)
        assert (await service.call("r", chat(model="other"))).status == 404
        assert (await service.call("r", chat(model="judge"))).status == 200
        await service.register(successor.endpoint)
        assert (await calling).status == 200
    assert (len(server.requests), len(successor.requests)) == (0, 1)


async def test_any_name_is_waited_for_when_every_server_was_taken_away(
    open_service: Any, open_vllm: Any
) -> None:
    server = await open_vllm()
    service = await open_service()
    await service.register(server.endpoint)
    await service.api("PUT", "/models", {"items": []})
    await service.rollout("r")
    async with asyncio.timeout(WITHIN):
        calling = asyncio.create_task(service.call("r", chat(model="n")))
        while not (await service.api("GET", "/rollouts/r"))["attempts"]:
            pass
        assert not calling.done()
        await service.register(server.endpoint, "n")
        assert (await calling).status == 200


async def test_server_that_is_removed_while_a_call_is_tried_again_sends_it_back_to_wait(
    open_service: Any, manual_vllm: FakeVllm, open_vllm: Any
) -> None:
    successor = await open_vllm()
    service = await open_service()
    await service.register(manual_vllm.endpoint)
    await service.rollout("r")
    async with asyncio.timeout(WITHIN):
        calling = asyncio.create_task(service.call("r"))
        exchange = await manual_vllm.take()
        await service.api("DELETE", "/models?model=m")
        exchange.cut()
        await service.until_state(held=1)
        await service.register(successor.endpoint)
        assert (await calling).status == 200
    assert len(successor.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_helper_model_gets_the_agents_bytes_and_no_more(
    open_service: Any, open_vllm: Any, stream: bool
) -> None:
    server = await open_vllm()
    service = await open_service()
    await service.register(server.endpoint, "judge", trained=False, salt=False)
    await service.rollout("r")
    body = b'{"model": "judge",  "messages":[], "seed":1.0, "stream": %b}' % (
        b"true" if stream else b"false"
    )
    called = await service.call("r", body, headers={"content-type": "application/json"})
    assert called.status == 200
    (request,) = server.requests
    assert request.body == body
    assert not CAPTURE & set(request.json())
    (recorded,) = await service.events("r")
    assert (recorded["trained"], recorded["adjusted"]) == (False, {})
    assert recorded["choices"][0]["tokens"] == "absent"


async def test_servers_credential_goes_upstream_and_the_agents_key_never(
    open_service: Any, open_vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-judge")
    judge, model = await open_vllm(), await open_vllm()
    service = await open_service(credentials={"judge": {"env": "JUDGE_KEY"}})
    await service.register(judge.endpoint, "judge", trained=False, credential="judge")
    await service.register(model.endpoint)
    await service.rollout("r")
    minted = await service.api("POST", "/rollouts/r/token")
    for headers in (
        {"authorization": f"Bearer {minted['token']}"},
        {"x-api-key": minted["token"], "api-key": minted["token"]},
    ):
        assert (await service.call("r", chat(model="judge"), headers=headers)).status == 200
        assert (await service.call("r", headers=headers)).status == 200
    for request in judge.requests:
        assert request.header("authorization") == "Bearer sk-judge"
    for request in (*judge.requests, *model.requests):
        assert minted["token"] not in str(request.headers)
    assert all(request.header("authorization") is None for request in model.requests)


async def test_failing_resolver_fails_the_call_with_its_plugins_name(
    open_service: Any, open_vllm: Any
) -> None:
    server = await open_vllm()
    service = await open_service(plugins=(Broken(),), tables={"plugins": {"enabled": ["memory"]}})
    await service.register(server.endpoint)
    await service.rollout("r")
    called = await service.call("r")
    assert (called.status, called.code) == (502, "no_route")
    assert "'Broken'" in called.json()["error"]["message"]
    assert server.requests == []


async def test_path_query_method_and_headers_pass(open_service: Any, open_vllm: Any) -> None:
    server = await open_vllm(answering(200, {"data": []}, [("x-vllm", "1"), ("date", "never")]))
    service = await open_service()
    await service.register(server.endpoint)
    await service.rollout("r")
    called = await service.call(
        "r",
        b"",
        "files/a%2Fb?limit=3&x=%20",
        method="GET",
        headers={"x-mine": "yes", "accept-encoding": "br"},
    )
    (request,) = server.requests
    assert (request.method, request.target) == ("GET", "/v1/files/a%2Fb?limit=3&x=%20")
    assert request.header("x-mine") == "yes"
    assert request.header("accept-encoding") is None
    assert called.json() == {"data": []}
    assert called.headers["x-vllm"] == "1"
    assert called.headers["date"] != "never"
    (recorded,) = await service.events("r")
    assert (recorded["api"], recorded["method"]) == ("other", "GET")
    assert recorded["response"] == {"data": []}


async def test_head_requests_of_harnesses_are_answered_without_a_model_server(
    open_service: Any,
) -> None:
    service = await open_service()
    await service.rollout("r")
    async with asyncio.timeout(WITHIN):
        called = await service.call("r", b"", "messages", method="HEAD")
        knocks = [
            await service.client.head(f"{service.url}/rollout/r/attempt/a{rest}")
            for rest in ("", "/", "/api/hello")
        ]
    assert (called.status, called.body) == (200, b"")
    assert [knock.status_code for knock in knocks] == [200, 200, 200]


async def test_models_are_listed_with_their_aliases(open_service: Any, open_vllm: Any) -> None:
    server = await open_vllm()
    service = await open_service()
    await service.register(server.endpoint, "coder", aliases=["gpt-4.1", "claude-*"])
    await service.rollout("r")
    listed = await service.call("r", b"", "models", method="GET")
    assert [card["id"] for card in listed.json()["data"]] == ["coder", "gpt-4.1"]

    alone = await service.call("r", b"", "models/gpt-4.1", method="GET")
    assert (alone.json()["id"], alone.json()["root"]) == ("gpt-4.1", "coder")

    unknown = await service.call("r", b"", "models/gpt-5", method="GET")
    assert (unknown.status, unknown.code) == (404, "model_not_found")
    assert server.requests == []


async def test_c06_calls_in_flight_are_counted_whatever_is_registered_meanwhile(
    open_service: Any, manual_vllm: FakeVllm, open_vllm: Any
) -> None:
    other = await open_vllm()
    service = await open_service(
        tables={"plugins": {"enabled": ["memory", "vllm"], "vllm": {"balance": "least_inflight"}}}
    )

    async def inflight() -> dict[str, int]:
        items = (await service.api("GET", "/models"))["items"]
        return {item["endpoint"]: item["inflight"] for item in items}

    await service.register(manual_vllm.endpoint)
    await service.rollout("r")
    async with asyncio.timeout(WITHIN):
        long = [asyncio.create_task(service.call("r")) for _ in range(10)]
        exchanges = [await manual_vllm.take() for _ in range(10)]
        await service.register(other.endpoint)
        await service.register(manual_vllm.endpoint, version=1)
        kept = [
            {"model": "m", "endpoint": server.endpoint, "version": 2}
            for server in (other, manual_vllm)
        ]
        await service.api("PUT", "/models", {"items": kept[:1]})
        await service.api("PUT", "/models", {"items": kept})
        assert await inflight() == {manual_vllm.endpoint: 10, other.endpoint: 0}
        for _ in range(10):
            assert (await service.call("r")).status == 200
        assert (len(other.requests), len(manual_vllm.requests)) == (10, 10)
        for exchange in exchanges:
            answer(exchange, VllmAnswer(exchange.request.json()))
        await asyncio.gather(*long)
    assert await inflight() == {manual_vllm.endpoint: 0, other.endpoint: 0}


async def test_rollout_stays_with_its_server(open_service: Any, open_vllm: Any) -> None:
    servers = [await open_vllm(each(saying())) for _ in range(2)]
    service = await open_service()
    for server in servers:
        await service.register(server.endpoint)
    for rollout_id in ("r", "s"):
        await service.rollout(rollout_id)
        for _ in range(3):
            await service.call(rollout_id)
    assert [len(server.requests) for server in servers] == [3, 3]
