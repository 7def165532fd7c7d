"""The store in memory: the default, which keeps nothing across a restart."""

from __future__ import annotations

from agl_core.clock import Clock
from agl_core.hookspecs import hookimpl
from agl_core.interfaces import Store
from agl_memory.store import MemoryConfig, MemoryStore

__all__ = ["MemoryConfig", "MemoryPlugin", "MemoryStore"]


class MemoryPlugin:
    """Keeps rollouts, events, the registry and resources in the memory of the service."""

    Config = MemoryConfig

    def __init__(self, config: MemoryConfig) -> None:
        self._config = config

    @hookimpl
    def provide_store(self, clock: Clock) -> Store:
        return MemoryStore(clock, self._config)
