"""The formats ``triplet`` and ``trajectory``: one JSON line per rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agl_core.interfaces import Exporter, ExportOptions
from agl_core.records import Event, Rollout
from agl_core.tokens import trajectory_line, triplet_line
from agl_core.wire import to_json
from agl_verl.guard import check_parameters, check_sampling, max_length, no_data_share
from agl_verl.no_data import NoDataCount

Line = Callable[..., dict[str, Any]]

_NO_DATA = "no_data"


class JsonLinesExporter(Exporter):
    """One format whose lines a function of ``agl_core.tokens`` makes.

    A line stands for every rollout, also for one with nothing to train: its ``skipped`` says why.
    """

    media_type = "application/x-ndjson"

    def __init__(self, format_name: str, line: Line) -> None:
        self.format = format_name
        self._line = line

    def begin(self, options: ExportOptions) -> bytes:
        check_parameters(options)
        return b""

    def encode(self, rollout: Rollout, events: Sequence[Event], options: ExportOptions) -> bytes:
        line = self._line(rollout, events, policy=options.policy, max_length=max_length(options))
        check_sampling(rollout, events, _exported(line), options)
        _counted(options).add(line)
        return to_json(line) + b"\n"

    def finish(self, options: ExportOptions) -> bytes:
        share = no_data_share(options)
        if share is not None:
            _counted(options).check(share)
        return b""


def _counted(options: ExportOptions) -> NoDataCount:
    """Return what one export has counted so far."""
    count: NoDataCount = options.state.setdefault(_NO_DATA, NoDataCount())
    return count


def _exported(line: Mapping[str, Any]) -> set[str]:
    """Ids of the calls that a line has."""
    turns = [*line.get("triplets", ()), *(t for row in line.get("rows", ()) for t in row["turns"])]
    return {turn["call_id"] for turn in turns}


def exporters() -> list[Exporter]:
    """``triplet``: each trainable call; ``trajectory``: calls merged into rows."""
    return [
        JsonLinesExporter("triplet", triplet_line),
        JsonLinesExporter("trajectory", trajectory_line),
    ]
