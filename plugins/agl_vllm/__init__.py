"""Routes to vLLM servers: which of the registered ones gets a call."""

from __future__ import annotations

from agl_core.clock import Clock
from agl_core.hookspecs import hookimpl
from agl_core.interfaces import ModelServers, RouteResolver
from agl_vllm.loads import ServerLoads
from agl_vllm.resolver import VllmConfig, VllmRouteResolver

__all__ = ["VllmConfig", "VllmPlugin", "VllmRouteResolver"]


class VllmPlugin:
    """Balances calls over the registered vLLM servers."""

    Config = VllmConfig

    def __init__(self, config: VllmConfig) -> None:
        self._config = config

    @hookimpl
    def provide_route_resolver(self, clock: Clock, servers: ModelServers) -> RouteResolver:
        seconds = self._config.load_seconds
        loads = None if seconds is None else ServerLoads(seconds, clock, servers)
        return VllmRouteResolver(self._config, loads)
