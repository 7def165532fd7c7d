"""Rules of adding and changing rollouts."""

from __future__ import annotations

import asyncio

import attrs
import pytest

from agl_core.errors import (
    IllegalTransition,
    NotFound,
    RolloutExists,
)
from agl_core.interfaces import EventQuery, RolloutQuery, Store
from agl_core.records import (
    Attempt,
    Group,
    RolloutConfig,
    RolloutError,
)
from agl_core.testing.contracts.store_support import (
    NOW,
    drafts,
    end_of,
    make_rollout,
    noted,
    patched,
    read_ids,
)


class RolloutRules:
    """Adding, changing and unknown ids."""

    # --- adding

    async def test_added_rollouts_get_version_one_in_the_order_asked_for(
        self, store: Store
    ) -> None:
        ids = ["c", "a", "b"]
        added = await store.add_rollouts([make_rollout(i, version=7) for i in ids])
        assert [item.rollout_id for item in added.items] == ids
        assert [item.version for item in added.items] == [1, 1, 1]
        assert added.created == (True, True, True)
        assert await read_ids(store) == ids

    async def test_every_field_comes_back_as_it_was_added(self, store: Store) -> None:
        full = make_rollout(
            "full",
            mode="val",
            input={"text": "日本😀", "numbers": [1, 2.5, None, True], "nested": {"a": {}}},
            group=Group(id="g", size=4, index=3),
            replaces="other",
            config=RolloutConfig(image="i:1", command=("run", "it"), env={"A": "b"}, max_retries=2),
            resources_id="resources-1",
            metadata={"key": ["value"]},
            priority=-3,
            grade="pending",
        )
        await store.add_rollouts([full])
        assert await store.get_rollout("full") == attrs.evolve(full, version=1)
        page = await store.list_rollouts(RolloutQuery())
        assert page.items == (attrs.evolve(full, version=1),)

    async def test_adding_nothing_adds_nothing(self, store: Store) -> None:
        added = await store.add_rollouts([])
        assert (added.items, added.created) == ((), ())
        assert await read_ids(store) == []

    async def test_same_spec_again_returns_what_became_of_it(self, store: Store) -> None:
        await store.add_rollouts([make_rollout("a", input=1), make_rollout("b")])
        running = await store.change_rollout("a", patched(status="running"))
        cursor = await end_of(store)
        again = await store.add_rollouts([make_rollout("a", input=1), make_rollout("c")])
        assert again.items[0] == running
        assert again.created == (False, True)
        assert await read_ids(store, changed_after=cursor) == ["c"]

    async def test_another_spec_of_a_known_id_adds_none_and_names_the_index(
        self, store: Store
    ) -> None:
        await store.add_rollouts([make_rollout("a", input=1)])
        with pytest.raises(RolloutExists) as caught:
            await store.add_rollouts(
                [make_rollout("new-1"), make_rollout("a", input=2), make_rollout("new-2")]
            )
        assert caught.value.details["index"] == 1
        assert await read_ids(store) == ["a"]
        assert (await store.get_rollout("a")).input == 1

    async def test_id_twice_in_one_call_is_one_rollout(self, store: Store) -> None:
        added = await store.add_rollouts([make_rollout("a"), make_rollout("a")])
        assert added.items[0] == added.items[1]
        assert added.created == (True, False)
        assert await read_ids(store) == ["a"]

    async def test_id_twice_in_one_call_with_two_specs_adds_none(self, store: Store) -> None:
        with pytest.raises(RolloutExists) as caught:
            await store.add_rollouts([make_rollout("a", input=1), make_rollout("a", input=2)])
        assert caught.value.details["index"] == 1
        assert await read_ids(store) == []

    async def test_same_rollout_added_at_once_by_many_is_created_once(self, store: Store) -> None:
        results = await asyncio.gather(
            *(store.add_rollouts([make_rollout("a"), make_rollout("b")]) for _ in range(20))
        )
        for place in (0, 1):
            assert sum(result.created[place] for result in results) == 1
        assert sorted(await read_ids(store)) == ["a", "b"]

    # --- unknown ids

    async def test_unknown_rollout_is_not_found(self, store: Store) -> None:
        await store.add_rollouts([make_rollout("known")])
        with pytest.raises(NotFound):
            await store.get_rollout("unknown")
        with pytest.raises(NotFound):
            await store.change_rollout("unknown", noted(a=1))
        with pytest.raises(NotFound):
            await store.delete_rollout("unknown")
        with pytest.raises(NotFound):
            await store.append_events("unknown", "x", drafts("log"), timestamp=NOW)
        with pytest.raises(NotFound):
            await store.list_events(EventQuery(rollout_id="unknown"))
        assert await read_ids(store) == ["known"]

    async def test_unknown_ids_of_a_filter_show_nothing(self, store: Store) -> None:
        await store.add_rollouts([make_rollout("known")])
        assert await read_ids(store, ids=frozenset({"unknown", "known"})) == ["known"]
        assert await read_ids(store, ids=frozenset()) == []
        assert await read_ids(store, group_id="unknown") == []

    # --- changing

    async def test_change_is_kept_and_raises_the_version_by_one(self, store: Store) -> None:
        await store.add_rollouts([make_rollout("a")])
        changed = await store.change_rollout(
            "a", lambda r: attrs.evolve(r, cancel_requested=True, version=99)
        )
        assert (changed.version, changed.cancel_requested) == (2, True)
        assert await store.get_rollout("a") == changed

    async def test_every_field_of_a_change_comes_back(self, store: Store) -> None:
        await store.add_rollouts([make_rollout("a")])
        attempt = Attempt(
            attempt_id="uid-1",
            phase="failed",
            reason="oom",
            exit_code=137,
            node="node-7",
            started_at=NOW,
            finished_at=NOW + 1.5,
        )
        await store.change_rollout("a", patched(attempts=(attempt,)))
        failed = await store.change_rollout(
            "a",
            patched(status="failed", error=RolloutError(code="oom", message="über"), grade="done"),
        )
        read = await store.get_rollout("a")
        assert read == failed
        assert read.attempts == (attempt,)
        assert (read.version, read.status, read.grade) == (3, "failed", "done")
        assert read.error == RolloutError(code="oom", message="über")

    async def test_equal_record_changes_nothing(self, store: Store) -> None:
        await store.add_rollouts([make_rollout("a"), make_rollout("b")])
        cursor = await end_of(store)
        same = await store.change_rollout("a", lambda r: attrs.evolve(r))
        assert same.version == 1
        assert await read_ids(store, changed_after=cursor) == []
        assert await read_ids(store) == ["a", "b"]

    async def test_what_a_change_raises_goes_to_the_caller_and_nothing_happens(
        self, store: Store
    ) -> None:
        await store.add_rollouts([make_rollout("a")])
        cursor = await end_of(store)
        with pytest.raises(IllegalTransition):
            await store.change_rollout("a", patched(status="succeeded"))
        assert (await store.get_rollout("a")).version == 1
        assert await read_ids(store, changed_after=cursor) == []

    async def test_of_many_changes_at_once_none_is_lost(self, store: Store) -> None:
        await store.add_rollouts([make_rollout("a")])
        changed = await asyncio.gather(
            *(store.change_rollout("a", noted(**{f"key-{n}": n})) for n in range(100))
        )
        assert sorted(item.version for item in changed) == [*range(2, 102)]
        after = await store.get_rollout("a")
        assert after.version == 101
        assert after.metadata == {f"key-{n}": n for n in range(100)}

    async def test_rollout_ends_once_however_many_end_it(self, store: Store) -> None:
        await store.add_rollouts([make_rollout("a", status="running")])
        changes = [patched(status="succeeded"), patched(status="failed")] * 5
        results = await asyncio.gather(
            *(store.change_rollout("a", change) for change in changes), return_exceptions=True
        )
        refused = [r for r in results if isinstance(r, BaseException)]
        assert all(isinstance(error, IllegalTransition) for error in refused)
        assert len(refused) == 5
        assert (await store.get_rollout("a")).version == 2
