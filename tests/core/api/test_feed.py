from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import attrs
import pytest

from agl_core.clock import SystemClock
from agl_core.errors import CursorExpired, Unavailable
from agl_core.feed import ChangeFeed
from agl_core.interfaces import RolloutQuery
from agl_core.records import Group, Rollout, RolloutPage
from agl_core.testing.clock import FakeClock
from agl_core.wire import cursor_text
from agl_memory.store import MemoryStore

pytestmark = pytest.mark.usefixtures("bounded")


class CountingStore(MemoryStore):
    """Counts how often it is asked for a list."""

    lists = 0

    async def list_rollouts(self, query: RolloutQuery) -> RolloutPage:
        self.lists += 1
        return await super().list_rollouts(query)


@pytest.fixture
async def store() -> AsyncIterator[CountingStore]:
    store = CountingStore(SystemClock())
    async with store:
        yield store


@pytest.fixture
async def feed(store: CountingStore) -> AsyncIterator[ChangeFeed]:
    feed = ChangeFeed(store, SystemClock(), max_waiters=5000)
    yield feed
    feed.close()


async def end_of(store: MemoryStore) -> str:
    return (await store.list_rollouts(RolloutQuery(ids=frozenset()))).cursor


async def until_waiting(feed: ChangeFeed, count: int) -> None:
    while feed.waiting < count:
        await SystemClock().sleep(0)
    await SystemClock().sleep(0)


def read(page: bytes) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(page)
    return value


async def test_page_with_items_is_answered_at_once(store: CountingStore, feed: ChangeFeed) -> None:
    await store.add_rollouts([Rollout(rollout_id="a")])
    page = read(await feed.page(RolloutQuery(), 60))
    assert [item["rollout_id"] for item in page["items"]] == ["a"]


async def test_wait_that_runs_out_gives_the_same_cursor(
    store: CountingStore, feed: ChangeFeed
) -> None:
    cursor = await end_of(store)
    page = read(await feed.page(RolloutQuery(changed_after=cursor), 0.05))
    assert page == {"items": [], "cursor": cursor}
    assert feed.waiting == 0


async def test_change_wakes_who_waits(store: CountingStore, feed: ChangeFeed) -> None:
    query = RolloutQuery(changed_after=await end_of(store))
    waiting = asyncio.create_task(feed.page(query, 60))
    await until_waiting(feed, 1)
    await store.add_rollouts([Rollout(rollout_id="a")])
    page = read(await waiting)
    assert page["items"][0]["rollout_id"] == "a"
    assert page["cursor"] != query.changed_after


@pytest.mark.parametrize(
    ("query", "is_woken"),
    [
        (RolloutQuery(ids=frozenset({"a"})), True),
        (RolloutQuery(ids=frozenset({"b"})), False),
        (RolloutQuery(group_id="g"), True),
        (RolloutQuery(group_id="h"), False),
        (RolloutQuery(mode="train"), True),
    ],
)
async def test_change_looks_up_only_for_those_it_concerns(
    store: CountingStore, feed: ChangeFeed, query: RolloutQuery, is_woken: bool
) -> None:
    waiting = asyncio.create_task(
        feed.page(attrs.evolve(query, changed_after=await end_of(store)), 0.3)
    )
    await until_waiting(feed, 1)
    lists = store.lists
    await store.add_rollouts([Rollout(rollout_id="a", group=Group(id="g", size=1, index=0))])
    assert bool(read(await waiting)["items"]) is is_woken
    assert store.lists - lists == int(is_woken)


async def test_woken_without_anything_to_show_waits_on(
    store: CountingStore, feed: ChangeFeed
) -> None:
    query = RolloutQuery(mode="val", changed_after=await end_of(store))
    waiting = asyncio.create_task(feed.page(query, 60))
    await until_waiting(feed, 1)
    lists = store.lists
    await store.add_rollouts([Rollout(rollout_id="a", mode="train")])
    while store.lists == lists:
        await SystemClock().sleep(0.001)
    await SystemClock().sleep(0)
    assert not waiting.done()
    await store.add_rollouts([Rollout(rollout_id="b", mode="val")])
    assert [item["rollout_id"] for item in read(await waiting)["items"]] == ["b"]


async def test_deletion_wakes_as_a_tombstone(store: CountingStore, feed: ChangeFeed) -> None:
    await store.add_rollouts([Rollout(rollout_id="a")])
    query = RolloutQuery(ids=frozenset({"a"}), changed_after=await end_of(store))
    waiting = asyncio.create_task(feed.page(query, 60))
    await until_waiting(feed, 1)
    await store.delete_rollout("a")
    (item,) = read(await waiting)["items"]
    assert item["rollout_id"] == "a"
    assert item["deleted"] is True


async def test_thousand_waiters_of_one_thing_share_one_look(
    store: CountingStore, feed: ChangeFeed
) -> None:
    query = RolloutQuery(changed_after=await end_of(store))
    waiting = [asyncio.create_task(feed.page(query, 60)) for _ in range(1000)]
    await until_waiting(feed, 1000)
    lists = store.lists
    await store.add_rollouts([Rollout(rollout_id="a")])
    pages = await asyncio.gather(*waiting)
    assert set(pages) == {pages[0]}
    assert read(pages[0])["items"][0]["rollout_id"] == "a"
    assert store.lists - lists == 1
    assert feed.waiting == 0


async def test_changes_within_the_coalescing_time_are_one_wake_up() -> None:
    clock = FakeClock()
    async with CountingStore(clock) as store:
        feed = ChangeFeed(store, clock, max_waiters=10)
        query = RolloutQuery(changed_after=await end_of(store))
        waiting = asyncio.create_task(feed.page(query, 60))
        await until_waiting(feed, 1)
        await store.add_rollouts([Rollout(rollout_id="a")])
        await clock.until_sleeping()
        await store.add_rollouts([Rollout(rollout_id="b")])
        clock.advance(0.02)
        page = read(await waiting)
        assert [item["rollout_id"] for item in page["items"]] == ["a", "b"]
        feed.close()


async def test_those_woken_later_in_a_batch_see_what_changed_meanwhile() -> None:
    clock = FakeClock()
    async with CountingStore(clock) as store:
        feed = ChangeFeed(store, clock, max_waiters=100)
        query = RolloutQuery(changed_after=await end_of(store))
        waiting = [asyncio.create_task(feed.page(query, 60)) for _ in range(20)]
        await until_waiting(feed, 20)
        await store.add_rollouts([Rollout(rollout_id="a")])
        await clock.until_sleeping()
        clock.advance(0.02)
        done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 16:
            more, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            done |= more
        await clock.until_sleeping()
        await store.add_rollouts([Rollout(rollout_id="b")])
        clock.advance(0.02)
        late = [read(page)["items"] for page in await asyncio.gather(*pending)]
        assert len(late) == 4
        assert all([item["rollout_id"] for item in items] == ["a", "b"] for items in late)
        feed.close()


async def test_too_many_waiters_are_refused(store: CountingStore) -> None:
    feed = ChangeFeed(store, SystemClock(), max_waiters=2)
    query = RolloutQuery(changed_after=await end_of(store))
    waiting = [asyncio.create_task(feed.page(query, 60)) for _ in range(2)]
    await until_waiting(feed, 2)
    with pytest.raises(Unavailable):
        await feed.page(query, 60)
    assert read(await feed.page(query, 0))["items"] == []
    feed.close()
    await asyncio.gather(*waiting)


async def test_close_answers_all_and_lets_nobody_wait(
    store: CountingStore, feed: ChangeFeed
) -> None:
    query = RolloutQuery(changed_after=await end_of(store))
    waiting = [asyncio.create_task(feed.page(query, 60)) for _ in range(100)]
    await until_waiting(feed, 100)
    feed.close()
    feed.close()
    for page in await asyncio.gather(*waiting):
        assert read(page) == {"items": [], "cursor": query.changed_after}
    assert read(await feed.page(query, 60))["items"] == []


async def test_cancelled_waiter_leaves_nothing_behind(
    store: CountingStore, feed: ChangeFeed
) -> None:
    query = RolloutQuery(ids=frozenset({"a", "b"}), changed_after=await end_of(store))
    waiting = asyncio.create_task(feed.page(query, 60))
    await until_waiting(feed, 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert feed.waiting == 0
    assert feed._waiters == {}


async def test_foreign_cursor_is_an_error_at_once(store: CountingStore, feed: ChangeFeed) -> None:
    with pytest.raises(CursorExpired):
        await feed.page(RolloutQuery(changed_after=cursor_text("another", 1)), 60)
    assert feed.waiting == 0
