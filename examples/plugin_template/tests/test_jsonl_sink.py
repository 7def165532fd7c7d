"""The plugin by itself: its hooks, its settings and its sink."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from agl_jsonl_sink import JsonlSinkConfig, JsonlSinkPlugin
from agl_jsonl_sink.sink import JsonlSink

from agl_core.errors import PluginError
from agl_core.records import Event
from agl_core.testing.hooks import check_plugin


def event(seq: int, event_type: str) -> Event:
    return Event(
        seq=seq,
        event_type=event_type,
        rollout_id="r",
        attempt_id="a",
        timestamp=1.0,
        data={"text": "日本"},
    )


def test_the_hooks_are_typed_as_the_specs_are() -> None:
    assert check_plugin(JsonlSinkPlugin) == ["provide_capture_sink"]


def test_the_settings_reach_the_sink() -> None:
    assert isinstance(JsonlSinkPlugin(JsonlSinkConfig()).provide_capture_sink(), JsonlSink)
    with pytest.raises(ValueError, match="path"):
        JsonlSinkConfig(path="")


async def test_each_event_becomes_a_line_behind_those_of_earlier_runs(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for seq in (1, 2):
        async with JsonlSink(str(path)) as sink:
            await sink.receive(event(seq, "note"))
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert [line["seq"] for line in lines] == [1, 2]
    assert lines[0]["data"] == {"text": "日本"}


async def test_only_the_wanted_types_are_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    async with JsonlSink(str(path), frozenset({"reward"})) as sink:
        await sink.receive(event(1, "note"))
        await sink.receive(event(2, "reward"))
    assert [json.loads(line)["seq"] for line in path.read_text("utf-8").splitlines()] == [2]


async def test_a_file_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="cannot write"):
        async with JsonlSink(str(tmp_path / "no" / "folder" / "events.jsonl")):
            pass
