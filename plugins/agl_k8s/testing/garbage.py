"""The garbage collector of the fake cluster: what becomes of objects whose owners go."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from agl_k8s.testing.kinds import Object
from agl_k8s.testing.metadata import FOREGROUND, NAMESPACE_CONTENT, ORPHAN

if TYPE_CHECKING:
    from agl_k8s.testing.objects import ChangeType, Key, ObjectStore


class GarbageCollector:
    """Follows a store, and deletes what has no owner left.

    An owner that is deleted in the foreground waits for everything that it owns, whatever
    ``blockOwnerDeletion`` says.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._unsubscribe: Callable[[], None] | None = None

    def start(self) -> None:
        """Collect what is there to collect, and from now on."""
        if self._unsubscribe is None:
            self._unsubscribe = self._store.subscribe(self._hear)
            for key in self._store.all_keys():
                self._examine(key)

    def stop(self) -> None:
        """Collect nothing, as while the controller manager is down."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None

    # ---------------------------------------------------------------------------------------------

    def _hear(self, type_: ChangeType, resource: str, item: Object) -> None:
        metadata = item["metadata"]
        namespace = metadata.get("namespace", "")
        if type_ != "DELETED":
            self._examine((resource, namespace, metadata["name"]))
            return
        for key in self._store.dependents_of(metadata["uid"]):
            self._examine(key)
        for ref in metadata.get("ownerReferences") or ():
            owner = self._store.key_of_uid(ref.get("uid", ""))
            if owner is not None:
                self._examine(owner)
        if namespace:
            self._examine(("namespaces", "", namespace))

    def _examine(self, key: Key) -> None:
        item = self._store.peek(key)
        if item is None:
            return
        finalizers = item["metadata"].get("finalizers", ())
        if "deletionTimestamp" not in item["metadata"]:
            self._check_owners(key, item)
        elif ORPHAN in finalizers:
            self._let_go(key, item)
        elif FOREGROUND in finalizers:
            dependents = self._store.dependents_of(item["metadata"]["uid"])
            self._empty(key, dependents, FOREGROUND)
        elif key[0] == "namespaces" and NAMESPACE_CONTENT in finalizers:
            self._empty(key, self._store.all_keys(key[2]), NAMESPACE_CONTENT)

    def _check_owners(self, key: Key, item: Object) -> None:
        refs = item["metadata"].get("ownerReferences") or ()
        there = [ref for ref in refs if self._is_there(ref.get("uid", ""), key[1])]
        if refs and not there:
            uid = item["metadata"]["uid"]
            self._store.delete(*key, uid=uid, propagation="Background")
        elif len(there) < len(refs):
            self._store.update(*key, lambda new: new["metadata"].update(ownerReferences=there))

    def _is_there(self, uid: str, namespace: str) -> bool:
        owner = self._store.key_of_uid(uid)
        return owner is not None and owner[1] in ("", namespace)

    def _let_go(self, key: Key, item: Object) -> None:
        owner = item["metadata"]["uid"]

        def orphan(dependent: Object) -> None:
            refs = dependent["metadata"].get("ownerReferences", ())
            dependent["metadata"]["ownerReferences"] = [r for r in refs if r.get("uid") != owner]

        for dependent in self._store.dependents_of(owner):
            if self._store.peek(dependent) is not None:
                self._store.update(*dependent, orphan)
        self._drop_finalizer(key, ORPHAN)

    def _empty(self, key: Key, contents: list[Key], finalizer: str) -> None:
        for content in contents:
            item = self._store.peek(content)
            if item is not None and "deletionTimestamp" not in item["metadata"]:
                self._store.delete(*content, propagation="Background")
        if not any(self._store.peek(content) for content in contents):
            self._drop_finalizer(key, finalizer)

    def _drop_finalizer(self, key: Key, finalizer: str) -> None:
        def drop(item: Object) -> None:
            finalizers = item["metadata"].get("finalizers", ())
            item["metadata"]["finalizers"] = [f for f in finalizers if f != finalizer]

        if self._store.peek(key) is not None:
            self._store.update(*key, drop)
