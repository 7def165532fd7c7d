"""The scheduler of the fake cluster: gives each pod a node."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from agl_k8s.testing.kinds import Object, Objects
from agl_k8s.testing.objects import ChangeType, Key, ObjectStore
from agl_k8s.testing.reporting import (
    condition_of,
    disrupt,
    is_met,
    is_over,
    post_event,
    set_condition,
)

COMPONENT = "default-scheduler"


class Scheduler:
    """Follows a store and binds pods to its nodes, in turn.

    Attributes:
        refuse: Says why a pod fits nowhere, whatever nodes there are; None where it may fit.
    """

    def __init__(
        self, store: ObjectStore, refuse: Callable[[Object], str | None] = lambda pod: None
    ) -> None:
        self.refuse = refuse
        self._store = store
        self._waiting: dict[Key, None] = {}
        self._node_keys: dict[Key, None] = {}
        self._turns = itertools.count()
        self._unsubscribe: Callable[[], None] | None = None

    def start(self) -> None:
        """Look at all pods that wait, and from now on at each that comes."""
        if self._unsubscribe is None:
            self._unsubscribe = self._store.subscribe(self._hear)
            self._node_keys = {key: None for key in self._store.all_keys("") if key[0] == "nodes"}
            for pod in self._store.list("pods", fields="spec.nodeName="):
                self._waiting[_key(pod)] = None
            self.retry()

    def stop(self) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None

    def retry(self) -> None:
        """Try again with the pods that fitted nowhere, as when ``refuse`` has changed."""
        for key in [*self._waiting]:
            self._schedule(key)

    def preempt(self, pod: Object) -> None:
        """End a pod for one of a higher priority."""
        text = f"{COMPONENT}: preempting to accommodate a higher priority pod"
        disrupt(self._store, pod, "PreemptionByScheduler", text)
        self._store.delete(*_key(pod), uid=pod["metadata"]["uid"])

    # ---------------------------------------------------------------------------------------------

    def _hear(self, type_: ChangeType, resource: str, item: Object) -> None:
        if resource == "nodes":
            self._node_keys[resource, "", item["metadata"]["name"]] = None
            self.retry()
        elif resource == "pods" and type_ == "ADDED" and not item["spec"].get("nodeName"):
            self._waiting[_key(item)] = None
            self._schedule(_key(item))
        elif resource == "pods" and type_ == "DELETED":
            self._waiting.pop(_key(item), None)
            if item["spec"].get("nodeName"):
                self.retry()

    def _schedule(self, key: Key) -> None:
        pod = self._store.peek(key)
        if pod is None or pod["spec"].get("nodeName") or is_over(pod):
            self._waiting.pop(key, None)
            return
        if "deletionTimestamp" in pod["metadata"]:
            return
        why = self.refuse(pod)
        node = None if why is not None else self._find(pod)
        if node is None:
            self._refuse(key, pod, why or self._explain())
            return
        time = self._store.time()

        def bind(item: Object) -> None:
            item["spec"]["nodeName"] = node
            set_condition(item["status"], "PodScheduled", "True", time)

        self._waiting.pop(key, None)
        self._store.update(*key, bind)

    def _find(self, pod: Object) -> str | None:
        wanted = pod["spec"].get("nodeSelector") or {}
        fitting = [
            node["metadata"]["name"]
            for node in self._nodes()
            if is_met(node, "Ready")
            and not (node.get("spec") or {}).get("unschedulable")
            and wanted.items() <= (node["metadata"].get("labels") or {}).items()
        ]
        return fitting[next(self._turns) % len(fitting)] if fitting else None

    def _nodes(self) -> Objects:
        found = [self._store.peek(key) for key in self._node_keys]
        return [node for node in found if node is not None]

    def _explain(self) -> str:
        count = len(self._nodes())
        return (
            f"0/{count} nodes are available: {count} node(s) didn't match Pod's node "
            "affinity/selector or were not ready. preemption: 0/"
            f"{count} nodes are available: Preemption is not helpful for scheduling."
        )

    def _refuse(self, key: Key, pod: Object, why: str) -> None:
        if condition_of(pod, "PodScheduled").get("message") == why:
            return
        time = self._store.time()

        def change(item: Object) -> None:
            set_condition(
                item["status"], "PodScheduled", "False", time, reason="Unschedulable", message=why
            )

        self._store.update(*key, change)
        post_event(self._store, pod, "Warning", "FailedScheduling", why, COMPONENT)


def _key(pod: Object) -> Key:
    return "pods", pod["metadata"]["namespace"], pod["metadata"]["name"]
