"""The whole service and model servers on loopback, opened as a test needs them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from agl_core.testing.fake_vllm import FakeVllm, saying
from agl_core.testing.raw_http import Script
from agl_core.testing.service import RunningService, running_service

OpenService = Callable[..., Awaitable[RunningService]]
OpenVllm = Callable[..., Awaitable[FakeVllm]]


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def open_service(stack: AsyncExitStack) -> OpenService:
    """Opens a service: gateway settings by name, all else as ``running_service`` takes it."""

    async def open_(
        *, tables: dict[str, Any] | None = None, plugins: tuple[object, ...] = (), **gateway: Any
    ) -> RunningService:
        merged = {**(tables or {}), "gateway": gateway}
        return await stack.enter_async_context(running_service(merged, plugins=plugins))

    return open_


@pytest.fixture
async def open_vllm(stack: AsyncExitStack) -> OpenVllm:
    """Opens a model server; without a script it answers each call with four tokens."""

    async def open_(script: Script | None = None) -> FakeVllm:
        return await stack.enter_async_context(FakeVllm(script or saying()))

    return open_


@pytest.fixture
async def manual_vllm(stack: AsyncExitStack) -> FakeVllm:
    """A model server whose requests the test answers itself."""
    return await stack.enter_async_context(FakeVllm())


@pytest.fixture
async def world(open_service: OpenService, manual_vllm: FakeVllm) -> RunningService:
    """A service with one rollout ``r`` and the manual server as its model ``m``."""
    service = await open_service()
    await service.register(manual_vllm.endpoint)
    await service.rollout("r")
    return service
