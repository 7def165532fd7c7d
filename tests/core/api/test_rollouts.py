from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest

from agl_core.clock import SystemClock
from agl_core.records import Event, EventDraft, Rollout, RolloutSpec
from agl_core.settings import ServerSettings
from agl_core.wire import cursor_text


async def get(service: Any, path: str, **params: Any) -> Any:
    answer = await service.ask("GET", path, params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids(page: Any) -> list[str]:
    return [item["rollout_id"] for item in page["items"]]


# --- reading -------------------------------------------------------------------------------------


async def test_rollout_is_read_by_id_also_with_slash_and_unicode(service: Any) -> None:
    for rollout_id, path in (("a", "a"), ("a/b c%", "a%2Fb%20c%25"), ("日本", "%E6%97%A5本")):
        await service.enqueue(rollout_id=rollout_id)
        assert (await get(service, f"/api/rollouts/{path}"))["rollout_id"] == rollout_id


async def test_unknown_rollout_is_404_on_every_path(service: Any) -> None:
    paths = [
        ("GET", "/api/rollouts/x", None),
        ("PATCH", "/api/rollouts/x", {"status": "running"}),
        ("DELETE", "/api/rollouts/x", None),
        ("POST", "/api/rollouts/x/cancel", None),
        ("POST", "/api/rollouts/x/token", None),
        ("GET", "/api/events?rollout_id=x", None),
        ("POST", "/rollout/x/attempt/1/events", {"event_type": "note"}),
        ("GET", "/rollout/x/attempt/1/input", None),
    ]
    for method, path, body in paths:
        answer = await service.ask(method, path, json=body)
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found"), path


async def test_list_filters(service: Any) -> None:
    await service.enqueue(rollout_id="a")
    await service.enqueue(rollout_id="b", mode="val")
    await service.ask("POST", "/api/rollouts", json={"n": 2, "group_id": "g"})
    await service.patch("b", status="running")
    path = "/api/rollouts"
    assert ids(await get(service, path)) == ["a", "g-0", "g-1", "b"]
    assert ids(await get(service, path, mode="val")) == ["b"]
    assert ids(await get(service, path, group_id="g")) == ["g-0", "g-1"]
    assert ids(await get(service, path, status="running,failed")) == ["b"]
    assert ids(await get(service, path, ids=["a,b", "g-0", "none"])) == ["a", "g-0", "b"]
    assert ids(await get(service, path, ids="")) == []


async def test_cursor_pages_to_the_end_and_shows_latest_states_once(service: Any) -> None:
    await service.ask("POST", "/api/rollouts", json={"n": 7, "group_id": "g"})
    seen: list[str] = []
    cursor = None
    while True:
        params = {"limit": 3} | ({"changed_after": cursor} if cursor else {})
        page = await get(service, "/api/rollouts", **params)
        if not page["items"]:
            break
        seen += ids(page)
        cursor = page["cursor"]
    assert seen == [f"g-{index}" for index in range(7)]
    await service.patch("g-3", status="running")
    await service.patch("g-3", grade="pending")
    page = await get(service, "/api/rollouts", changed_after=cursor)
    assert [(item["rollout_id"], item["version"]) for item in page["items"]] == [("g-3", 3)]


async def test_deletion_is_a_tombstone_after_a_cursor_only(service: Any) -> None:
    await service.enqueue(rollout_id="a")
    cursor = (await get(service, "/api/rollouts"))["cursor"]
    assert (await service.ask("DELETE", "/api/rollouts/a")).status_code == 204
    assert service.gateway.aborted == ["a"]
    page = await get(service, "/api/rollouts", changed_after=cursor)
    (tombstone,) = page["items"]
    assert tombstone == {
        "rollout_id": "a",
        "version": tombstone["version"],
        "deleted": True,
    }
    assert ids(await get(service, "/api/rollouts")) == []


async def test_cursor_of_another_store_is_410(service: Any) -> None:
    params = {"changed_after": cursor_text("another", 3), "wait": 60}
    answer = await service.ask("GET", "/api/rollouts", params=params)
    assert (answer.status_code, answer.json()["code"]) == (410, "cursor_expired")


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("grup_id=g", "did you mean 'group_id'?"),
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=abc", "whole number"),
        ("wait=60.5", "wait"),
        ("wait=nan", "finite"),
        ("wait=-1", "wait"),
        ("status=queued", "'queuing'"),
        ("mode=all", "'train'"),
        ("changed_after=!!", "cursor"),
        ("limit=1&limit=2", "twice"),
    ],
)
async def test_bad_query_is_422_and_says_what(service: Any, query: str, says: str) -> None:
    answer = await service.ask("GET", f"/api/rollouts?{query}")
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid")
    assert says in answer.json()["detail"]


# --- waiting -------------------------------------------------------------------------------------


async def until_waiting(service: Any, count: int) -> None:
    while service.services.feed.waiting < count:
        await SystemClock().sleep(0.002)


@pytest.mark.usefixtures("bounded")
async def test_long_poll_answers_when_something_changes(service: Any) -> None:
    await service.enqueue(rollout_id="a")
    cursor = (await get(service, "/api/rollouts"))["cursor"]
    polling = asyncio.create_task(
        get(service, "/api/rollouts", changed_after=cursor, wait=60, ids="a")
    )
    await until_waiting(service, 1)
    await service.patch("a", status="running")
    page = await polling
    assert [(item["rollout_id"], item["status"]) for item in page["items"]] == [("a", "running")]


async def test_long_poll_that_runs_out_repeats_the_cursor(service: Any) -> None:
    cursor = (await get(service, "/api/rollouts"))["cursor"]
    page = await get(service, "/api/rollouts", changed_after=cursor, wait=0.05)
    assert page == {"items": [], "cursor": cursor}


@pytest.mark.usefixtures("bounded")
async def test_long_poll_of_a_client_that_left_is_forgotten(service: Any) -> None:
    cursor = (await get(service, "/api/rollouts"))["cursor"]
    polling = asyncio.create_task(get(service, "/api/rollouts", changed_after=cursor, wait=60))
    await until_waiting(service, 1)
    polling.cancel()
    await asyncio.wait({polling})
    while service.services.feed.waiting:
        await SystemClock().sleep(0.002)


async def test_more_waiters_than_allowed_are_503_with_retry_after(start: Any) -> None:
    service = await start(server=ServerSettings(max_waiters=1))
    cursor = (await get(service, "/api/rollouts"))["cursor"]
    params = {"changed_after": cursor, "wait": 60}
    polling = asyncio.create_task(service.ask("GET", "/api/rollouts", params=params))
    await until_waiting(service, 1)
    refused = await service.ask("GET", "/api/rollouts", params=params)
    assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
    assert int(refused.headers["Retry-After"]) >= 1
    service.services.feed.close()
    assert (await polling).json() == {"items": [], "cursor": cursor}


async def poll_over_a_connection_of_its_own(port: int, cursor: str) -> Any:
    """A long-poll without a client library, so that a thousand of them cost little here."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    target = f"/api/rollouts?changed_after={cursor}&wait=60"
    writer.write(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    fields = dict(line.split(b": ") for line in head.lower().split(b"\r\n")[1:-2])
    body = await reader.readexactly(int(fields[b"content-length"]))
    writer.close()
    await writer.wait_closed()
    return json.loads(body)


async def test_thousand_long_polls_are_all_woken_and_the_loop_goes_on(service: Any) -> None:
    cursor = (await get(service, "/api/rollouts"))["cursor"]
    port = int(service.url.rpartition(":")[2])
    polls = [
        asyncio.create_task(poll_over_a_connection_of_its_own(port, cursor)) for _ in range(1000)
    ]
    async with asyncio.timeout(40):
        await until_waiting(service, 1000)
        await service.enqueue(rollout_id="a")
        longest = 0.0
        while not all(poll.done() for poll in polls):
            before = time.monotonic()
            await SystemClock().sleep(0)
            longest = max(longest, time.monotonic() - before)
        pages = await asyncio.gather(*polls)
    assert all(ids(page) == ["a"] for page in pages)
    assert longest < 2.0


# --- changing ------------------------------------------------------------------------------------


async def test_patch_reports_attempts_and_end_in_one(service: Any) -> None:
    await service.enqueue(rollout_id="a")
    answer = await service.patch(
        "a", status="succeeded", attempts=[{"attempt_id": "1", "phase": "succeeded"}]
    )
    rollout = answer.json()
    assert answer.status_code == 200
    assert (rollout["status"], rollout["succeeded_attempt_id"]) == ("succeeded", "1")
    assert rollout["started_at"] <= rollout["finished_at"]


async def test_patch_that_is_not_allowed_has_its_code(service: Any) -> None:
    await service.enqueue(rollout_id="a")
    answer = await service.patch("a", status="succeeded")
    assert (answer.status_code, answer.json()["code"]) == (409, "illegal_transition")
    answer = await service.patch("a", status="running", expected_version=9)
    assert (answer.status_code, answer.json()["code"]) == (409, "version_conflict")
    assert answer.json()["details"]["version"] == 1
    answer = await service.patch("a", stauts="running")
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid")
    answer = await service.patch("a", status="failed", error={"code": "agent"})
    assert answer.json()["error"] == {"code": "agent", "message": ""}
    answer = await service.patch("a", attempts=[{"attempt_id": "9"}])
    assert (answer.status_code, answer.json()["code"]) == (409, "rollout_ended")


async def test_concurrent_patches_are_none_lost(service: Any) -> None:
    await service.enqueue(rollout_id="a")
    answers = await asyncio.gather(
        *(service.patch("a", attempts=[{"attempt_id": str(number)}]) for number in range(20))
    )
    assert sorted(answer.json()["version"] for answer in answers) == list(range(2, 22))
    assert len((await get(service, "/api/rollouts/a"))["attempts"]) == 20


async def test_cancel_asks_and_aborts_calls_at_once(service: Any) -> None:
    await service.enqueue(rollout_id="a")
    await service.patch("a", attempts=[{"attempt_id": "1"}])
    answer = await service.ask("POST", "/api/rollouts/a/cancel")
    assert (answer.json()["status"], answer.json()["cancel_requested"]) == ("running", True)
    assert service.gateway.aborted == ["a"]
    assert (await service.ask("POST", "/api/rollouts/a/cancel")).status_code == 200
    await service.patch("a", status="cancelled")
    answer = await service.ask("POST", "/api/rollouts/a/cancel")
    assert (answer.status_code, answer.json()["code"]) == (409, "rollout_ended")


async def test_cancel_ends_a_rollout_without_attempts_directly(service: Any) -> None:
    await service.enqueue(rollout_id="a")
    answer = await service.ask("POST", "/api/rollouts/a/cancel")
    assert answer.json()["status"] == "cancelled"


async def test_bulk_cancel_says_what_it_refused(service: Any) -> None:
    for rollout_id in ("a", "b"):
        await service.enqueue(rollout_id=rollout_id)
    await service.patch("b", status="failed")
    path = "/api/rollouts/cancel"
    answer = (await service.ask("POST", path, json={"ids": ["a", "b", "c"]})).json()
    assert ids(answer) == ["a"]
    assert [(one["rollout_id"], one["code"]) for one in answer["refused"]] == [
        ("b", "rollout_ended"),
        ("c", "not_found"),
    ]
    await service.ask("POST", "/api/rollouts", json={"n": 3, "group_id": "g"})
    answer = (await service.ask("POST", path, json={"group_id": "g"})).json()
    assert sorted(ids(answer)) == ["g-0", "g-1", "g-2"]
    assert (await service.ask("POST", path, json={"group_id": "h"})).status_code == 404
    for body in ({}, {"ids": ["a"], "group_id": "g"}):
        assert (await service.ask("POST", path, json=body)).status_code == 422


async def test_token_is_minted_until_the_rollout_ends(service: Any) -> None:
    await service.enqueue(rollout_id="a")
    answer = await service.ask("POST", "/api/rollouts/a/token")
    token = answer.json()["token"]
    assert answer.json()["expires_at"] > service.services.clock.now()
    read = await service.ask("GET", "/rollout/a/attempt/1/input", key=token)
    assert read.status_code == 200
    await service.patch("a", status="failed")
    answer = await service.ask("POST", "/api/rollouts/a/token")
    assert (answer.status_code, answer.json()["code"]) == (409, "rollout_ended")


# --- what follows from an end --------------------------------------------------------------------


class Grader:
    """Rewards each rollout with the number of its events."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, int]] = []
        self.fails = False

    async def on_enqueue(self, spec: RolloutSpec) -> RolloutSpec:
        return spec

    async def on_finished(self, rollout: Rollout, events: Sequence[Event]) -> list[EventDraft]:
        self.seen.append((rollout.rollout_id, rollout.status, len(events)))
        if self.fails:
            raise RuntimeError("cannot grade")
        return [EventDraft(event_type="reward", data={"value": float(len(events))})]


async def test_end_is_graded_once_with_all_events_and_after_the_barrier(start: Any) -> None:
    first, second = Grader(), Grader()
    service = await start(hooks=[first, second])
    await service.enqueue(rollout_id="a")
    await service.ask("POST", "/rollout/a/attempt/1/events", json={"event_type": "note"})

    async def accepted_late(rollout_id: str) -> None:
        service.gateway.on_barrier = None
        await service.store.append_events(
            rollout_id, "1", [EventDraft(event_type="model_request")], timestamp=1.0
        )

    service.gateway.on_barrier = accepted_late
    await asyncio.gather(*(service.patch("a", status="succeeded") for _ in range(10)))
    await service.patch("a", grade="done")
    assert first.seen == [("a", "succeeded", 2)]
    assert second.seen == [("a", "succeeded", 3)]
    events = (await get(service, "/api/events", rollout_id="a", type="reward"))["items"]
    assert [event["data"] for event in events] == [
        {"value": 2.0, "source": "hook"},
        {"value": 3.0, "source": "hook"},
    ]
    assert [event.event_type for event in service.gateway.published[-2:]] == ["reward"] * 2


async def test_cancel_that_ends_a_rollout_is_an_end_too(start: Any) -> None:
    grader = Grader()
    service = await start(hooks=[grader])
    await service.enqueue(rollout_id="a")
    answers = await asyncio.gather(
        *(service.ask("POST", "/api/rollouts/a/cancel") for _ in range(5))
    )
    assert sorted(answer.status_code for answer in answers) == [200] + [409] * 4
    assert grader.seen == [("a", "cancelled", 0)]


async def test_failing_grader_is_counted_and_stops_nothing(start: Any) -> None:
    broken, good = Grader(), Grader()
    broken.fails = True
    service = await start(hooks=[broken, good])
    await service.enqueue(rollout_id="a")
    answer = await service.patch("a", status="failed", attempts=[{"attempt_id": "1"}])
    assert (answer.status_code, answer.json()["status"]) == (200, "failed")
    assert len(good.seen) == 1
    metrics = (await service.ask("GET", "/metrics")).text
    assert 'agl_hook_errors_total{hook="Grader"} 1' in metrics


@pytest.mark.usefixtures("bounded")
async def test_end_is_graded_though_its_client_has_gone(start: Any) -> None:
    grader = Grader()
    service = await start(hooks=[grader])
    await service.enqueue(rollout_id="a")
    reached, go = asyncio.Event(), asyncio.Event()

    async def hold(rollout_id: str) -> None:
        reached.set()
        await go.wait()

    service.gateway.on_barrier = hold
    patching = asyncio.create_task(
        service.patch("a", status="failed", attempts=[{"attempt_id": "1"}])
    )
    await reached.wait()
    patching.cancel()
    await asyncio.wait({patching})
    # One more request over another connection: by then the service has seen the first one go.
    assert (await get(service, "/api/rollouts/a"))["status"] == "failed"
    go.set()
    while not grader.seen:
        await SystemClock().sleep(0.002)
    assert grader.seen == [("a", "failed", 0)]
