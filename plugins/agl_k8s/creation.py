"""Making Jobs: at a bounded rate, and whatever the API server answers."""

from __future__ import annotations

import logging
from typing import Any

from agl_core.clock import Clock
from agl_core.errors import Invalid, Unavailable
from agl_k8s.api import KubeApi
from agl_k8s.config import K8sConfig
from agl_k8s.errors import KubeError, kind_of
from agl_k8s.names import INSTANCE_LABEL, rollout_id_of

log = logging.getLogger(__name__)

# Freed quota is noticed by trying again; a right that is missing needs a person.
QUOTA_SECONDS = 10.0
FORBIDDEN_SECONDS = 30.0
DELETED_SECONDS = 1.0
UNREACHABLE_SECONDS = 2.0


class Creation:
    """Creates Jobs; what an answer says of all Jobs holds all of them up."""

    def __init__(self, api: KubeApi, config: K8sConfig, clock: Clock) -> None:
        self._api = api
        self._config = config
        self._clock = clock
        self._next = clock.monotonic()
        self._blocked_until = clock.monotonic()

    async def until_ready(self) -> None:
        """Wait for the next creation's turn; for one caller at a time."""
        while (wait := max(self._next, self._blocked_until) - self._clock.monotonic()) > 0:
            await self._clock.sleep(wait)
        self._next = self._clock.monotonic() + 1.0 / self._config.creates_per_second

    async def create(self, job: dict[str, Any]) -> dict[str, Any]:
        """Create a Job, or find the one that an earlier try has made.

        Raises:
            Invalid: The API server will never take it, in its own words.
            Unavailable: Not now.
        """
        name = job["metadata"]["name"]
        try:
            return await self._api.create("jobs", job)
        except KubeError as exc:
            error = exc
        kind = kind_of(error)
        if kind == "exists":
            return await self._adopt(job)
        if kind == "unreachable":
            # The answer was lost, perhaps after the Job was made: its name tells.
            try:
                return await self._adopt(job)
            except KubeError as exc:
                raise self._hold(UNREACHABLE_SECONDS, exc) from exc
        if kind == "being_deleted":
            raise Unavailable(
                f"an earlier Job {name!r} is still being deleted",
                retry_after_seconds=DELETED_SECONDS,
            ) from error
        if kind == "invalid":
            raise Invalid(f"the API server refuses the Job: {error.message}") from error
        if kind == "quota":
            raise self._hold(QUOTA_SECONDS, error) from error
        if kind in ("forbidden", "namespace_terminating", "unauthorized"):
            log.error("no Job can be created", extra={"problem": error.message})
            raise self._hold(FORBIDDEN_SECONDS, error) from error
        raise self._hold(error.retry_after_seconds or 1.0, error) from error

    async def _adopt(self, job: dict[str, Any]) -> dict[str, Any]:
        metadata = job["metadata"]
        found = await self._api.get("jobs", metadata["name"])
        ours = metadata["labels"][INSTANCE_LABEL]
        instance = found["metadata"].get("labels", {}).get(INSTANCE_LABEL)
        if rollout_id_of(found) != rollout_id_of(job) or instance != ours:
            raise Invalid(
                f"a Job named {metadata['name']!r} exists in namespace {self._api.namespace!r} "
                "and is not this rollout's",
                hint="delete it, or give this service another plugins.k8s.instance or namespace",
            )
        if "deletionTimestamp" in found["metadata"]:
            raise Unavailable(
                f"an earlier Job {metadata['name']!r} is still being deleted",
                retry_after_seconds=DELETED_SECONDS,
            )
        return found

    def _hold(self, seconds: float, error: KubeError) -> Unavailable:
        """Nobody else need try before that."""
        self._blocked_until = max(self._blocked_until, self._clock.monotonic() + seconds)
        return Unavailable(
            f"no Job can be created now: {error.message}", retry_after_seconds=seconds
        )
