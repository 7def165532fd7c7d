"""The change order: every rollout's latest state, in the order in which rollouts last changed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator
from itertools import chain, compress, islice

import attrs

from agl_core.interfaces import RolloutQuery
from agl_core.records import Mode, Rollout, Tombstone

# Below this many outdated lines the log is not worth cleaning.
_SLACK = 1024
# Looking up and sorting an indexed id costs about as much as passing this many lines of the log.
_LOOKUP_COST = 4

_DELETED = ("status", "deleted")


@attrs.frozen
class _Entry:
    state: Rollout | Tombstone
    position: int
    mode: Mode
    group_id: str | None


class ChangeOrder:
    """Latest states by id, and a log that says in which order they came about.

    The log is two parallel lists of positions (which only grow) and ids. A line counts only while
    the entry of its id still stands at that position; when most lines are outdated the log is
    written anew, so a change costs the same however many there have been, and finding the place
    of a cursor is a binary search.
    """

    def __init__(self, max_tombstones: int) -> None:
        self._max_tombstones = max_tombstones
        self._entries: dict[str, _Entry] = {}
        self._tombstones: dict[str, None] = {}  # in order of deletion
        self._index: dict[tuple[str, str], set[str]] = {}
        self._positions: list[int] = []
        self._ids: list[str] = []
        self.end = 0
        """Position of the latest change."""
        self.oldest = 0
        """Position of the latest tombstone that was dropped: who stands before it missed it."""

    def __len__(self) -> int:
        return len(self._entries) - len(self._tombstones)

    def get(self, rollout_id: str) -> Rollout | None:
        """The rollout of that id; None where there is none or none any more."""
        entry = self._entries.get(rollout_id)
        return entry.state if entry is not None and isinstance(entry.state, Rollout) else None

    def put(self, rollout: Rollout) -> None:
        """Make this the latest state of its id and move it to the end."""
        self._tombstones.pop(rollout.rollout_id, None)
        self._place(rollout, rollout.mode, rollout.group.id if rollout.group else None)

    def bury(self, rollout: Rollout) -> None:
        """Put a tombstone in a rollout's place, at the end; the oldest ones beyond the bound go."""
        tombstone = Tombstone(rollout_id=rollout.rollout_id, version=rollout.version + 1)
        self._place(tombstone, rollout.mode, rollout.group.id if rollout.group else None)
        self._tombstones[rollout.rollout_id] = None
        while len(self._tombstones) > self._max_tombstones:
            dropped_id = next(iter(self._tombstones))
            del self._tombstones[dropped_id]
            dropped = self._entries.pop(dropped_id)
            self._reindex(dropped_id, dropped, None)
            self.oldest = dropped.position

    def select(
        self, query: RolloutQuery, after: int | None
    ) -> tuple[tuple[Rollout | Tombstone, ...], int]:
        """What a query shows, and the position to go on from.

        Args:
            query: Filters and limit; its cursor is not looked at.
            after: The position that its cursor names; None: from the start, without tombstones.
        """
        shown = (
            entry
            for entry in self._entries_after(query, after)
            if _is_shown(entry, query, with_tombstones=after is not None)
        )
        page = tuple(islice(shown, query.limit))
        is_full = len(page) == query.limit
        position = page[-1].position if is_full else max(self.end, after or 0)
        return tuple(entry.state for entry in page), position

    def _place(self, state: Rollout | Tombstone, mode: Mode, group_id: str | None) -> None:
        self.end += 1
        entry = _Entry(state, self.end, mode, group_id)
        self._reindex(state.rollout_id, self._entries.get(state.rollout_id), entry)
        self._entries[state.rollout_id] = entry
        self._positions.append(self.end)
        self._ids.append(state.rollout_id)
        if len(self._positions) > 2 * len(self._entries) + _SLACK:
            self._clean_log()

    def _clean_log(self) -> None:
        # The event loop waits for this, rarely but for every line: comprehensions are the fastest.
        present = self._entries.get
        lines = zip(self._positions, self._ids, strict=True)
        counts = [(e := present(i)) is not None and e.position == p for p, i in lines]
        self._positions = [*compress(self._positions, counts)]
        self._ids = [*compress(self._ids, counts)]

    def _log_from(self, line: int) -> Iterator[_Entry]:
        for number in range(line, len(self._positions)):
            entry = self._entries.get(self._ids[number])
            if entry is not None and entry.position == self._positions[number]:
                yield entry

    def _entries_after(self, query: RolloutQuery, after: int | None) -> Iterator[_Entry]:
        """Entries in order, by the cheaper way: along the log, or through the best index."""
        line = bisect_right(self._positions, after or 0)
        lines = len(self._positions) - line
        parts = min(
            self._indexes_for(query, with_tombstones=after is not None),
            key=lambda parts: sum(map(len, parts)),
            default=None,
        )
        if parts is None or sum(map(len, parts)) * _LOOKUP_COST > lines:
            return self._log_from(line)
        known = (self._entries.get(rollout_id) for rollout_id in chain.from_iterable(parts))
        found = [e for e in known if e is not None and e.position > (after or 0)]
        return iter(sorted(found, key=lambda entry: entry.position))

    def _indexes_for(
        self, query: RolloutQuery, *, with_tombstones: bool
    ) -> Iterator[list[Collection[str]]]:
        """Per filter that is set: ids that include all that pass it, in disjoint parts."""
        if query.ids is not None:
            yield [query.ids]
        if query.group_id is not None:
            yield [self._index.get(("group", query.group_id), ())]
        if query.mode is not None:
            yield [self._index.get(("mode", query.mode), ())]
        if query.statuses is not None:
            keys = [("status", str(status)) for status in query.statuses]
            keys += [_DELETED] if with_tombstones else []
            yield [self._index.get(key, ()) for key in keys]

    def _reindex(self, rollout_id: str, before: _Entry | None, after: _Entry | None) -> None:
        old, new = _keys(before), _keys(after)
        for key in old - new:
            ids = self._index[key]
            ids.discard(rollout_id)
            if not ids:
                del self._index[key]
        for key in new - old:
            self._index.setdefault(key, set()).add(rollout_id)


def _keys(entry: _Entry | None) -> set[tuple[str, str]]:
    if entry is None:
        return set()
    state = entry.state
    keys = {
        ("mode", str(entry.mode)),
        _DELETED if isinstance(state, Tombstone) else ("status", str(state.status)),
    }
    if entry.group_id is not None:
        keys.add(("group", entry.group_id))
    return keys


def _is_shown(entry: _Entry, query: RolloutQuery, *, with_tombstones: bool) -> bool:
    """Whether the filters let an entry through.

    A tombstone passes any filter on status: whoever follows one may have seen the rollout there.
    """
    state = entry.state
    if isinstance(state, Tombstone):
        if not with_tombstones:
            return False
    elif query.statuses is not None and state.status not in query.statuses:
        return False
    return (
        (query.ids is None or state.rollout_id in query.ids)
        and (query.group_id is None or entry.group_id == query.group_id)
        and (query.mode is None or entry.mode == query.mode)
    )
