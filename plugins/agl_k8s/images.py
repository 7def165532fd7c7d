"""Images that nobody can pull: a circuit breaker for each.

A wrong name costs every rollout that asks for it a place for ``start_grace_seconds``. After some of
them have failed so the next ones fail at once, but for one trial now and then.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import define

from agl_core.clock import Clock
from agl_core.errors import Invalid

log = logging.getLogger(__name__)

# One entry per failing image. More than these at once is no typing error any more.
MAX_IMAGES = 1000


@define
class _Faults:
    count: int
    message: str
    """Of the last one."""
    next_trial: float
    """By the monotonic clock; until then the breaker is open."""


class Images:
    """Knows which images could not be pulled lately.

    Args:
        failures: How many pods in a row open an image's breaker; 0: never.
        retry_seconds: Between two trials while it is open.
        clock: Tells the time.
    """

    def __init__(self, failures: int, retry_seconds: float, clock: Clock) -> None:
        self._failures = failures
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._faults: dict[str, _Faults] = {}

    def failed(self, image: str, message: str) -> None:
        """A pod has given up waiting for this image."""
        count = self._faults[image].count + 1 if image in self._faults else 1
        trial = self._clock.monotonic() + self._retry_seconds
        self._faults[image] = _Faults(count, message, trial)
        if count == self._failures:
            log.warning("no rollout with this image is started", extra={"image": image})
        if len(self._faults) > MAX_IMAGES:
            del self._faults[next(iter(self._faults))]

    def pulled(self, pod: Mapping[str, Any]) -> None:
        """A pod's containers run: its images are there."""
        if not self._faults:
            return
        for image in images_of(pod):
            faults = self._faults.pop(image, None)
            if faults is not None and 0 < self._failures <= faults.count:
                log.info("the image can be pulled again", extra={"image": image})

    def check(self, job: Mapping[str, Any]) -> None:
        """Let a Job be created, unless an image of it is known to be out of reach.

        Raises:
            Invalid: One is; the message says why.
        """
        if not self._failures:
            return
        now = self._clock.monotonic()
        for image in images_of(job["spec"]["template"]):
            faults = self._faults.get(image)
            if faults is None or faults.count < self._failures:
                continue
            if now < faults.next_trial:
                raise Invalid(
                    f"image {image!r} could not be pulled {faults.count} times in a row, "
                    f"the last time because {faults.message}",
                    hint=f"another try is made in {faults.next_trial - now:.0f} seconds",
                )
            faults.next_trial = now + self._retry_seconds


def images_of(pod: Mapping[str, Any]) -> Iterator[str]:
    """The images of a pod or a template's containers."""
    spec = pod["spec"]
    for kind in ("initContainers", "containers"):
        for container in spec.get(kind) or ():
            if image := container.get("image"):
                yield image
