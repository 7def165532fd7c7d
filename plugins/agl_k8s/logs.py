"""What a container of a pod has printed, read through the API server while the pod exists."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from agl_core.clock import Clock
from agl_core.errors import Invalid, NotFound, Unavailable
from agl_core.redaction import RedactedStream
from agl_core.work_list import backoff
from agl_k8s.api import NO_LOG, KubeApi
from agl_k8s.errors import IDLE, KubeError, kind_of
from agl_k8s.names import ROLLOUT_LABEL, label_value
from agl_k8s.pod_view import AGENT, FINAL_PHASES

log = logging.getLogger(__name__)

START_SECONDS = 1.0
# A silence as long may also be a connection that is dead: it is asked for anew.
QUIET_SECONDS = 60.0


async def read_log(
    api: KubeApi,
    selector: str,
    rollout_id: str,
    attempt_id: str,
    *,
    container: str | None,
    tail_lines: int | None,
    follow: bool,
    clock: Clock,
) -> AsyncIterator[bytes]:
    """See ``Runner.logs``; ``selector`` is for the pods of this service."""
    selector += f",{ROLLOUT_LABEL}={label_value(rollout_id)}"
    async with api:
        try:
            pod = await _find(api, selector, attempt_id)
            name = _container_of(pod, container)
            while not _has_started(pod, name):
                if not follow or pod.get("status", {}).get("phase") in FINAL_PHASES:
                    raise NotFound(
                        f"container {name!r} of pod {pod['metadata']['name']!r} has not started",
                        hint="its events say why: `kubectl describe pod` shows them",
                    )
                await clock.sleep(START_SECONDS)
                pod = await _find(api, selector, attempt_id)
            reader = _Reader(api, clock, pod["metadata"]["name"], name, tail_lines, follow)
            redacted = RedactedStream()
            async with aclosing(reader.pieces()) as pieces:
                async for piece in pieces:
                    if shown := redacted.feed(piece):
                        yield shown
            if shown := redacted.finish():
                yield shown
        except KubeError as exc:
            if kind_of(exc) == "not_found":
                raise _gone(attempt_id) from exc
            raise Unavailable(f"the log cannot be read: {exc.message}", hint=exc.hint) from exc


class _Reader:
    """One container's log; a followed one goes on where its connection was cut."""

    def __init__(
        self,
        api: KubeApi,
        clock: Clock,
        pod: str,
        container: str,
        tail_lines: int | None,
        follow: bool,
    ) -> None:
        self._api = api
        self._clock = clock
        self._pod = pod
        self._container = container
        self._tail_lines = tail_lines
        self._follow = follow

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The log, until it ends.

        Raises:
            KubeError: It cannot be read; where it is followed, not for a cut connection.
            NotFound: The node no longer has it.
        """
        cuts = 0
        heard_at = self._clock.monotonic()
        since: int | None = None
        while True:
            try:
                stream = self._api.read_log(
                    self._pod,
                    self._container,
                    tail_lines=self._tail_lines if since is None else None,
                    since_seconds=since,
                    follow=self._follow,
                    idle_seconds=QUIET_SECONDS if self._follow else None,
                )
                is_first = True
                async with aclosing(stream) as pieces:
                    async for piece in pieces:
                        if is_first and piece.startswith(NO_LOG):
                            raise NotFound(
                                f"the node no longer has the log of container {self._container!r}"
                            )
                        is_first, cuts = False, 0
                        heard_at = self._clock.monotonic()
                        yield piece
                return
            except KubeError as exc:
                kind = kind_of(exc)
                if kind == "not_found" and since is not None:
                    return  # the pod went while we were away
                if not self._follow or kind not in ("unreachable", "busy"):
                    raise
                is_quiet = exc.reason == IDLE
                if not is_quiet:
                    cuts += 1
                    log.warning(
                        "the log's connection was cut; some lines may come twice",
                        extra={"pod": self._pod, "problem": exc.message},
                    )
                    await self._clock.sleep(backoff(cuts))
            # Kubernetes counts whole seconds. A quiet agent's last line is not to come every time.
            passed = self._clock.monotonic() - heard_at
            since = max(1, int(passed)) if is_quiet else math.ceil(passed) + 1


async def _find(api: KubeApi, selector: str, attempt_id: str) -> Mapping[str, Any]:
    """The pod that is an attempt: names tell nothing, its uid does."""
    for pod in (await api.list("pods", label_selector=selector)).items:
        if pod["metadata"]["uid"] == attempt_id:
            return pod
    raise _gone(attempt_id)


def _container_of(pod: Mapping[str, Any], wanted: str | None) -> str:
    spec = pod["spec"]
    names = [c["name"] for kind in ("initContainers", "containers") for c in spec.get(kind) or ()]
    name = wanted or AGENT
    if name not in names:
        raise Invalid(
            f"pod {pod['metadata']['name']!r} has no container {name!r}",
            hint=f"it has {', '.join(names)}",
        )
    return name


def _has_started(pod: Mapping[str, Any], container: str) -> bool:
    status = pod.get("status") or {}
    statuses = [
        *(status.get("containerStatuses") or ()),
        *(status.get("initContainerStatuses") or ()),
    ]
    state = next((s.get("state") or {} for s in statuses if s.get("name") == container), {})
    return "running" in state or "terminated" in state


def _gone(attempt_id: str) -> NotFound:
    return NotFound(
        f"the cluster has no pod with the uid {attempt_id!r}",
        hint="pods of rollouts that are over are deleted; what was kept of failed ones are events",
    )
