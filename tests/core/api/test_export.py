from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest

from agl_core.records import EventDraft

PATH = "/api/export/lines"


async def lines(service: Any, method: str = "GET", **options: Any) -> list[Any]:
    answer = await service.ask(method, PATH, **options)
    assert answer.status_code == 200, answer.text
    assert answer.headers["Content-Type"] == "application/x-ndjson"
    head, *rows, tail = [json.loads(line) for line in answer.text.splitlines()]
    assert (head, tail) == ("head", "tail")
    return rows


def ids(rows: list[Any]) -> list[str]:
    return [row["rollout_id"] for row in rows]


async def fill(service: Any) -> None:
    await service.ask("POST", "/api/rollouts", json={"n": 2, "group_id": "g"})
    for fields in (
        {"rollout_id": "val", "mode": "val"},
        {"rollout_id": "left", "metadata": {"leave_out": True}},
        {"rollout_id": "live"},
    ):
        await service.enqueue(**fields)
    for rollout_id in ("g-0", "g-1", "val", "left"):
        await service.patch(
            rollout_id, status="succeeded", attempts=[{"attempt_id": "1", "phase": "succeeded"}]
        )


async def test_export_has_all_terminal_training_rollouts(service: Any) -> None:
    await fill(service)
    assert ids(await lines(service)) == ["g-0", "g-1"]
    assert ids(await lines(service, params={"mode": "all"})) == ["g-0", "g-1", "val"]
    assert ids(await lines(service, params={"mode": "val"})) == ["val"]
    assert ids(await lines(service, params={"group_id": "h"})) == []


async def test_export_of_named_rollouts_keeps_their_order_and_the_mode(service: Any) -> None:
    await fill(service)
    params = {"ids": "live,g-1,val,g-1"}
    assert ids(await lines(service, params=params)) == ["live", "g-1"]
    body = {"ids": ["val", "g-1"], "mode": "all"}
    assert ids(await lines(service, "POST", json=body)) == ["val", "g-1"]


async def test_export_of_an_unknown_rollout_is_404_naming_it(service: Any) -> None:
    await fill(service)
    answer = await service.ask("GET", PATH, params={"ids": "g-0,none-such"})
    assert answer.status_code == 404
    assert "none-such" in answer.json()["detail"]


async def test_export_reads_the_attempt_that_counts_after_the_barrier(service: Any) -> None:
    await service.enqueue(rollout_id="a")
    for attempt in ("1", "2"):
        path = f"/rollout/a/attempt/{attempt}/events"
        await service.ask("POST", path, json={"event_type": "note"})
    await service.patch("a", status="succeeded", succeeded_attempt_id="1")

    async def accepted_late(rollout_id: str) -> None:
        await service.store.append_events(
            rollout_id, "1", [EventDraft(event_type="model_request")], timestamp=1.0
        )

    service.gateway.on_barrier = accepted_late
    assert [row["seqs"] for row in await lines(service)] == [[1, 3]]


async def test_policy_and_other_parameters_reach_the_format(service: Any) -> None:
    await fill(service)
    for method, options in (
        ("GET", {"params": {"policy": "p", "shape": "3", "ids": "g-0"}}),
        ("POST", {"json": {"policy": "p", "shape": 3, "ids": ["g-0"]}}),
    ):
        (row,) = await lines(service, method, **options)
        assert (row["policy"], row["parameters"]) == ("p", {"shape": "3"})


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/api/export/none", 404, "formats of this service: lines"),
        (f"{PATH}?shap=3", 422, "did you mean 'shape'?"),
        (f"{PATH}?mode=test", 422, "'train', 'val', 'all'"),
        (f"{PATH}?shape=1&shape=2", 422, "twice"),
    ],
)
async def test_wrong_request_is_refused_before_the_first_byte(
    service: Any, path: str, status: int, says: str
) -> None:
    answer = await service.ask("GET", path)
    assert answer.status_code == status
    assert says in answer.json()["detail"] + str(answer.json().get("hint"))


async def test_post_of_something_else_than_an_object_is_422(service: Any) -> None:
    bodies: list[Any] = [[], {"ids": "a"}, {"shape": [1]}]
    for body in bodies:
        assert (await service.ask("POST", PATH, json=body)).status_code == 422


async def test_many_rollouts_are_streamed_and_each_comes_once(service: Any) -> None:
    await service.ask("POST", "/api/rollouts", json={"n": 2500, "group_id": "g"})
    cancelled = await service.ask("POST", "/api/rollouts/cancel", json={"group_id": "g"})
    assert len(cancelled.json()["items"]) == 2500
    async with service.client.stream("GET", PATH) as answer:
        assert "content-length" not in answer.headers
        assert answer.headers["X-Request-Id"]
        rows = [json.loads(line) async for line in answer.aiter_lines()]
    assert ids(rows[1:-1]) == [f"g-{index}" for index in range(2500)]


async def test_export_that_breaks_ends_unclean_and_never_looks_whole(service: Any) -> None:
    for rollout_id, metadata in (("a", {}), ("b", {"break": True}), ("c", {})):
        await ended(service, rollout_id, **metadata)
    with pytest.raises(httpx.RemoteProtocolError):
        await service.ask("GET", PATH)
    assert (await service.ask("GET", "/healthz")).status_code == 200


async def test_what_the_whole_export_is_refused_for_is_the_answer_while_that_is_short(
    service: Any,
) -> None:
    await ended(service, "a", refuse=True)
    answer = await service.ask("GET", PATH)
    assert (answer.status_code, answer.json()["detail"]) == (422, "not with 'a'")


async def test_a_long_export_that_is_refused_at_its_end_breaks_off_and_tells_why(
    service: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await ended(service, "a", refuse=True, padding_bytes=2**20)
    await ended(service, "b")
    body = bytearray()

    async def read() -> None:
        headers = {"X-Request-Id": "mine"}
        async with service.client.stream("GET", PATH, headers=headers) as answer:
            assert answer.status_code == 200
            async for piece in answer.aiter_bytes():
                body.extend(piece)

    with caplog.at_level(logging.ERROR), pytest.raises(httpx.RemoteProtocolError):
        await read()
    head, *rows, last = [json.loads(line) for line in body.splitlines()]
    assert (head, ids(rows)) == ("head", ["a", "b"])
    told = {"detail": "not with 'a'", "hint": "leave it out", "code": "invalid", "status": 422}
    assert last["error"].items() >= told.items()
    (record,) = [record for record in caplog.records if record.name == "agl_core.api.export"]
    assert "not with 'a'" in record.getMessage()
    assert (record.code, record.request_id) == ("invalid", "mine")  # type: ignore[attr-defined]


async def ended(service: Any, rollout_id: str, **metadata: Any) -> None:
    await service.enqueue(rollout_id=rollout_id, metadata=metadata)
    await service.patch(rollout_id, status="failed")
