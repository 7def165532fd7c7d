from __future__ import annotations

import logging
from typing import Any

import pytest

from agl_core.records import EventDraft
from agl_core.settings import AuthSettings, Secret

PATH = "/rollout/a/attempt/1/events"


async def post(service: Any, body: Any, path: str = PATH, key: str | None = None) -> Any:
    return await service.ask("POST", path, json=body, key=key)


async def events(service: Any, rollout_id: str = "a", **params: Any) -> Any:
    params = {"rollout_id": rollout_id, **params}
    answer = await service.ask("GET", "/api/events", params=params, key="algorithm-key")
    assert answer.status_code == 200, answer.text
    return answer.json()


def reward(value: Any = 1.0, **more: Any) -> dict[str, Any]:
    return {"event_type": "reward", "data": {"value": value, **more}}


# --- posting -------------------------------------------------------------------------------------


async def test_one_event_answers_with_the_event_and_creates_the_attempt(service: Any) -> None:
    await service.enqueue(rollout_id="a")
    answer = await post(service, {"event_type": "note", "data": {"x": [1, None]}})
    event = answer.json()
    assert answer.status_code == 201
    assert (event["seq"], event["attempt_id"], event["data"]) == (1, "1", {"x": [1, None]})
    rollout = (await service.ask("GET", "/api/rollouts/a")).json()
    assert rollout["status"] == "running"
    assert [attempt["attempt_id"] for attempt in rollout["attempts"]] == ["1"]
    assert [published.seq for published in service.gateway.published] == [1]


async def test_list_of_events_is_taken_as_a_whole(service: Any) -> None:
    await service.enqueue(rollout_id="a")
    answer = await post(service, [{"event_type": "x"}, {"event_type": "y"}])
    assert [event["seq"] for event in answer.json()["items"]] == [1, 2]
    for bad in ({"event_tpye": "z"}, reward("high"), {"event_type": "model_request"}):
        assert (await post(service, [{"event_type": "z"}, bad])).status_code in (403, 422)
    assert (await post(service, [])).status_code == 422
    assert len((await events(service))["items"]) == 2


async def test_reward_is_stored_whole_with_the_source_of_its_poster(keyed: Any) -> None:
    await keyed.enqueue(rollout_id="a")
    sent = reward(1, metrics={"steps": 3}, message="ok", policy="p", source="algorithm")
    for key in (keyed.token("a"), "controller-key", "algorithm-key"):
        assert (await post(keyed, sent, key=key)).status_code == 201
    found = [event["data"] for event in (await events(keyed))["items"]]
    assert [data["source"] for data in found] == ["agent", "controller", "algorithm"]
    assert {**found[0], "source": ""} == {
        "value": 1.0,
        "metrics": {"steps": 3.0},
        "message": "ok",
        "call_id": None,
        "policy": "p",
        "source": "",
    }


async def test_reward_may_be_null_and_stays_null(service: Any) -> None:
    await service.enqueue(rollout_id="a")
    assert (await post(service, reward(None))).json()["data"]["value"] is None


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({}, "'value' is missing"),
        ({"value": True}, "number"),
        ({"value": "1"}, "number"),
        ({"value": 1, "metrics": {"a": "b"}}, "metrics"),
        ({"value": 1, "mesage": "x"}, "did you mean 'message'?"),
        ([], "data"),
    ],
)
async def test_reward_of_another_shape_is_422(service: Any, data: Any, says: str) -> None:
    await service.enqueue(rollout_id="a")
    answer = await post(service, {"event_type": "reward", "data": data})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid")
    assert says in answer.json()["detail"]
    assert (await service.ask("GET", "/api/rollouts/a")).json()["attempts"] == []


async def test_c80_reward_for_an_unknown_call_is_422(service: Any) -> None:
    await service.enqueue(rollout_id="a")
    calls = [EventDraft(event_type="model_request", data={"call_id": f"c{n}"}) for n in range(1500)]
    await post(service, {"event_type": "note"})
    await service.store.append_events("a", "1", calls, timestamp=1.0)
    assert (await post(service, reward(0.5, call_id="c1499"))).status_code == 201
    answer = await post(service, [reward(0.5, call_id="c2"), reward(1, call_id="nope")])
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid")
    assert answer.json()["details"] == {"index": 1, "call_id": "nope"}
    # A call of another attempt is not this attempt's.
    answer = await post(service, reward(1, call_id="c2"), "/rollout/a/attempt/2/events")
    assert answer.status_code == 422
    assert len((await events(service, type="reward", attempt_id="1"))["items"]) == 1


async def test_reward_for_a_call_waits_until_the_call_is_stored(service: Any) -> None:
    await service.enqueue(rollout_id="a")
    await post(service, {"event_type": "note"})

    async def accepted_late(rollout_id: str) -> None:
        draft = EventDraft(event_type="model_request", data={"call_id": "c1"})
        await service.store.append_events(rollout_id, "1", [draft], timestamp=1.0)

    service.gateway.on_barrier = accepted_late
    assert (await post(service, reward(1, call_id="c1"))).status_code == 201


async def test_nobody_posts_a_model_request(service: Any) -> None:
    await service.enqueue(rollout_id="a")
    answer = await post(service, {"event_type": "model_request", "data": {}})
    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")


async def test_c45_late_event_of_an_ended_attempt_is_409_and_changes_nothing(keyed: Any) -> None:
    await keyed.enqueue(rollout_id="a")
    await keyed.patch("a", attempts=[{"attempt_id": "1", "phase": "failed"}, {"attempt_id": "2"}])
    before = await keyed.store.get_rollout("a")
    token = keyed.token("a")
    answer = await post(keyed, {"event_type": "note"}, key=token)
    assert (answer.status_code, answer.json()["code"]) == (409, "stale_attempt")
    assert await keyed.store.get_rollout("a") == before
    assert (await events(keyed, all_attempts="true"))["items"] == []
    answer = await post(keyed, {"event_type": "note"}, "/rollout/a/attempt/2/events", key=token)
    assert answer.status_code == 201


async def test_graders_may_post_after_the_end_and_agents_may_not(keyed: Any) -> None:
    await keyed.enqueue(rollout_id="a")
    await keyed.patch("a", status="succeeded", attempts=[{"attempt_id": "1", "phase": "succeeded"}])
    token = keyed.token("a")
    answer = await post(keyed, reward(), key=token)
    assert (answer.status_code, answer.json()["code"]) == (409, "stale_attempt")
    answer = await post(keyed, reward(), "/rollout/a/attempt/9/events", key=token)
    assert (answer.status_code, answer.json()["code"]) == (409, "rollout_ended")
    for key in ("controller-key", "algorithm-key"):
        assert (await post(keyed, reward(), key=key)).status_code == 201
    answer = await post(keyed, reward(), "/rollout/a/attempt/9/events", key="algorithm-key")
    assert (answer.status_code, answer.json()["code"]) == (409, "rollout_ended")


async def test_c92_agent_may_not_grade_itself_nor_touch_another_rollout(
    start: Any, keys: AuthSettings, caplog: pytest.LogCaptureFixture
) -> None:
    barred = AuthSettings(
        algorithm_key=keys.algorithm_key,
        controller_key=Secret("controller-key"),
        agent_rewards=False,
    )
    service = await start(auth=barred)
    await service.enqueue(rollout_id="a")
    await service.enqueue(rollout_id="b")
    token = service.token("a")
    with caplog.at_level(logging.WARNING, "agl_core.api.errors"):
        answer = await post(service, reward(), key=token)
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
        answer = await service.ask("GET", "/rollout/b/attempt/1/input", key=token)
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
        answer = await service.ask("GET", "/api/events?rollout_id=a", key=token)
        assert answer.status_code == 403
    assert [record.code for record in caplog.records] == ["forbidden"] * 3  # type: ignore[attr-defined]
    assert token not in caplog.text
    assert (await post(service, {"event_type": "note"}, key=token)).status_code == 201
    assert (await post(service, reward(), key="controller-key")).status_code == 201


async def test_token_of_another_rollout_forged_or_expired_posts_nothing(keyed: Any) -> None:
    await keyed.enqueue(rollout_id="a")
    await keyed.enqueue(rollout_id="b")
    good = keyed.token("a")
    for token, status, code in (
        (keyed.token("b"), 403, "forbidden"),
        (good[:-2] + ("AA" if good[-2:] != "AA" else "BB"), 401, "bad_token"),
        (keyed.token("a", seconds=-120), 401, "bad_token"),
        (None, 401, "bad_token"),
    ):
        answer = await post(keyed, {"event_type": "note"}, key=token)
        assert (answer.status_code, answer.json()["code"]) == (status, code)
        if status == 401:
            assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert (await events(keyed, all_attempts="true"))["items"] == []


async def test_event_url_works_for_ids_with_slashes(keyed: Any) -> None:
    await keyed.enqueue(rollout_id="a/b")
    path = "/rollout/a%2Fb/attempt/x%2Fy/events"
    answer = await post(keyed, {"event_type": "note"}, path, key=keyed.token("a/b"))
    assert (answer.json()["rollout_id"], answer.json()["attempt_id"]) == ("a/b", "x/y")


# --- reading -------------------------------------------------------------------------------------


async def test_without_an_attempt_the_one_that_counts_is_read(service: Any) -> None:
    await service.enqueue(rollout_id="a")
    assert (await events(service))["items"] == []
    for attempt in ("1", "2"):
        await post(service, {"event_type": "note"}, f"/rollout/a/attempt/{attempt}/events")

    async def attempts(**params: Any) -> list[str]:
        return [event["attempt_id"] for event in (await events(service, **params))["items"]]

    assert await attempts() == ["2"]
    assert await attempts(attempt_id="1") == ["1"]
    assert await attempts(all_attempts="true") == ["1", "2"]
    await service.patch("a", status="succeeded", succeeded_attempt_id="1")
    assert await attempts() == ["1"]


async def test_events_are_paged_and_filtered_by_type(service: Any) -> None:
    await service.enqueue(rollout_id="a")
    await post(service, [{"event_type": "xy"[n % 2]} for n in range(10)])
    first = await events(service, limit=4, type="x")
    second = await events(service, limit=4, type="x", after=first["cursor"])
    third = await events(service, limit=4, type="x", after=second["cursor"])
    seqs = [[event["seq"] for event in page["items"]] for page in (first, second, third)]
    assert seqs == [[1, 3, 5, 7], [9], []]


async def test_reading_events_waits_for_what_was_accepted(service: Any) -> None:
    await service.enqueue(rollout_id="a")
    await post(service, {"event_type": "note"})

    async def accepted_late(rollout_id: str) -> None:
        await service.store.append_events(
            rollout_id, "1", [EventDraft(event_type="model_request")], timestamp=1.0
        )

    service.gateway.on_barrier = accepted_late
    found = (await events(service))["items"]
    assert [event["event_type"] for event in found] == ["note", "model_request"]


@pytest.mark.parametrize(
    ("query", "status", "says"),
    [
        ("", 422, "'rollout_id' is missing"),
        ("rollout_id=a&limit=10001", 422, "limit"),
        ("rollout_id=a&all_attempts=yes", 422, "true or false"),
        ("rollout_id=a&all_attempts=true&attempt_id=1", 422, "exclude"),
        ("rollout_id=a&atempt_id=1", 422, "did you mean 'attempt_id'?"),
        ("rollout_id=a&attempt_id=9", 404, "no attempt '9'"),
    ],
)
async def test_bad_event_query_says_what(service: Any, query: str, status: int, says: str) -> None:
    await service.enqueue(rollout_id="a")
    answer = await service.ask("GET", f"/api/events?{query}")
    assert answer.status_code == status
    assert says in answer.json()["detail"]


# --- input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, 0, "text", [1, 2], {"q": "日本"}])
async def test_input_is_served_as_it_was_enqueued(keyed: Any, value: Any) -> None:
    await keyed.enqueue(rollout_id="a", input=value)
    answer = await keyed.ask("GET", "/rollout/a/attempt/1/input", key=keyed.token("a"))
    assert answer.json() == value
    assert answer.headers["Content-Type"] == "application/json"


async def test_input_of_an_ended_rollout_is_not_for_its_agent(keyed: Any) -> None:
    await keyed.enqueue(rollout_id="a", input=1)
    await keyed.patch("a", status="failed")
    answer = await keyed.ask("GET", "/rollout/a/attempt/1/input", key=keyed.token("a"))
    assert (answer.status_code, answer.json()["code"]) == (409, "rollout_ended")
    answer = await keyed.ask("GET", "/rollout/a/attempt/1/input", key="controller-key")
    assert answer.json() == 1
