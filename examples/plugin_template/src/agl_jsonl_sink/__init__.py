"""Writes every captured event to a file, one JSON line each."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import min_len

from agl_core.hookspecs import hookimpl
from agl_core.interfaces import CaptureSink


@frozen(kw_only=True)
class JsonlSinkConfig:
    """The table ``[plugins.jsonl-sink]``."""

    path: str = field(default="events.jsonl", validator=min_len(1))
    """The file that lines are added to; it is made where it is missing."""
    types: tuple[str, ...] = ()
    """Only events of these types; empty: all."""


class JsonlSinkPlugin:
    """Hands over the sink."""

    Config = JsonlSinkConfig

    def __init__(self, config: JsonlSinkConfig) -> None:
        self._config = config

    @hookimpl
    def provide_capture_sink(self) -> CaptureSink:
        # Imported here, so that listing plugins loads nothing that only running needs.
        from agl_jsonl_sink.sink import JsonlSink

        return JsonlSink(self._config.path, frozenset(self._config.types))
