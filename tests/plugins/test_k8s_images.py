"""The breaker of an image, by a clock that is moved by hand."""

from __future__ import annotations

from typing import Any

import pytest

from agl_core.errors import Invalid
from agl_core.testing.clock import FakeClock
from agl_k8s.images import MAX_IMAGES, Images, images_of


def pod(*images: str, init: str | None = None) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "containers": [{"name": f"c{i}", "image": x} for i, x in enumerate(images)]
    }
    if init:
        spec["initContainers"] = [{"name": "first", "image": init}]
    return {"spec": spec}


def job(*images: str, init: str | None = None) -> dict[str, Any]:
    return {"spec": {"template": pod(*images, init=init)}}


def failing(clock: FakeClock, *, times: int = 3, failures: int = 3) -> Images:
    images = Images(failures, 300.0, clock)
    for _ in range(times):
        images.failed("bad:1", "not found")
    return images


def test_images_of_all_containers_count() -> None:
    assert list(images_of(pod("a:1", "b:1", init="c:1"))) == ["c:1", "a:1", "b:1"]
    images = failing(FakeClock())
    for refused in (job("bad:1"), job("good:1", "bad:1"), job("good:1", init="bad:1")):
        with pytest.raises(Invalid, match="'bad:1' could not be pulled 3 times in a row"):
            images.check(refused)
    images.check(job("good:1"))


def test_fewer_failures_than_set_refuse_nothing() -> None:
    failing(FakeClock(), times=2).check(job("bad:1"))


def test_zero_switches_it_off() -> None:
    failing(FakeClock(), times=50, failures=0).check(job("bad:1"))


def test_one_trial_passes_when_its_time_has_come() -> None:
    clock = FakeClock()
    images = failing(clock)
    clock.advance(299.0)
    with pytest.raises(Invalid, match="another try is made in 1 seconds"):
        images.check(job("bad:1"))
    clock.advance(1.0)
    images.check(job("bad:1"))
    with pytest.raises(Invalid):
        images.check(job("bad:1"))
    images.failed("bad:1", "still not found")
    clock.advance(299.0)
    with pytest.raises(Invalid, match="4 times in a row, the last time because still not found"):
        images.check(job("bad:1"))


def test_pod_that_runs_closes_it() -> None:
    images = failing(FakeClock())
    images.pulled(pod("good:1"))
    with pytest.raises(Invalid):
        images.check(job("bad:1"))
    images.pulled(pod("good:1", "bad:1"))
    images.check(job("bad:1"))
    # And it counts from the start again.
    images.failed("bad:1", "not found")
    images.check(job("bad:1"))


def test_memory_of_images_is_bounded() -> None:
    images = failing(FakeClock())
    for number in range(MAX_IMAGES):
        images.failed(f"other:{number}", "not found")
    images.check(job("bad:1"))
