"""Rules of the change order, of cursors and filters, and of deletion."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agl_core.clock import SystemClock
from agl_core.errors import (
    CursorExpired,
    Invalid,
    NotFound,
)
from agl_core.interfaces import EventQuery, RolloutQuery, Store
from agl_core.records import (
    Group,
    Rollout,
    Tombstone,
)
from agl_core.testing.contracts.store_support import (
    NOW,
    WAIT_SECONDS,
    drafts,
    end_of,
    make_rollout,
    noted,
    patched,
    read_events,
    read_ids,
    read_pages,
)
from agl_core.wire import cursor_text


class FeedRules:
    """What a list shows, and in which order."""

    # --- change order and cursors

    async def test_changed_rollout_moves_to_the_end_and_shows_once(self, store: Store) -> None:
        await store.add_rollouts([make_rollout(i) for i in "abc"])
        await store.change_rollout("a", noted(n=1))
        await store.change_rollout("a", noted(n=2))
        items, _ = await read_pages(store)
        assert [item.rollout_id for item in items] == ["b", "c", "a"]
        assert [item.version for item in items] == [1, 1, 3]

    async def test_cursor_shows_what_came_after_it_and_no_more(self, store: Store) -> None:
        await store.add_rollouts([make_rollout(i) for i in "abc"])
        cursor = await end_of(store)
        assert await read_ids(store, changed_after=cursor) == []
        await store.change_rollout("b", noted(n=1))
        await store.add_rollouts([make_rollout("d")])
        assert await read_ids(store, changed_after=cursor) == ["b", "d"]
        assert await read_ids(store, changed_after=cursor) == ["b", "d"]

    async def test_cursor_of_an_empty_store_shows_the_first_rollout(self, store: Store) -> None:
        empty = await store.list_rollouts(RolloutQuery())
        assert empty.items == ()
        await store.add_rollouts([make_rollout("a")])
        assert await read_ids(store, changed_after=empty.cursor) == ["a"]

    async def test_cursor_stays_while_nothing_changes(self, store: Store) -> None:
        await store.add_rollouts([make_rollout("a")])
        cursor = await end_of(store)
        page = await store.list_rollouts(RolloutQuery(changed_after=cursor))
        assert (page.items, page.cursor) == ((), cursor)

    @pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
    async def test_pages_show_each_rollout_once(self, store: Store, limit: int) -> None:
        ids = [f"rollout-{n}" for n in range(7)]
        await store.add_rollouts([make_rollout(i) for i in ids])
        assert await read_ids(store, limit=limit) == ids

    async def test_what_changes_between_pages_is_shown_again_and_nothing_is_missed(
        self, store: Store
    ) -> None:
        await store.add_rollouts([make_rollout(i) for i in "abcdef"])
        first = await store.list_rollouts(RolloutQuery(limit=3))
        await store.change_rollout("a", noted(n=1))  # seen already
        await store.change_rollout("e", noted(n=1))  # not seen yet
        await store.delete_rollout("b")  # seen already
        await store.delete_rollout("f")  # never seen
        rest, _ = await read_pages(store, changed_after=first.cursor, limit=2)
        live = [item.rollout_id for item in rest if isinstance(item, Rollout)]
        assert live == ["d", "a", "e"]
        assert "b" in [item.rollout_id for item in rest if isinstance(item, Tombstone)]

    async def test_follower_of_many_changes_at_once_ends_with_the_latest_states(
        self, store: Store
    ) -> None:
        ids = [f"rollout-{n}" for n in range(10)]
        await store.add_rollouts([make_rollout(i) for i in ids])
        seen: dict[str, int] = {}

        async def follow() -> None:
            cursor = None
            while sum(seen.values()) < 10 * 11:
                page = await store.list_rollouts(RolloutQuery(changed_after=cursor, limit=3))
                cursor = page.cursor
                for item in page.items:
                    assert item.version > seen.get(item.rollout_id, 0)
                    seen[item.rollout_id] = item.version
                await SystemClock().sleep(0)

        async with asyncio.timeout(WAIT_SECONDS):
            await asyncio.gather(
                follow(), *(store.change_rollout(i, noted(n=n)) for n in range(10) for i in ids)
            )
        assert seen == dict.fromkeys(ids, 11)

    async def test_text_that_is_no_cursor_is_invalid(self, store: Store) -> None:
        await store.add_rollouts([make_rollout("a")])
        for text in ("", "nonsense", "ä", cursor_text("", 0)[:1]):
            with pytest.raises(Invalid):
                await store.list_rollouts(RolloutQuery(changed_after=text))
            with pytest.raises(Invalid):
                await store.list_events(EventQuery(rollout_id="a", after=text))

    async def test_cursor_of_another_life_of_the_store_has_expired(self, store: Store) -> None:
        foreign = cursor_text("another-life", 0)
        await store.add_rollouts([make_rollout("a")])
        with pytest.raises(CursorExpired):
            await store.list_rollouts(RolloutQuery(changed_after=foreign))
        with pytest.raises(CursorExpired):
            await store.list_events(EventQuery(rollout_id="a", after=foreign))

    # --- filters

    async def test_filters_show_what_passes_all_of_them(self, store: Store) -> None:
        group = [Group(id="g", size=3, index=n) for n in range(3)]
        await store.add_rollouts(
            [
                make_rollout("g-0", group=group[0]),
                make_rollout("alone"),
                make_rollout("g-1", group=group[1], mode="val"),
                make_rollout("g-2", group=group[2]),
                make_rollout("val", mode="val"),
            ]
        )
        await store.change_rollout("g-0", patched(status="running"))
        assert await read_ids(store, group_id="g") == ["g-1", "g-2", "g-0"]
        assert await read_ids(store, mode="val") == ["g-1", "val"]
        assert await read_ids(store, statuses=frozenset({"running"})) == ["g-0"]
        assert await read_ids(store, statuses=frozenset()) == []
        both = frozenset({"running", "queuing"})
        assert await read_ids(store, statuses=both, mode="train") == ["alone", "g-2", "g-0"]
        assert await read_ids(store, group_id="g", mode="val") == ["g-1"]
        some = frozenset({"alone", "g-2", "val"})
        assert await read_ids(store, ids=some, mode="train") == ["alone", "g-2"]

    @pytest.mark.parametrize("limit", [1, 2, 50])
    async def test_filtered_pages_lose_nothing_that_comes_later(
        self, store: Store, limit: int
    ) -> None:
        await store.add_rollouts([make_rollout(f"r-{n}") for n in range(6)])
        running: Any = frozenset({"running"})
        items, cursor = await read_pages(store, statuses=running, limit=limit)
        assert items == []
        for rollout_id in ("r-4", "r-1", "r-3"):
            await store.change_rollout(rollout_id, patched(status="running"))
        items, cursor = await read_pages(store, statuses=running, limit=limit, changed_after=cursor)
        assert [item.rollout_id for item in items] == ["r-4", "r-1", "r-3"]
        await store.change_rollout("r-0", patched(status="running"))
        assert await read_ids(store, statuses=running, limit=limit, changed_after=cursor) == ["r-0"]

    # --- deletion

    async def test_deleted_rollout_is_gone_with_its_events(self, store: Store) -> None:
        await store.add_rollouts([make_rollout("a"), make_rollout("b")])
        await store.append_events("a", "x", drafts("log"), timestamp=NOW)
        await store.delete_rollout("a")
        with pytest.raises(NotFound):
            await store.get_rollout("a")
        with pytest.raises(NotFound):
            await store.list_events(EventQuery(rollout_id="a"))
        with pytest.raises(NotFound):
            await store.append_events("a", "x", drafts("log"), timestamp=NOW)
        with pytest.raises(NotFound):
            await store.delete_rollout("a")
        assert await read_ids(store) == ["b"]

    async def test_cursor_shows_a_deletion_as_a_tombstone_in_its_place(self, store: Store) -> None:
        await store.add_rollouts([make_rollout(i) for i in "abc"])
        await store.change_rollout("b", noted(n=1))
        cursor = await end_of(store)
        await store.change_rollout("a", noted(n=1))
        await store.delete_rollout("b")
        await store.change_rollout("c", noted(n=1))
        items, _ = await read_pages(store, changed_after=cursor, limit=1)
        assert [item.rollout_id for item in items] == ["a", "b", "c"]
        tombstone = items[1]
        assert isinstance(tombstone, Tombstone)
        assert tombstone.deleted is True
        assert tombstone.version == 3

    async def test_tombstones_pass_the_filters_that_the_rollout_passed(self, store: Store) -> None:
        await store.add_rollouts(
            [
                make_rollout("g-0", group=Group(id="g", size=1, index=0)),
                make_rollout("h-0", group=Group(id="h", size=1, index=0), mode="val"),
            ]
        )
        cursor = await end_of(store)
        await store.delete_rollout("g-0")
        await store.delete_rollout("h-0")
        assert await read_ids(store, changed_after=cursor, group_id="g") == ["g-0"]
        assert await read_ids(store, changed_after=cursor, mode="val") == ["h-0"]
        assert await read_ids(store, changed_after=cursor, ids=frozenset({"h-0"})) == ["h-0"]
        # Whoever follows one status may have seen the rollout there before.
        succeeded = await read_ids(store, changed_after=cursor, statuses=frozenset({"succeeded"}))
        assert succeeded == ["g-0", "h-0"]

    async def test_id_of_a_deleted_rollout_may_be_used_again(self, store: Store) -> None:
        await store.add_rollouts([make_rollout("a", input=1)])
        await store.append_events("a", "x", drafts("log", "log"), timestamp=NOW)
        cursor = await end_of(store)
        await store.delete_rollout("a")
        added = await store.add_rollouts([make_rollout("a", input=2)])
        assert (added.created, added.items[0].version) == ((True,), 1)
        items, _ = await read_pages(store, changed_after=cursor)
        assert items == [added.items[0]]
        assert await read_events(store, "a") == []
