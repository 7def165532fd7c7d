"""A node of the fake cluster: the kubelet, which runs pods as processes of this machine.

Nothing is mounted: a container has no file system of its own, so it starts in a temporary folder
that the containers of its pod share (each has a ``HOME`` of its own beside it), ``volumeMounts``
and ``workingDir`` are ignored, and a volume only matters in that a missing Secret keeps its pod
from starting. Images are not looked at. A sidecar that ends is not started again.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from attrs import frozen

from agl_core.clock import Clock
from agl_k8s.testing.background import Background
from agl_k8s.testing.kinds import ApiStatus, Object, kind_of
from agl_k8s.testing.objects import ChangeType, ObjectStore
from agl_k8s.testing.pod_worker import PodWorker
from agl_k8s.testing.reporting import is_over, set_condition
from agl_k8s.testing.scripts import ScriptBook, ScriptFor

FOLLOW_SECONDS = 0.02


@frozen(kw_only=True)
class NodeTimings:
    """How long a node takes."""

    phase_delay_seconds: float = 0.0
    """From the end of the last container until the pod shows it; 1.1 in a real cluster."""
    retry_seconds: float = 0.05
    """Between looks at what keeps a container from starting; 1 to 8 in a real cluster."""
    deadline_scale: float = 1.0
    """What ``activeDeadlineSeconds`` of pods is multiplied by."""


class Kubelet:
    """One node.

    Args:
        store: Where its pods come from, and where it reports.
        clock: Times all delays.
        background: Where it runs.
        scripts: What pods do instead of their commands.
        name: Of the node.
        labels: Of the node, besides its host name.
        timings: How long things take.
    """

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        background: Background,
        scripts: ScriptBook,
        *,
        name: str,
        labels: dict[str, str] | None = None,
        timings: NodeTimings,
    ) -> None:
        self.name = name
        self.store = store
        self.clock = clock
        self.background = background
        self.scripts = scripts
        self.timings = timings
        self.is_up = asyncio.Event()
        self.root = Path(tempfile.mkdtemp(prefix="agl-node-"))
        self._labels = {"kubernetes.io/hostname": name} | (labels or {})
        self._workers: dict[str, PodWorker] = {}
        self._leaving: set[PodWorker] = set()
        self._unsubscribe: Callable[[], None] | None = None

    @property
    def script_for(self) -> ScriptFor | None:
        """Says what a pod does; None, or an answer of None, for its command. All nodes share it."""
        return self.scripts.choose

    @script_for.setter
    def script_for(self, choose: ScriptFor | None) -> None:
        self.scripts.choose = choose

    def start(self) -> None:
        """Join the cluster."""
        time = self.store.time()
        node: Object = {"metadata": {"name": self.name, "labels": self._labels}, "status": {}}
        set_condition(node["status"], "Ready", "True", time, reason="KubeletReady")
        self.is_up.set()
        self._unsubscribe = self.store.subscribe(self._hear)
        self.store.create("nodes", None, node)  # pods that wait for one are bound at once

    async def close(self) -> None:
        """End every process."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        self.is_up.clear()
        workers = {*self._workers.values(), *self._leaving}
        await asyncio.gather(*(worker.kill() for worker in workers))
        shutil.rmtree(self.root, ignore_errors=True)

    def down(self) -> None:
        """Stop the kubelet: containers run on, nothing is reported, started or ended."""
        self.is_up.clear()

    def up(self) -> None:
        """Start it again: what happened meanwhile is reported now."""
        if self.is_up.is_set():
            return
        self.is_up.set()
        self._set_ready("True", "KubeletReady", "kubelet is posting ready status")
        there = self.store.list("pods", fields=f"spec.nodeName={self.name}")
        uids = {pod["metadata"]["uid"] for pod in there}
        for uid, worker in [*self._workers.items()]:
            if uid not in uids:
                self._forget(uid, worker)
            else:
                worker.report()
        for pod in there:
            self._see(pod)

    async def lose(self) -> None:
        """Let the machine die: its containers are gone, and nothing is heard of it again."""
        self.down()
        await asyncio.gather(*(worker.kill() for worker in self._workers.values()))
        self._set_ready("Unknown", "NodeStatusUnknown", "Kubelet stopped posting node status.")

    def evict(self, pod: Object, message: str = "The node was low on resource: memory. ") -> None:
        """End a pod because the node itself runs short."""
        worker = self._workers.get(pod["metadata"]["uid"])
        if worker is not None:
            worker.evict(message, is_own_fault=False)

    # -- Logs -------------------------------------------------------------------------------------

    def read(self, namespace: str, pod: str, container: str) -> bytes | ApiStatus:
        """All that a container has written; see ``LogSource``."""
        if not self.is_up.is_set():
            text = f'Get "https://{self.name}:10250/containerLogs": dial tcp: connection refused'
            return ApiStatus(500, "InternalError", f"Internal error occurred: {text}")
        item = self.store.peek(("pods", namespace, pod))
        if item is None:
            return kind_of("pods").not_found(pod)
        worker = self._workers.get(item["metadata"]["uid"])
        found = None if worker is None else worker.read_log(container)
        return b"unable to retrieve container logs for containerd://0" if found is None else found

    async def follow(self, namespace: str, pod: str, container: str) -> AsyncIterator[bytes]:
        """The same as it is written, until the container ends."""
        sent = 0
        item = self.store.peek(("pods", namespace, pod))
        worker = None if item is None else self._workers.get(item["metadata"]["uid"])
        while worker is not None:
            is_last = not worker.is_running(container)
            text = worker.read_log(container) or b""
            if len(text) > sent:
                yield text[sent:]
                sent = len(text)
            if is_last:
                return
            await self.clock.sleep(FOLLOW_SECONDS)

    # ---------------------------------------------------------------------------------------------

    def _hear(self, type_: ChangeType, resource: str, item: Object) -> None:
        is_here = resource == "pods" and item["spec"].get("nodeName") == self.name
        if not is_here or not self.is_up.is_set():
            return
        if type_ == "DELETED":
            uid = item["metadata"]["uid"]
            if uid in self._workers:
                self._forget(uid, self._workers[uid])
        else:
            self._see(item)

    def _see(self, pod: Object) -> None:
        metadata = pod["metadata"]
        worker = self._workers.get(metadata["uid"])
        if worker is None and not is_over(pod):
            worker = self._workers[metadata["uid"]] = PodWorker(self, pod)
            worker.start()
        if worker is not None and "deletionTimestamp" in metadata:
            worker.end(metadata.get("deletionGracePeriodSeconds", 0))

    def _forget(self, uid: str, worker: PodWorker) -> None:
        del self._workers[uid]
        self._leaving.add(worker)

        async def clean() -> None:
            await worker.kill()
            worker.remove_files()
            self._leaving.discard(worker)

        self.background.spawn(clean())

    def _set_ready(self, value: str, reason: str, message: str) -> None:
        time = self.store.time()

        def change(node: Object) -> None:
            set_condition(node["status"], "Ready", value, time, reason=reason, message=message)

        if self.store.peek(("nodes", "", self.name)) is not None:
            self.store.update("nodes", None, self.name, change)
