"""The memory store: the contract of all stores, and its bounds."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import AsyncIterator, Callable

import attrs
import pytest

from agl_core.errors import CursorExpired, Invalid, NotFound, StoreError
from agl_core.interfaces import RolloutQuery
from agl_core.records import Group, Rollout, Status, Tombstone
from agl_core.testing.clock import FakeClock
from agl_core.testing.contracts import StoreContract
from agl_core.testing.contracts.store_support import (
    drafts,
    end_of,
    make_rollout,
    noted,
    read_events,
    read_ids,
    read_pages,
)
from agl_core.wire import cursor_text
from agl_memory import MemoryConfig, MemoryPlugin, MemoryStore


class TestMemoryStoreContract(StoreContract):
    @pytest.fixture
    async def store(self) -> AsyncIterator[MemoryStore]:
        async with MemoryStore(FakeClock()) as store:
            yield store


def make_store(**config: int) -> MemoryStore:
    return MemoryStore(FakeClock(), MemoryConfig(**config))


def test_plugin_provides_the_store_of_its_config() -> None:
    plugin = MemoryPlugin(MemoryPlugin.Config(max_rollouts=1))
    assert isinstance(plugin.provide_store(FakeClock()), MemoryStore)


@pytest.mark.parametrize("bound", [{"max_rollouts": 0}, {"max_tombstones": -1}])
def test_senseless_bounds_are_refused(bound: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bound))):
        MemoryConfig(**bound)


async def test_full_store_refuses_all_of_what_would_not_fit() -> None:
    store = make_store(max_rollouts=3)
    await store.add_rollouts([make_rollout("a"), make_rollout("b")])
    with pytest.raises(StoreError) as caught:
        await store.add_rollouts([make_rollout("c"), make_rollout("d")])
    assert (caught.value.code, caught.value.status) == ("store_full", 503)
    assert "max_rollouts" in str(caught.value)
    assert await read_ids(store) == ["a", "b"]
    await store.add_rollouts([make_rollout("c")])
    with pytest.raises(StoreError):
        await store.add_rollouts([make_rollout("d")])


async def test_full_store_still_answers_for_what_it_has() -> None:
    store = make_store(max_rollouts=1)
    await store.add_rollouts([make_rollout("a")])
    again = await store.add_rollouts([make_rollout("a")])
    assert again.created == (False,)
    assert (await store.change_rollout("a", noted(n=1))).version == 2


async def test_deletion_makes_room_in_a_full_store() -> None:
    store = make_store(max_rollouts=1)
    await store.add_rollouts([make_rollout("a")])
    await store.delete_rollout("a")
    assert (await store.add_rollouts([make_rollout("b")])).created == (True,)


async def test_cursor_before_a_dropped_tombstone_has_expired() -> None:
    store = make_store(max_tombstones=2)
    await store.add_rollouts([make_rollout(i) for i in "abcd"])
    cursors = [await end_of(store)]
    for rollout_id in "abc":
        await store.delete_rollout(rollout_id)
        cursors.append((await store.list_rollouts(RolloutQuery())).cursor)
    # The tombstone of a is gone: only who saw that deletion may go on.
    with pytest.raises(CursorExpired):
        await store.list_rollouts(RolloutQuery(changed_after=cursors[0]))
    assert await read_ids(store, changed_after=cursors[1]) == ["b", "c"]
    assert await read_ids(store, changed_after=cursors[3]) == []
    assert await read_ids(store) == ["d"]


async def test_id_used_again_does_not_count_as_a_tombstone() -> None:
    store = make_store(max_tombstones=1)
    await store.add_rollouts([make_rollout("a"), make_rollout("b")])
    cursor = await end_of(store)
    await store.delete_rollout("a")
    await store.add_rollouts([make_rollout("a")])
    await store.delete_rollout("b")
    assert await read_ids(store, changed_after=cursor) == ["a", "b"]


async def test_cursor_of_a_store_that_was_restarted_has_expired() -> None:
    before, after = make_store(), make_store()
    for store in (before, after):
        await store.add_rollouts([make_rollout("a")])
    with pytest.raises(CursorExpired):
        await after.list_rollouts(RolloutQuery(changed_after=await end_of(before)))


async def test_cursor_with_a_place_that_cannot_be_is_invalid() -> None:
    store = make_store()
    epoch = store._epoch  # only a forged cursor has such a place
    with pytest.raises(Invalid):
        await store.list_rollouts(RolloutQuery(changed_after=cursor_text(epoch, -1)))


async def test_limit_below_one_is_invalid() -> None:
    with pytest.raises(Invalid):
        await make_store().list_rollouts(RolloutQuery(limit=0))


async def test_changes_and_deletions_leave_no_memory_behind() -> None:
    store = make_store(max_tombstones=10)

    async def churn(numbers: range) -> None:
        for n in numbers:
            for rollout_id in ("again", f"once-{n}"):
                group = Group(id=f"g-{n}", size=1, index=0)
                await store.add_rollouts([make_rollout(rollout_id, group=group)])
                await store.append_events(rollout_id, "x", drafts("log"), timestamp=0.0)
                await store.change_rollout(rollout_id, noted(n=n))
                await store.delete_rollout(rollout_id)

    await churn(range(1000))  # the log reaches its slack
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        await churn(range(1000, 3000))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 100_000


class PlainModel:
    """The change order in its simplest form: a list that is searched from the start."""

    def __init__(self) -> None:
        self.log: list[tuple[int, Rollout | Tombstone, Rollout]] = []
        self.position = 0

    def move(self, state: Rollout | Tombstone, rollout: Rollout) -> None:
        self.position += 1
        self.log = [line for line in self.log if line[1].rollout_id != state.rollout_id]
        self.log.append((self.position, state, rollout))

    def shown(self, query: RolloutQuery, after: int | None) -> list[Rollout | Tombstone]:
        return [
            state
            for position, state, rollout in self.log
            if position > (after or 0)
            and (after is not None or isinstance(state, Rollout))
            and (query.ids is None or state.rollout_id in query.ids)
            and (query.mode is None or rollout.mode == query.mode)
            and (query.group_id is None or (rollout.group or NO_GROUP).id == query.group_id)
            and (
                query.statuses is None
                or isinstance(state, Tombstone)
                or state.status in query.statuses
            )
        ]


def became(status: Status, step: int) -> Callable[[Rollout], Rollout]:
    return lambda rollout: attrs.evolve(rollout, status=status, metadata={"step": step})


NO_GROUP = Group(id="-", size=1, index=0)
STATUSES: tuple[Status, ...] = ("queuing", "running", "failed")
QUERIES = (
    RolloutQuery(),
    RolloutQuery(mode="val"),
    RolloutQuery(group_id="g-1"),
    RolloutQuery(statuses=frozenset({"running"})),
    RolloutQuery(statuses=frozenset({"queuing", "failed"}), mode="train"),
    RolloutQuery(ids=frozenset({"r-1", "r-5", "r-30"}), group_id="g-1"),
)


@pytest.mark.parametrize("seed", range(3))
async def test_any_history_lists_as_a_plain_log_would(seed: int) -> None:
    """Enough changes of few rollouts for the log to be cleaned several times."""
    chance = random.Random(seed)
    store, model = make_store(), PlainModel()
    cursors: list[tuple[str, int]] = []
    for step in range(4000):
        number = chance.randrange(40)
        rollout_id = f"r-{number}"
        try:
            present = await store.get_rollout(rollout_id)
        except NotFound:
            group = Group(id=f"g-{number % 3}", size=20, index=0) if number % 2 else None
            rollout = make_rollout(rollout_id, group=group, mode=chance.choice(["train", "val"]))
            added = (await store.add_rollouts([rollout])).items[0]
            model.move(added, added)
            continue
        if chance.random() < 0.1:
            await store.delete_rollout(rollout_id)
            stone = Tombstone(rollout_id=rollout_id, version=present.version + 1)
            model.move(stone, present)
        else:
            status = chance.choice(STATUSES)
            changed = await store.change_rollout(rollout_id, became(status, step))
            model.move(changed, changed)
        if step % 40 == 0:
            cursor = (await store.list_rollouts(RolloutQuery(limit=1000))).cursor
            cursors.append((cursor, model.position))
            query = attrs.evolve(chance.choice(QUERIES), limit=chance.choice([1, 3, 1000]))
            cursor, position = chance.choice(cursors)
            filters = attrs.asdict(query, recurse=False) | {"changed_after": cursor}
            items, _ = await read_pages(store, **filters)
            assert items == model.shown(query, position)
            first = await store.list_rollouts(query)
            assert list(first.items) == model.shown(query, None)[: query.limit]


async def test_events_of_a_rollout_do_not_show_in_another() -> None:
    store = make_store()
    await store.add_rollouts([make_rollout("a"), make_rollout("b")])
    await store.append_events("a", "same-attempt", drafts("log"), timestamp=1.0)
    assert await read_events(store, "b", attempt_id="same-attempt") == []
