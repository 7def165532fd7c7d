"""Which of several controllers acts: the one that holds a Lease of the cluster.

The clocks of two machines are never compared. The holder counts from before its last renewal was
sent and stops at two thirds of the lease; others count the whole lease from the moment at which
they last saw it change. The last third is for what is under way when the holder stops.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable
from typing import Any, Protocol, TypeVar

from agl_core.clock import Clock
from agl_core.errors import ConfigError
from agl_k8s.errors import IDLE, KubeError, kind_of, no_answer
from agl_k8s.times import text_of

log = logging.getLogger(__name__)

T = TypeVar("T")

HELD_SHARE = 2 / 3
RENEWALS_PER_LEASE = 5
RELEASE_TRIES = 3


class LeaseApi(Protocol):
    """What is asked of the API server."""

    async def get(self, resource: str, name: str) -> dict[str, Any]: ...

    async def create(self, resource: str, body: dict[str, Any]) -> dict[str, Any]: ...

    async def replace(self, resource: str, name: str, body: dict[str, Any]) -> dict[str, Any]: ...


class Leadership:
    """A claim on a lease.

    Args:
        api: Of the cluster.
        name: The Lease, the same for all who compete.
        identity: This process; no other may ever have had it.
        seconds: How long after the holder's last sign of life another takes over.
        clock: Only its monotonic time decides anything.
    """

    def __init__(
        self, api: LeaseApi, name: str, identity: str, *, seconds: float, clock: Clock
    ) -> None:
        self.lost = asyncio.Event()
        """Set when the lease is, or may soon be, another's; work must have stopped by then."""
        self._api = api
        self._name = name
        self._identity = identity
        self._seconds = seconds
        self._pause_seconds = seconds / RENEWALS_PER_LEASE
        self._clock = clock
        self._held_until = float("-inf")
        self._lease: dict[str, Any] | None = None
        self._seen_spec: dict[str, Any] | None = None
        self._seen_at = 0.0
        self._has_written = False
        self._is_released = False
        self._renewing: asyncio.Task[None] | None = None

    @property
    def is_held(self) -> bool:
        """Whether to act now; ask before each step."""
        return not self._is_released and self._clock.monotonic() < self._held_until

    async def acquire(self) -> None:
        """Wait until the lease is ours; it is renewed from then on, until lost or released.

        Raises:
            ConfigError: We may not use leases here.
        """
        assert self._renewing is None or self._renewing.done(), "it is held already"
        self.lost.clear()
        self._is_released = False
        waits_for: str | None = None
        while True:
            try:
                await self._within(2 * self._pause_seconds, self._try_to_take())
            except KubeError as exc:
                self._check_rights(exc)
                if kind_of(exc) not in ("exists", "conflict"):  # another was faster
                    extra = {"lease": self._name, "problem": exc.message}
                    log.warning("the lease cannot be had for the moment", extra=extra)
            if self.is_held:
                break
            holder = (self._seen_spec or {}).get("holderIdentity")
            if holder and holder != waits_for:
                waits_for = holder
                log.info("waiting for a lease", extra={"lease": self._name, "holder": holder})
            await self._clock.sleep(self._pause_seconds * random.uniform(0.8, 1.2))
        log.info("holding a lease", extra={"lease": self._name, "holder": self._identity})
        self._renewing = asyncio.create_task(self._renew_until_lost())

    async def release(self) -> None:
        """Give the lease up, so that another need not wait for its end; work must have stopped."""
        # A renewal that is answered just now must not make it held again.
        self._is_released = True
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
            self._renewing = None
        self._held_until = float("-inf")
        if not self._has_written:
            return
        try:
            await self._within(2 * self._pause_seconds, self._give_up())
        except KubeError as exc:
            log.warning(
                "a lease was not released, it runs out by itself",
                extra={"lease": self._name, "problem": exc.message},
            )

    # ---------------------------------------------------------------------------------------------

    async def _renew_until_lost(self) -> None:
        pause = self._pause_seconds
        while self.is_held:
            await self._clock.sleep(min(pause, self._left()))
            try:
                # A call may hang on a dead connection, and the next one take another.
                await self._within(min(self._pause_seconds, self._left()), self._renew())
                pause = self._pause_seconds
            except Exception as exc:
                expected = isinstance(exc, KubeError)
                extra = {"lease": self._name, "problem": str(exc)}
                log.warning("a lease was not renewed", extra=extra, exc_info=not expected)
                pause = self._pause_seconds / 3
        self.lost.set()
        log.error("a lease is lost", extra={"lease": self._name})

    async def _renew(self) -> None:
        try:
            if self._lease is not None:
                await self._write(self._lease)
                return
        except KubeError as exc:
            self._lease = None  # it was changed, or the answer to a renewal was lost
            if kind_of(exc) not in ("conflict", "not_found"):
                raise
        await self._try_to_take(is_renewal=True)

    async def _try_to_take(self, *, is_renewal: bool = False) -> None:
        """Look at the lease, and write it if it is free, ours or has run out."""
        try:
            lease = await self._api.get("leases", self._name)
        except KubeError as exc:
            if kind_of(exc) != "not_found":
                raise
            lease = None
        if lease is not None:
            spec = lease.get("spec") or {}
        else:
            # Its holder does not know yet that someone has deleted it.
            spec = (self._seen_spec or {}) | {"isDeleted": True}
        if spec != self._seen_spec:
            self._seen_spec, self._seen_at = spec, self._clock.monotonic()
        if spec.get("holderIdentity") in (None, "", self._identity):
            await self._write(lease)
        elif is_renewal:
            self._held_until = float("-inf")
        elif self._clock.monotonic() - self._seen_at >= self._promised_seconds(spec):
            await self._write(lease)

    async def _write(self, lease: dict[str, Any] | None) -> None:
        sent_at = self._clock.monotonic()
        self._has_written = True
        if lease is None:
            written = await self._api.create("leases", self._with_spec({}, {}))
        else:
            body = self._with_spec(lease.get("metadata") or {}, lease.get("spec") or {})
            written = await self._api.replace("leases", self._name, body)
        self._lease, self._seen_spec = written, written.get("spec") or {}
        self._held_until = sent_at + self._seconds * HELD_SHARE

    def _with_spec(self, metadata: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
        now = text_of(self._clock.now(), micro=True)
        spec = old | {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, math.ceil(self._seconds)),
            "renewTime": now,
        }
        if old.get("holderIdentity") != self._identity:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = (old.get("leaseTransitions") or 0) + bool(old)
        return self._object(metadata, spec)

    def _object(self, metadata: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata | {"name": self._name},
            "spec": spec,
        }

    async def _give_up(self) -> None:
        # A write that was under way when it was cancelled may still arrive in between.
        for attempt in range(1, RELEASE_TRIES + 1):
            try:
                lease = await self._api.get("leases", self._name)
                spec = lease.get("spec") or {}
                if spec.get("holderIdentity") != self._identity:
                    return
                free = spec | {
                    "holderIdentity": "",
                    "leaseDurationSeconds": 1,
                    "renewTime": text_of(self._clock.now(), micro=True),
                }
                body = self._object(lease["metadata"], free)
                await self._api.replace("leases", self._name, body)
                return
            except KubeError as exc:
                if kind_of(exc) == "not_found":
                    return
                if kind_of(exc) != "conflict" or attempt == RELEASE_TRIES:
                    raise

    def _check_rights(self, error: KubeError) -> None:
        """What no waiting mends is told at once."""
        is_namespace_missing = error.status == 404 and error.message.startswith("namespaces ")
        if is_namespace_missing or kind_of(error) in (
            "forbidden",
            "invalid",
            "namespace_terminating",
        ):
            raise ConfigError(
                f"the lease {self._name!r} cannot be used: {error.message}",
                hint="allow get, create and update of leases.coordination.k8s.io in the namespace, "
                "or set plugins.k8s.lease = false where there is one controller only",
            ) from error

    def _promised_seconds(self, spec: dict[str, Any]) -> float:
        """How long the holder may rely on its lease; it may be configured unlike us."""
        promised = spec.get("leaseDurationSeconds")
        return float(promised) if isinstance(promised, int) and promised > 0 else self._seconds

    def _left(self) -> float:
        return max(0.0, self._held_until - self._clock.monotonic())

    async def _within(self, seconds: float, work: Awaitable[T]) -> T:
        """The result, or an error after ``seconds`` of our clock: a call may hang for longer."""
        running = asyncio.ensure_future(work)
        waiting = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                return running.result()
            raise no_answer(f"lease {self._name}", IDLE, f"no answer in {seconds:.1f} seconds")
        finally:
            for task in (running, waiting):
                task.cancel()
            await asyncio.gather(running, waiting, return_exceptions=True)
