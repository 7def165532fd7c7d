"""Rules of events and resources."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agl_core.errors import (
    NotFound,
    StaleAttempt,
)
from agl_core.interfaces import EventQuery, Store
from agl_core.records import (
    Event,
    EventDraft,
    Rollout,
)
from agl_core.testing.contracts.store_support import (
    NOW,
    drafts,
    end_of,
    make_rollout,
    patched,
    read_events,
    read_ids,
)


class EventRules:
    """Events of a rollout."""

    async def test_events_count_from_one_within_their_rollout(self, store: Store) -> None:
        await store.add_rollouts([make_rollout("a"), make_rollout("b")])
        first = await store.append_events("a", "x", drafts("log", "reward"), timestamp=NOW)
        await store.append_events("b", "x", drafts("log"), timestamp=NOW)
        second = await store.append_events("a", "y", drafts("log"), timestamp=NOW + 1)
        assert [event.seq for event in (*first, *second)] == [1, 2, 3]
        assert await read_events(store, "a") == [*first, *second]
        assert [event.seq for event in await read_events(store, "b")] == [1]

    async def test_event_comes_back_as_it_was_posted(self, store: Store) -> None:
        await store.add_rollouts([make_rollout("a")])
        data = {
            "choices": [{"token_ids": [1, 151_935, 0], "logprobs": [-0.1, -1e-7, None]}],
            "text": "日本😀 \u0000",
            "flag": True,
            "empty": {},
        }
        (event,) = await store.append_events(
            "a", "uid-1", [EventDraft(event_type="model_request", data=data)], timestamp=NOW
        )
        assert event == Event(
            seq=1,
            event_type="model_request",
            rollout_id="a",
            attempt_id="uid-1",
            timestamp=NOW,
            data=data,
        )
        assert await read_events(store, "a") == [event]

    async def test_appending_nothing_is_no_event(self, store: Store) -> None:
        await store.add_rollouts([make_rollout("a")])
        assert await store.append_events("a", "x", [], timestamp=NOW) == ()
        assert await read_events(store, "a") == []

    async def test_of_many_events_at_once_none_is_lost_and_batches_stay_whole(
        self, store: Store
    ) -> None:
        await store.add_rollouts([make_rollout("a")])
        batches = await asyncio.gather(
            *(
                store.append_events("a", f"attempt-{n}", drafts("p", "q", "r"), timestamp=NOW)
                for n in range(50)
            )
        )
        for batch in batches:
            assert [event.seq for event in batch] == [*range(batch[0].seq, batch[0].seq + 3)]
        events = await read_events(store, "a")
        assert [event.seq for event in events] == [*range(1, 151)]
        assert sorted(events, key=lambda e: e.seq) == sorted(
            (event for batch in batches for event in batch), key=lambda e: e.seq
        )

    async def test_guard_sees_the_present_record_and_may_refuse_all(self, store: Store) -> None:
        await store.add_rollouts([make_rollout("a")])
        running = await store.change_rollout("a", patched(status="running"))
        seen: list[Rollout] = []

        def refuse(rollout: Rollout) -> None:
            seen.append(rollout)
            raise StaleAttempt("the attempt has ended")

        with pytest.raises(StaleAttempt):
            await store.append_events("a", "x", drafts("p", "q"), timestamp=NOW, guard=refuse)
        assert seen[-1] == running
        assert await read_events(store, "a") == []
        kept = await store.append_events("a", "x", drafts("p"), timestamp=NOW, guard=seen.append)
        assert [event.seq for event in kept] == [1]

    async def test_events_do_not_move_their_rollout(self, store: Store) -> None:
        await store.add_rollouts([make_rollout("a"), make_rollout("b")])
        cursor = await end_of(store)
        await store.append_events("a", "x", drafts("log"), timestamp=NOW)
        assert (await store.get_rollout("a")).version == 1
        assert await read_ids(store, changed_after=cursor) == []

    @pytest.mark.parametrize("limit", [1, 2, 5, 1000])
    async def test_event_pages_show_each_event_once(self, store: Store, limit: int) -> None:
        await store.add_rollouts([make_rollout("a")])
        for n in range(6):
            attempt_id = f"attempt-{n % 2}"
            await store.append_events("a", attempt_id, drafts("log", "reward"), timestamp=NOW)

        async def seqs(**filters: Any) -> list[int]:
            return [event.seq for event in await read_events(store, "a", limit=limit, **filters)]

        assert await seqs() == [*range(1, 13)]
        assert await seqs(attempt_id="attempt-1") == [3, 4, 7, 8, 11, 12]
        assert await seqs(event_type="reward") == [2, 4, 6, 8, 10, 12]
        assert await seqs(attempt_id="attempt-0", event_type="log") == [1, 5, 9]
        assert await seqs(attempt_id="unknown") == []

    async def test_event_cursor_goes_on_with_what_is_appended_later(self, store: Store) -> None:
        await store.add_rollouts([make_rollout("a")])
        empty = await store.list_events(EventQuery(rollout_id="a", event_type="reward"))
        assert empty.items == ()
        await store.append_events("a", "x", drafts("log", "reward", "log"), timestamp=NOW)
        page = await store.list_events(
            EventQuery(rollout_id="a", event_type="reward", after=empty.cursor)
        )
        assert [event.seq for event in page.items] == [2]
        await store.append_events("a", "x", drafts("reward"), timestamp=NOW)
        later = await store.list_events(
            EventQuery(rollout_id="a", event_type="reward", after=page.cursor)
        )
        assert [event.seq for event in later.items] == [4]


class ResourceRules:
    """Bundles that never change."""

    async def test_resources_are_versioned_and_the_latest_is_found(self, store: Store) -> None:
        with pytest.raises(NotFound):
            await store.get_resources(None)
        one = await store.add_resources({"prompt": "a"}, created_at=NOW)
        two = await store.add_resources({"prompt": "b"}, created_at=NOW + 1)
        assert (one.version, two.version) == (1, 2)
        assert one.resources_id != two.resources_id
        assert await store.get_resources(None) == two
        assert await store.get_resources(one.resources_id) == one
        assert (one.data, one.created_at) == ({"prompt": "a"}, NOW)
        with pytest.raises(NotFound):
            await store.get_resources("unknown")

    async def test_resources_added_at_once_get_versions_without_gaps(self, store: Store) -> None:
        added = await asyncio.gather(
            *(store.add_resources({"n": n}, created_at=NOW) for n in range(20))
        )
        assert sorted(item.version for item in added) == [*range(1, 21)]
        assert len({item.resources_id for item in added}) == 20
        latest = await store.get_resources(None)
        assert latest.version == 20

    async def test_resources_do_not_change_with_what_was_posted_or_read(self, store: Store) -> None:
        data: dict[str, Any] = {"job_defaults": {"image": "one"}}
        added = await store.add_resources(data, created_at=NOW)
        data["job_defaults"]["image"] = "two"
        (await store.get_resources(None)).data["job_defaults"]["image"] = "three"
        kept = await store.get_resources(added.resources_id)
        assert kept.data == {"job_defaults": {"image": "one"}}
