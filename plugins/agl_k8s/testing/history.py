"""The version counter of the fake cluster, and what happened at each version."""

from __future__ import annotations

from bisect import bisect_right
from typing import Literal

from attrs import frozen

from agl_k8s.testing.kinds import ApiStatus, Object

ChangeType = Literal["ADDED", "MODIFIED", "DELETED"]

# A real server forgets after five minutes; this many hold everything that a test does.
LONGEST = 100_000


@frozen
class Change:
    """One entry of the history."""

    version: int
    type: ChangeType
    resource: str
    object: Object
    """After the change; for a deletion the last state, with the version of the deletion."""
    previous: Object | None


class History:
    """The last changes, in order.

    Args:
        longest: So many changes are remembered; past that the oldest tenth is forgotten.
    """

    def __init__(self, longest: int = LONGEST) -> None:
        self.version = 1000
        """Of the last change."""
        self._oldest = self.version
        self._longest = longest
        self._changes: list[Change] = []

    def add(
        self, type_: ChangeType, resource: str, item: Object, previous: Object | None
    ) -> Change:
        """Count on, write the version into the object, and remember the change."""
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        change = Change(self.version, type_, resource, item, previous)
        self._changes.append(change)
        if len(self._changes) > self._longest:
            forgotten = max(1, self._longest // 10)
            self._oldest = self._changes[forgotten - 1].version
            del self._changes[:forgotten]
        return change

    def after(self, version: int) -> list[Change]:
        """What happened after a version.

        Raises:
            ApiStatus: 410, the version has expired.
        """
        if version < self._oldest:
            message = f"too old resource version: {version} ({self._oldest})"
            raise ApiStatus(410, "Expired", message)
        return self._changes[bisect_right(self._changes, version, key=_version_of) :]

    def compact(self) -> None:
        """Let every version that was ever handed out expire."""
        self.version += 1
        self._oldest = self.version
        self._changes.clear()


def _version_of(change: Change) -> int:
    return change.version
