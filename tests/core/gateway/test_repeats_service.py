"""An SDK's repeats through the whole service: one sample, one record, the same answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agl_core.testing.fake_vllm import FakeVllm, VllmAnswer, answer
from agl_core.testing.service import RunningService, chat

WITHIN = 10.0
FIRST = {"x-stainless-retry-count": "0"}
AGAIN = {"x-stainless-retry-count": "1"}


def joined(world: RunningService) -> float:
    rows = world.service.gateway.metrics()
    return sum(n for name, labels, n in rows if labels.get("kind") == "joined")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_c84_a_repeat_gets_the_answer_of_the_call_in_flight(
    world: RunningService, manual_vllm: FakeVllm, is_stream: bool
) -> None:
    body = chat(stream=is_stream)
    async with asyncio.timeout(WITHIN):
        first = asyncio.create_task(world.call("r", body, headers=FIRST))
        exchange = await manual_vllm.take()
        repeat = asyncio.create_task(world.call("r", body, headers=AGAIN))
        while not joined(world):
            await world.state()
        answer(exchange, VllmAnswer(exchange.request.json()))
        answers = [await first, await repeat]
    assert [got.status for got in answers] == [200, 200]
    assert answers[0].body == answers[1].body
    assert answers[0].call_id == answers[1].call_id
    assert len(manual_vllm.requests) == 1
    (recorded,) = await world.events("r")
    assert (recorded["status"], recorded["call_id"]) == ("ok", answers[0].call_id)


async def test_equal_calls_without_a_marker_are_two_samples(
    world: RunningService, manual_vllm: FakeVllm
) -> None:
    async with asyncio.timeout(WITHIN):
        calls = [asyncio.create_task(world.call("r")) for _ in range(2)]
        for _ in calls:
            exchange = await manual_vllm.take()
            answer(exchange, VllmAnswer(exchange.request.json()))
        answers = [await call for call in calls]
    assert len({got.call_id for got in answers}) == 2
    assert len(await world.events("r")) == 2


async def test_an_idempotency_key_gets_the_answer_that_was_given_before(
    world: RunningService, manual_vllm: FakeVllm
) -> None:
    headers: dict[str, Any] = {"idempotency-key": "k-1"}
    async with asyncio.timeout(WITHIN):
        first = asyncio.create_task(world.call("r", headers=headers))
        exchange = await manual_vllm.take()
        answer(exchange, VllmAnswer(exchange.request.json()))
        before = await first
        after = await world.call("r", headers=headers)
    assert (after.body, after.call_id) == (before.body, before.call_id)
    assert len(manual_vllm.requests) == 1
    assert len(await world.events("r")) == 1


async def test_a_repeat_of_a_call_that_failed_runs_anew(
    world: RunningService, manual_vllm: FakeVllm
) -> None:
    async with asyncio.timeout(WITHIN):
        first = asyncio.create_task(world.call("r", headers=FIRST))
        exchange = await manual_vllm.take()
        exchange.whole_json(400, {"error": {"message": "no", "code": 400}})
        assert (await first).status == 400
        repeat = asyncio.create_task(world.call("r", headers=AGAIN))
        exchange = await manual_vllm.take()
        answer(exchange, VllmAnswer(exchange.request.json()))
        assert (await repeat).status == 200
    assert [event["status"] for event in await world.events("r")] == ["upstream_error", "ok"]
