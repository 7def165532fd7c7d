"""A cluster for the tests: the fake one, or with AGL_TEST_CLUSTER=1 that of KUBECONFIG."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agl_k8s.testing import FakeCluster
from agl_k8s.testing.clusters import ClusterUnderTest, fake_cluster, real_cluster

IS_REAL = os.environ.get("AGL_TEST_CLUSTER") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A real cluster takes its time, and cannot do what only a fake is told to."""
    if not IS_REAL:
        return
    here = Path(__file__).parent
    for item in items:
        if not item.path.is_relative_to(here):
            continue
        if item.get_closest_marker("cluster") is None:
            item.add_marker(pytest.mark.skip(reason="needs the fake cluster"))
        else:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[ClusterUnderTest]:
    if IS_REAL:
        image = os.environ.get("AGL_TEST_IMAGE")
        async with real_cluster(os.environ["KUBECONFIG"], image) as found:
            yield found
    else:
        async with fake_cluster(tmp_path) as made:
            yield made


@pytest.fixture
def fake(cluster: ClusterUnderTest) -> FakeCluster:
    assert cluster.fake is not None
    return cluster.fake
