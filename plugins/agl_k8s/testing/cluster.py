"""A Kubernetes cluster for tests: real HTTP, real processes, no Kubernetes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType

from agl_core.clock import Clock, SystemClock
from agl_k8s.testing import operations
from agl_k8s.testing.background import Background
from agl_k8s.testing.faults import Faults
from agl_k8s.testing.http import FakeApiServer, SeenRequest
from agl_k8s.testing.job_controller import JobController
from agl_k8s.testing.kinds import ApiStatus, Object, kind_of
from agl_k8s.testing.node import Kubelet, NodeTimings
from agl_k8s.testing.node_controller import NodeController
from agl_k8s.testing.objects import ObjectStore
from agl_k8s.testing.scheduler import Scheduler
from agl_k8s.testing.scripts import ScriptBook, ScriptFor

NAMESPACE = "default"
TOKEN = "fake-token"


class FakeCluster:
    """API server, Job controller, scheduler and nodes; open as an async context manager.

    What a part of it runs into is raised when it is closed. On leaving, every process that it has
    started is dead.

    Args:
        clock: Times everything but the processes.
        backoff_scale: What the Job controller's waits are multiplied by: 10, 20, 40 seconds after
            failures, 1, 2, 4 after refused pods. So are those about lost nodes: 300 seconds until
            eviction, 20 until the pods of a deleted node are cleared away.
        deadline_scale: What ``activeDeadlineSeconds`` of Jobs and pods is multiplied by.
        phase_delay_seconds: From the end of a container until its pod shows it.
        job_delay_seconds: From the end of a pod until its Job shows it.
        retry_seconds: Between looks at what keeps a container from starting.
        script_for: Says what a pod does instead of its command, see ``agl_k8s.testing.scripts``.
        node_names: The nodes; more can be added.
        namespaces: Made at the start.
    """

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        backoff_scale: float = 0.01,
        deadline_scale: float = 1.0,
        phase_delay_seconds: float = 0.01,
        job_delay_seconds: float = 0.01,
        retry_seconds: float = 0.05,
        script_for: ScriptFor | None = None,
        node_names: Sequence[str] = ("node-1",),
        namespaces: tuple[str, ...] = (NAMESPACE,),
    ) -> None:
        self._clock = clock or SystemClock()
        self._timings = NodeTimings(
            phase_delay_seconds=phase_delay_seconds,
            retry_seconds=retry_seconds,
            deadline_scale=deadline_scale,
        )
        self._node_names = node_names
        self._background = Background(self._clock)
        self._scripts = ScriptBook(script_for)
        self._stack = AsyncExitStack()
        self.store = ObjectStore(self._clock)
        self.nodes: dict[str, Kubelet] = {}
        self.scheduler = Scheduler(self.store, self._refuse)
        self.node_controller = NodeController(
            self.store, self._clock, self._background, scale=backoff_scale
        )
        self.job_controller = JobController(
            self.store,
            self._clock,
            self._background,
            backoff_scale=backoff_scale,
            deadline_scale=deadline_scale,
            delay_seconds=job_delay_seconds,
            companions=(self.store.garbage_collector, self.node_controller),
        )
        """``stop()`` and ``start()`` take the whole controller manager down and up."""
        self.api_server = FakeApiServer(
            self.store, self._clock, logs=_NodeLogs(self), namespaces=namespaces
        )

    async def __aenter__(self) -> FakeCluster:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.api_server)
            stack.push_async_callback(self._end_parts)
            self.scheduler.start()
            for name in self._node_names:
                self.add_node(name)
            self.job_controller.start()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()
        if error is None and self._background.errors:
            raise self._background.errors[0]

    @property
    def url(self) -> str:
        return self.api_server.url

    @property
    def faults(self) -> Faults:
        return self.api_server.faults

    @property
    def requests(self) -> list[SeenRequest]:
        """Every request that came, in order."""
        return self.api_server.requests

    @property
    def node(self) -> Kubelet:
        """The first node."""
        return self.nodes[self._node_names[0]]

    def add_node(self, name: str, labels: dict[str, str] | None = None) -> Kubelet:
        """Let a node join."""
        node = self.nodes[name] = Kubelet(
            self.store,
            self._clock,
            self._background,
            self._scripts,
            name=name,
            labels=labels,
            timings=self._timings,
        )
        node.start()
        return node

    def write_kubeconfig(self, path: Path, *, token: str = TOKEN) -> Path:
        """Write a kubeconfig for this cluster; returns its path."""
        path.write_text(
            f"""apiVersion: v1
kind: Config
current-context: fake
clusters:
- name: fake
  cluster: {{server: "{self.url}"}}
contexts:
- name: fake
  context: {{cluster: fake, user: fake, namespace: {NAMESPACE}}}
users:
- name: fake
  user: {{token: "{token}"}}
"""
        )
        path.chmod(0o600)
        return path

    def evict(self, pod: Object) -> None:
        """End a pod by the eviction API, as draining its node does."""
        metadata = pod["metadata"]
        operations.evict(self.store, metadata["namespace"], metadata["name"])

    async def restart_api_server(self) -> None:
        """Cut all connections, and let every resource version expire."""
        await self.api_server.restart()

    # ---------------------------------------------------------------------------------------------

    def _refuse(self, pod: Object) -> str | None:
        script = self._scripts.of(pod)
        return None if script is None else script.unschedulable

    async def _end_parts(self) -> None:
        self.job_controller.stop()
        self.scheduler.stop()
        for node in self.nodes.values():
            node.is_up.clear()
        await self._background.close()
        for node in self.nodes.values():
            await node.close()


class _NodeLogs:
    """Finds the node that a pod's log is on."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster

    def read(self, namespace: str, pod: str, container: str) -> bytes | ApiStatus:
        node = self._node_of(namespace, pod)
        if node is None:
            return kind_of("pods").not_found(pod)
        return node.read(namespace, pod, container)

    async def follow(self, namespace: str, pod: str, container: str) -> AsyncIterator[bytes]:
        node = self._node_of(namespace, pod)
        if node is not None:
            async for piece in node.follow(namespace, pod, container):
                yield piece

    def _node_of(self, namespace: str, pod: str) -> Kubelet | None:
        item = self._cluster.store.peek(("pods", namespace, pod))
        return None if item is None else self._cluster.nodes.get(item["spec"].get("nodeName", ""))
