"""The objects of the fake cluster: what etcd and the storage layer of the API server do.

Objects are plain dicts. What callers give and get is a copy; what is stored is never changed, only
replaced, so that the log of events can hold on to every state there was.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterator

from agl_core.clock import Clock
from agl_k8s.testing import defaults
from agl_k8s.testing.history import Change, ChangeType, History
from agl_k8s.testing.kinds import ApiStatus, Object, Objects, kind_of
from agl_k8s.testing.metadata import (
    Propagation,
    check_preconditions,
    copied,
    finalizers_of,
    grace_of,
    is_being_deleted,
    keep_identity,
    name_new,
    owners_of,
)
from agl_k8s.testing.selectors import FieldSelector, LabelSelector
from agl_k8s.times import seconds_of, text_of

__all__ = ["ApiStatus", "Change", "ChangeType", "Key", "ObjectStore", "Propagation", "copied"]

Key = tuple[str, str, str]
"""Resource, namespace (empty where there is none) and name."""
Keys = list[Key]
Listener = Callable[[ChangeType, str, Object], None]

Changes = list[Change]


class ObjectStore:
    """All objects, one version counter, and the log of what happened.

    Everything is synchronous and belongs to one event loop. Every method that names an object
    raises ``ApiStatus`` 404 where it is missing.

    Args:
        clock: Tells the time stamps.
    """

    def __init__(self, clock: Clock) -> None:
        from agl_k8s.testing.garbage import GarbageCollector

        self._clock = clock
        self._history = History()
        self._objects: dict[Key, Object] = {}
        self._keys_by_uid: dict[str, Key] = {}
        self._dependents: dict[str, dict[Key, None]] = {}
        self._listeners: list[Listener] = []
        self._followers: list[Callable[[Change], None]] = []
        self._untold: deque[Change] = deque()
        self._is_telling = False
        self.garbage_collector = GarbageCollector(self)
        """Stops with the controller manager: ``stop()`` and ``start()``."""
        self.garbage_collector.start()

    @property
    def version(self) -> int:
        """The resource version of the last change."""
        return self._history.version

    # -- Reading ----------------------------------------------------------------------------------

    def get(self, resource: str, namespace: str | None, name: str) -> Object:
        return copied(self._stored(_key(resource, namespace, name)))

    def list(
        self,
        resource: str,
        namespace: str | None = None,
        *,
        labels: str | None = None,
        fields: str | None = None,
    ) -> Objects:
        """Objects in the order of their keys, of one namespace or of all.

        Args:
            resource: Its plural.
            namespace: None for all.
            labels: A selector, such as ``a=b,c in (d,e),!f``.
            fields: A selector, such as ``status.phase=Running``.
        """
        label_selector, field_selector = LabelSelector(labels), FieldSelector(resource, fields)
        return [
            copied(item)
            for item in self._select(resource, namespace)
            if label_selector.matches(item) and field_selector.matches(item)
        ]

    def list_at(self, resource: str, namespace: str | None, version: int) -> Objects:
        """The stored objects as they were at a version, not to be changed.

        Raises:
            ApiStatus: 410, the version has expired.
        """
        found = {_key_of(resource, item): item for item in self._select(resource, namespace)}
        for change in reversed(self.changes_after(version)):
            key = _key_of(resource, change.object)
            if change.resource != resource or namespace not in (None, "", key[1]):
                continue
            if change.previous is None:
                found.pop(key, None)
            else:
                found[key] = change.previous
        return [item for _, item in sorted(found.items())]

    def changes_after(self, version: int) -> Changes:
        """The log after a version.

        Raises:
            ApiStatus: 410, the version has expired.
        """
        return self._history.after(version)

    def key_of_uid(self, uid: str) -> Key | None:
        """Where the object of a uid is, or None if there is none."""
        return self._keys_by_uid.get(uid)

    def dependents_of(self, uid: str) -> Keys:
        """The objects that name a uid as an owner."""
        return [*self._dependents.get(uid, ())]

    def peek(self, key: Key) -> Object | None:
        """The stored object itself, not to be changed."""
        return self._objects.get(key)

    def all_keys(self, namespace: str | None = None) -> Keys:
        """Of all objects, or those of a namespace."""
        return [key for key in self._objects if namespace is None or key[1] == namespace]

    def time(self) -> str:
        """The present time, as objects have it."""
        return text_of(self._clock.now())

    # -- Writing ----------------------------------------------------------------------------------

    def create(
        self,
        resource: str,
        namespace: str | None,
        body: Object,
        *,
        check: Callable[[Object], None] | None = None,
        is_dry_run: bool = False,
    ) -> Object:
        """Add an object, with the defaults of its kind.

        Args:
            resource: Its plural.
            namespace: Where it is put; ignored for kinds that are in none.
            body: What is wanted of it; a ``generateName`` does for a name.
            check: Called with the whole object before it is added; raises to refuse it.
            is_dry_run: Only say what would be added.

        Raises:
            ApiStatus: 409, there is one; 422, it has no name.
        """
        kind = kind_of(resource)
        new = copied(body)
        metadata = new["metadata"] = new.get("metadata") or {}
        name_new(kind, metadata)
        key = _key(resource, namespace, metadata["name"])
        if kind.is_namespaced:
            metadata["namespace"] = key[1]
        else:
            metadata.pop("namespace", None)
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": self.time(), "generation": 1}
        new = {"apiVersion": kind.api_version, "kind": kind.kind} | new
        defaults.fill(resource, new)
        if check is not None:
            check(new)
        present = self._objects.get(key)
        if present is not None:
            raise kind.exists(key[2], is_being_deleted=is_being_deleted(present))
        if not is_dry_run:
            self._put("ADDED", key, new, None)
        return copied(new)

    def update(
        self, resource: str, namespace: str | None, name: str, change: Callable[[Object], None]
    ) -> Object:
        """Change an object, and remove it if only its finalizers kept it.

        Args:
            resource: Its plural.
            namespace: Where it is.
            name: Its name.
            change: Changes the copy that it is given; what it raises leaves all as it was. What
                identifies the object, and its deletion, stay as they are whatever it does.

        Returns:
            The object as it is now, or was at its removal.
        """
        key = _key(resource, namespace, name)
        old = self._stored(key)
        new = copied(old)
        change(new)
        for part in ("apiVersion", "kind"):
            new[part] = old[part]
        keep_identity(old["metadata"], new.setdefault("metadata", {}))
        return self._replace(key, old, new)

    def delete(
        self,
        resource: str,
        namespace: str | None,
        name: str,
        *,
        uid: str | None = None,
        version: str | None = None,
        propagation: Propagation | None = None,
        grace_seconds: int | None = None,
    ) -> Object:
        """Delete an object, or mark it as being deleted where something must happen first.

        A pod that is bound to a node and has not ended waits for the node, which deletes it with
        ``grace_seconds=0``; any object waits for its finalizers.

        Args:
            resource: Its plural.
            namespace: Where it is.
            name: Its name.
            uid: The only uid it may have.
            version: The only resource version it may have.
            propagation: What becomes of what it owns. ``Orphan`` for a Job where none is given,
                else ``Background``.
            grace_seconds: Of a pod; its own where none is given.

        Returns:
            The object as it is now, or was at its removal.

        Raises:
            ApiStatus: 409, another uid or version.
        """
        key = _key(resource, namespace, name)
        old = self._stored(key)
        check_preconditions(kind_of(resource), old, uid, version)
        new = copied(old)
        metadata = new["metadata"]
        metadata["finalizers"] = finalizers_of(resource, old, propagation)
        if not metadata["finalizers"]:
            del metadata["finalizers"]
        grace = grace_of(resource, old, grace_seconds)
        known = metadata.get("deletionGracePeriodSeconds")
        if known is None or grace < known:  # a later delete may only hurry
            # Its grace, too, counts from the first request.
            asked = (
                seconds_of(metadata["deletionTimestamp"]) - known if known else self._clock.now()
            )
            metadata["deletionTimestamp"] = text_of(asked + grace)
            metadata["deletionGracePeriodSeconds"] = grace
        if resource == "namespaces":
            new.setdefault("status", {})["phase"] = "Terminating"
        return self._replace(key, old, new)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Hear of every change, in order, right after it is made.

        Args:
            listener: Gets the type, the resource and a copy of the object. A change that it makes
                is told to everyone after the present one.

        Returns:
            Ends the subscription.
        """
        self._listeners.append(listener)

        def unsubscribe() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return unsubscribe

    def follow(self, follower: Callable[[Change], None]) -> Callable[[], None]:
        """As ``subscribe``, for those who do not change what they are given.

        Args:
            follower: Called at once, with what is stored itself.

        Returns:
            Ends the subscription.
        """
        self._followers.append(follower)
        return lambda: self._followers.remove(follower)

    def compact(self) -> None:
        """Let every version that was ever handed out expire.

        In a real cluster the counter moves all the time, as leases of nodes are renewed.
        """
        self._history.compact()

    # ---------------------------------------------------------------------------------------------

    def _stored(self, key: Key) -> Object:
        found = self._objects.get(key)
        if found is None:
            raise kind_of(key[0]).not_found(key[2])
        return found

    def _select(self, resource: str, namespace: str | None) -> Iterator[Object]:
        kind_of(resource)
        for key in sorted(key for key in self._objects if key[0] == resource):
            if namespace in (None, "", key[1]) or not key[1]:
                yield self._objects[key]

    def _replace(self, key: Key, old: Object, new: Object) -> Object:
        if new == old:
            return copied(old)
        metadata = new["metadata"]
        if new.get("spec") != old.get("spec") or (
            is_being_deleted(new) and not is_being_deleted(old)
        ):
            metadata["generation"] = old["metadata"].get("generation", 1) + 1
        is_done = not metadata.get("finalizers") and not metadata.get("deletionGracePeriodSeconds")
        if is_being_deleted(new) and is_done:
            return self._put("DELETED", key, new, old)
        return self._put("MODIFIED", key, new, old)

    def _put(self, type_: ChangeType, key: Key, new: Object, old: Object | None) -> Object:
        change = self._history.add(type_, key[0], new, old)
        if old is not None:
            # Most changes leave most of an object alone; the log keeps that part once.
            for part, value in new.items():
                if part in old and old[part] == value:
                    new[part] = old[part]
        self._index(key, old, None if type_ == "DELETED" else new)
        self._untold.append(change)
        for follower in tuple(self._followers):
            follower(change)
        result = copied(new)
        self._tell()
        return result

    def _index(self, key: Key, old: Object | None, new: Object | None) -> None:
        if old is not None:
            self._keys_by_uid.pop(old["metadata"]["uid"], None)
            for uid in owners_of(old):
                self._dependents[uid].pop(key, None)
                if not self._dependents[uid]:
                    del self._dependents[uid]
        if new is None:
            del self._objects[key]
            return
        self._objects[key] = new
        self._keys_by_uid[new["metadata"]["uid"]] = key
        for uid in owners_of(new):
            self._dependents.setdefault(uid, {})[key] = None

    def _tell(self) -> None:
        if self._is_telling:
            return
        self._is_telling = True
        try:
            while self._untold:
                change = self._untold.popleft()
                for listener in tuple(self._listeners):
                    listener(change.type, change.resource, copied(change.object))
        finally:
            self._is_telling = False


def _key(resource: str, namespace: str | None, name: str) -> Key:
    if not kind_of(resource).is_namespaced:
        return resource, "", name
    return resource, namespace or "default", name


def _key_of(resource: str, item: Object) -> Key:
    return resource, item["metadata"].get("namespace", ""), item["metadata"]["name"]
