"""Runs agents as processes of this machine."""

from __future__ import annotations

from agl_core.clock import Clock
from agl_core.hookspecs import hookimpl
from agl_core.interfaces import Runner
from agl_local.config import LocalConfig

__all__ = ["LocalConfig", "LocalPlugin"]


class LocalPlugin:
    """A process group per attempt, adopted by the next controller when this one ends."""

    Config = LocalConfig

    def __init__(self, config: LocalConfig) -> None:
        self._config = config

    @hookimpl
    def provide_runner(self, clock: Clock) -> Runner:
        from agl_local.runner import LocalRunner  # processes need Linux, listing plugins does not

        return LocalRunner(self._config, clock)
