"""What the controller manager does about nodes that are lost or deleted."""

from __future__ import annotations

from collections.abc import Callable

from agl_core.clock import Clock
from agl_k8s.testing.background import Background
from agl_k8s.testing.kinds import Object, Objects
from agl_k8s.testing.objects import ChangeType, ObjectStore
from agl_k8s.testing.reporting import condition_of, disrupt, is_over, set_condition

UNREACHABLE = "node.kubernetes.io/unreachable"
GONE_SECONDS = 20.0


class NodeController:
    """Evicts the pods of nodes that do not answer, and clears away those of nodes that are gone.

    Unlike a real one it does so for the last node too.

    Args:
        store: What it follows.
        clock: Times all delays.
        background: Where it runs.
        scale: What its delays are multiplied by: the ``tolerationSeconds`` of pods, and the time
            until the pods of a deleted node are cleared away.
    """

    def __init__(
        self, store: ObjectStore, clock: Clock, background: Background, *, scale: float = 1.0
    ) -> None:
        self._store = store
        self._clock = clock
        self._background = background
        self._scale = scale
        self._unsubscribe: Callable[[], None] | None = None

    def start(self) -> None:
        if self._unsubscribe is None:
            self._unsubscribe = self._store.subscribe(self._hear)
            for node in self._store.list("nodes"):
                self._hear("MODIFIED", "nodes", node)
            names = {node["metadata"]["name"] for node in self._store.list("nodes")}
            for pod in self._store.list("pods"):
                if pod["spec"].get("nodeName", "") not in {*names, ""}:
                    self._later(GONE_SECONDS, pod, self._clear_away)
                self._hear("MODIFIED", "pods", pod)

    def stop(self) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None

    # ---------------------------------------------------------------------------------------------

    def _hear(self, type_: ChangeType, resource: str, item: Object) -> None:
        name = item["metadata"]["name"]
        if resource == "nodes" and type_ == "DELETED":
            for pod in self._pods_on(name):
                self._later(GONE_SECONDS, pod, self._clear_away)
        elif resource == "nodes" and condition_of(item, "Ready").get("status") == "Unknown":
            self._lose(item)
        elif resource == "pods" and type_ == "MODIFIED" and _is_ending_nowhere(item):
            self._later(GONE_SECONDS, item, self._end_unscheduled)

    def _pods_on(self, node: str) -> Objects:
        return self._store.list("pods", fields=f"spec.nodeName={node}")

    def _later(self, seconds: float, pod: Object, act: Callable[[Object], None]) -> None:
        async def wait() -> None:
            await self._clock.sleep(seconds * self._scale)
            metadata = pod["metadata"]
            present = self._store.peek(("pods", metadata["namespace"], metadata["name"]))
            if present is None or present["metadata"]["uid"] != metadata["uid"]:
                return
            if self._unsubscribe is not None and not is_over(present):
                act(present)

        self._background.spawn(wait())

    def _lose(self, node: Object) -> None:
        name, time = node["metadata"]["name"], self._store.time()

        def taint(item: Object) -> None:
            taints = item.setdefault("spec", {}).setdefault("taints", [])
            taints.append({"key": UNREACHABLE, "effect": "NoExecute", "timeAdded": time})

        def unready(item: Object) -> None:
            set_condition(item["status"], "Ready", "False", time, reason="NodeNotReady")

        if any(t["key"] == UNREACHABLE for t in (node.get("spec") or {}).get("taints") or ()):
            return
        self._store.update("nodes", None, name, taint)
        for pod in self._pods_on(name):
            if is_over(pod):
                continue
            metadata = pod["metadata"]
            self._store.update("pods", metadata["namespace"], metadata["name"], unready)
            tolerations = [
                t
                for t in pod["spec"].get("tolerations") or ()
                if t.get("key") in (None, UNREACHABLE)
            ]
            if all(t.get("tolerationSeconds") is not None for t in tolerations):
                seconds = min((t["tolerationSeconds"] for t in tolerations), default=0)
                self._later(seconds, pod, self._evict)

    def _evict(self, pod: Object) -> None:
        node = self._store.peek(("nodes", "", pod["spec"]["nodeName"]))
        if node is None or condition_of(node, "Ready").get("status") == "True":
            return
        text = "Taint manager: deleting due to NoExecute taint"
        disrupt(self._store, pod, "DeletionByTaintManager", text)
        self._delete(pod, None)

    def _clear_away(self, pod: Object) -> None:
        if self._store.peek(("nodes", "", pod["spec"]["nodeName"])) is not None:
            return
        text = "PodGC: node no longer exists"
        disrupt(self._store, pod, "DeletionByPodGC", text, phase="Failed")
        self._delete(pod, 0)

    def _end_unscheduled(self, pod: Object) -> None:
        metadata = pod["metadata"]

        def fail(item: Object) -> None:
            item["status"]["phase"] = "Failed"

        self._store.update("pods", metadata["namespace"], metadata["name"], fail)
        self._delete(pod, 0)

    def _delete(self, pod: Object, grace_seconds: int | None) -> None:
        metadata = pod["metadata"]
        place = (metadata["namespace"], metadata["name"])
        if self._store.peek(("pods", *place)) is not None:
            uid = metadata["uid"]
            self._store.delete("pods", *place, uid=uid, grace_seconds=grace_seconds)


def _is_ending_nowhere(pod: Object) -> bool:
    """Whether a pod that is to end has no node that could end it."""
    is_ending = "deletionTimestamp" in pod["metadata"]
    return is_ending and not pod["spec"].get("nodeName") and not is_over(pod)
