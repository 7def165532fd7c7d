"""Waiting for rollouts and following them, whatever happens to the service meanwhile."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from agl_core.client import WaitTimeout
from agl_core.errors import ApiError, Invalid, NotFound


class Feed:
    """The list of rollouts of a service. Each long-poll that finds nothing does the next deed."""

    def __init__(self, server: Any, answer: Any) -> None:
        self.server = server
        self.answer = answer
        self.epoch = 0
        self.position = 0
        self.rows: dict[str, tuple[int, dict[str, Any]]] = {}
        self.deeds: list[Callable[[], None]] = []
        self.waits: list[float] = []
        self.lock = threading.RLock()
        server.script = self.script

    def put(self, rollout_id: str, status: str = "running", **fields: Any) -> None:
        with self.lock:
            self.position += 1
            row = {"rollout_id": rollout_id, "status": status, "version": self.position, **fields}
            self.rows[rollout_id] = (self.position, row)

    def delete(self, rollout_id: str) -> None:
        self.put(rollout_id, deleted=True)

    def forget(self) -> None:
        """Another life of the store, in which the same rollouts exist."""
        with self.lock:
            self.epoch += 1

    def script(self, seen: Any) -> Any:
        query = dict(seen.query)
        wait = float(query.get("wait", 0))
        with self.lock:
            found = self.page(query)
            if found.status == 200 and not found.json["items"] and wait:
                self.waits.append(wait)
                if self.deeds:
                    self.deeds.pop(0)()
                    found = self.page(query)
            return found

    def page(self, query: dict[str, str]) -> Any:
        epoch, _, after = query.get("changed_after", f"{self.epoch}:0").partition(":")
        if int(epoch) != self.epoch:
            return self.answer(status=410, json={"code": "cursor_expired", "detail": "expired"})
        wanted = query["ids"].split(",") if "ids" in query else None
        found = sorted(
            (position, row)
            for position, row in self.rows.values()
            if position > int(after)
            and (wanted is None or row["rollout_id"] in wanted)
            and ("group_id" not in query or row.get("group", {}).get("id") == query["group_id"])
            and ("changed_after" in query or not row.get("deleted"))
        )[: int(query.get("limit", 100))]
        place = found[-1][0] if found else int(after)
        return self.answer(
            json={"items": [row for _, row in found], "cursor": f"{self.epoch}:{place}"}
        )


@pytest.fixture
def feed(server, answer) -> Feed:
    return Feed(server, answer)


def test_wait_returns_when_all_have_ended_in_the_order_asked_for(shell, feed) -> None:
    for rollout_id in ("r1", "r2", "r3"):
        feed.put(rollout_id)
    feed.deeds = [
        lambda: feed.put("r3", "failed"),
        lambda: feed.put("r1", "succeeded"),
        lambda: feed.put("r2", "cancelled"),
    ]
    found = shell.call("wait", ["r2", "r1", "r3", "r1"])
    assert [(r.rollout_id, r.status) for r in found] == [
        ("r2", "cancelled"),
        ("r1", "succeeded"),
        ("r3", "failed"),
    ]
    assert feed.waits == [30.0, 30.0, 30.0]


def test_one_id_may_stand_alone(shell, feed) -> None:
    feed.put("r1", "succeeded")
    assert [r.rollout_id for r in shell.call("wait", "r1")] == ["r1"]


def test_a_group_comes_in_the_order_of_its_indexes(shell, feed) -> None:
    for index in (2, 0, 1):
        group = {"id": "g", "size": 3, "index": index}
        feed.put(f"g-{index}", "succeeded", group=group)
    feed.put("other")
    found = shell.call("wait", group_id="g")
    assert [r.rollout_id for r in found] == ["g-0", "g-1", "g-2"]


def test_complete_waits_for_a_pending_grade_and_terminal_does_not(shell, feed) -> None:
    feed.put("r1", "succeeded", grade="pending")
    assert shell.call("wait", "r1", until="terminal")[0].grade == "pending"
    feed.deeds = [lambda: feed.put("r1", "succeeded", grade="done")]
    assert shell.call("wait", "r1")[0].grade == "done"


def test_a_timeout_names_what_is_missing(shell, feed) -> None:
    feed.put("r1", "succeeded")
    feed.put("r2")
    with pytest.raises(WaitTimeout, match="r2") as caught:
        shell.call("wait", ["r1", "r2"], timeout=0.05)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.missing == ["r2"]
    assert caught.value.rollouts["r1"].status == "succeeded"
    assert 0 < feed.waits[0] <= 0.05


def test_a_timeout_of_zero_looks_once(shell, feed, server) -> None:
    feed.put("r1", "succeeded")
    feed.put("r2")
    assert len(shell.call("wait", "r1", timeout=0)) == 1
    server.seen.clear()
    with pytest.raises(WaitTimeout):
        shell.call("wait", "r2", timeout=0)
    assert len(server.seen) == 1


def test_an_unknown_rollout_or_group_is_not_waited_for(shell, feed) -> None:
    feed.put("r1")
    with pytest.raises(NotFound, match="r9"):
        shell.call("wait", ["r1", "r9"])
    with pytest.raises(NotFound, match="group"):
        shell.call("wait", group_id="none")


def test_a_rollout_that_is_deleted_meanwhile_is_an_error(shell, feed) -> None:
    feed.put("r1")
    feed.deeds = [lambda: feed.delete("r1")]
    with pytest.raises(NotFound, match=r"r1.*deleted"):
        shell.call("wait", "r1")


def test_an_expired_cursor_lists_anew(shell, feed) -> None:
    feed.put("r1")
    feed.put("r2")
    feed.deeds = [
        lambda: feed.put("r1", "succeeded"),
        feed.forget,
        lambda: feed.put("r2", "succeeded"),
    ]
    assert [r.status for r in shell.call("wait", ["r1", "r2"])] == ["succeeded", "succeeded"]
    assert feed.deeds == []


def test_what_a_new_store_has_forgotten_is_not_found(shell, feed) -> None:
    feed.put("r1")

    def forget_all() -> None:
        feed.forget()
        feed.rows.clear()

    feed.deeds = [forget_all]
    with pytest.raises(NotFound, match="r1"):
        shell.call("wait", "r1")


class OnAway(logging.Handler):
    """Does something when the client has noticed that the service is away."""

    def __init__(self, deed: Callable[[], None]) -> None:
        super().__init__(logging.WARNING)
        self.deed = deed
        self.noticed = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.noticed += 1
        self.deed()


@pytest.fixture
def on_away(server) -> Any:
    def come_back() -> None:
        server.start()

    handler = OnAway(come_back)
    logging.getLogger("agl_core.client.feed").addHandler(handler)
    yield handler
    logging.getLogger("agl_core.client.feed").removeHandler(handler)


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_a_restart_of_the_service_is_waited_out(shell, feed, server, on_away, timeout) -> None:
    feed.put("r1")

    def restart() -> None:
        server.stop()
        feed.forget()
        feed.put("r1", "succeeded")

    feed.deeds = [restart]
    assert shell.call("wait", "r1", timeout=timeout)[0].status == "succeeded"
    assert on_away.noticed == 1


def test_a_service_that_stays_away_ends_in_the_timeout(make_shell, feed, server) -> None:
    feed.put("r1")
    feed.deeds = [server.stop]
    shell = make_shell()
    with pytest.raises(WaitTimeout) as caught:
        shell.call("wait", "r1", timeout=0.5)
    assert caught.value.missing == ["r1"]
    server.start()


def test_a_service_that_was_never_there_is_an_error_and_not_a_wait(make_shell, server) -> None:
    server.stop()
    with pytest.raises(ApiError) as caught:
        make_shell(retries=0).call("wait", "r1", timeout=60)
    assert caught.value.code == "unreachable"
    server.start()


def test_a_refusal_ends_the_wait(shell, server, answer) -> None:
    server.script = lambda _: answer(status=403, json={"code": "forbidden", "detail": "no"})
    with pytest.raises(ApiError, match="no"):
        shell.call("wait", "r1")


def test_more_ids_than_a_query_holds_are_waited_for_in_portions(shell, feed, server) -> None:
    ids = [f"rollout-with-a-long-name-{i:05}" for i in range(600)]
    for rollout_id in ids:
        feed.put(rollout_id, "succeeded")
    assert [r.rollout_id for r in shell.call("wait", ids)] == ids
    assert len(server.seen) > 2
    assert max(len(str(seen.query)) for seen in server.seen) < 8_000


def test_a_service_that_answers_waits_at_once_is_not_asked_in_a_loop(shell, feed, server) -> None:
    feed.put("r1")
    with pytest.raises(WaitTimeout):
        shell.call("wait", "r1", timeout=0.6)
    assert len(server.seen) < 12


def test_wait_takes_one_selection(shell, server) -> None:
    for arguments in ({}, {"ids": ["a"], "group_id": "g"}):
        with pytest.raises(Invalid, match="either ids or group_id"):
            shell.call("wait", **arguments)
    with pytest.raises(Invalid, match="until"):
        shell.call("wait", "r1", until="ended")
    assert server.seen == []


def watched(shell: Any, count: int, **options: Any) -> list[Any]:
    if shell.kind == "blocking":
        stream = shell.client.watch(**options)
        found = [*itertools.islice(stream, count)]
        stream.close()
        return found

    async def run() -> list[Any]:
        found: list[Any] = []
        stream = shell.client.watch(**options)
        async for item in stream:
            found.append(item)
            if len(found) == count:
                break
        await stream.aclose()
        return found

    return shell._runner.run(run())


def test_watch_shows_what_exists_then_changes_and_deletions(shell, feed) -> None:
    feed.put("r1")
    feed.deeds = [
        lambda: feed.put("r2"),
        lambda: feed.put("r1", "succeeded"),
        feed.forget,
        lambda: feed.delete("r2"),
    ]
    seen = [(item.rollout_id, getattr(item, "status", "deleted")) for item in watched(shell, 6)]
    assert seen == [
        ("r1", "running"),
        ("r2", "running"),
        ("r1", "succeeded"),
        ("r2", "running"),
        ("r1", "succeeded"),
        ("r2", "deleted"),
    ]


def test_watch_goes_on_from_a_cursor(shell, feed) -> None:
    feed.put("r1")
    cursor = shell.call("rollouts").cursor
    feed.put("r2")
    assert [item.rollout_id for item in watched(shell, 1, changed_after=cursor)] == ["r2"]


def test_listing_anew_reads_every_page_before_it_misses_anybody(shell, feed, server) -> None:
    ids = [f"r{i}" for i in range(600)]
    for rollout_id in ids:
        feed.put(rollout_id)

    def forget_and_finish() -> None:
        feed.forget()
        for rollout_id in ids:
            feed.put(rollout_id, "succeeded")

    feed.deeds = [forget_and_finish]
    assert {r.status for r in shell.call("wait", ids)} == {"succeeded"}
    assert not any(
        "wait" in dict(s.query) for s in server.seen if "changed_after" not in dict(s.query)
    )
