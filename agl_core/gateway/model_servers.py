"""The registered servers as resolvers may look at them."""

from __future__ import annotations

from collections.abc import Sequence

from agl_core.gateway.engines import EngineClient
from agl_core.gateway.registry import Registry, root_of
from agl_core.interfaces import ServerAnswer
from agl_core.records import ModelServer


class RegisteredServers:
    """Registry and upstream client of the gateway, narrowed to ``interfaces.ModelServers``."""

    def __init__(self, registry: Registry, engines: EngineClient) -> None:
        self._registry = registry
        self._engines = engines

    def registered(self) -> Sequence[ModelServer]:
        return self._registry.servers

    def inflight(self, server: ModelServer) -> int:
        return self._registry.inflight(server.key)

    async def get(
        self, server: ModelServer, path: str, *, seconds: float, limit_bytes: int
    ) -> ServerAnswer:
        return await self._engines.read(
            root_of(server.endpoint), path, server.credential, seconds, limit_bytes
        )
