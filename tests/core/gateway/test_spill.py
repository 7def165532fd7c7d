"""The spill on disk: framing, crashes, bounds, and who may write where."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_core.errors import ConfigError, StoreError
from agl_core.gateway.spill import SpillFile
from agl_core.gateway.spill_segment import Damaged, SpilledEvent, decode, encode
from agl_core.records import EventDraft

ROOM = 2**20


def event(number: int, rollout_id: str = "r", text: str = "") -> SpilledEvent:
    data = {"call_id": f"c-{number}", "retries": 0, "status": "ok", "text": text}
    return SpilledEvent(
        rollout_id=rollout_id,
        attempt_id="a",
        timestamp=1000.5 + number,
        draft=EventDraft(event_type="model_request", data=data),
    )


class Files:
    """Opens spills below one folder, and closes them at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: list[SpillFile] = []

    def open(self, **options: Any) -> SpillFile:
        file = SpillFile(self.folder, **{"max_bytes": ROOM, **options})
        file.open()
        self.opened.append(file)
        return file

    def lines(self) -> list[Path]:
        return sorted(self.folder.glob("*/*.spill"))


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    files = Files(tmp_path / "deep" / "spill")
    yield files
    for file in files.opened:
        file.close()


def calls(file: SpillFile, rollout_id: str = "r") -> list[str]:
    return [file.read(entry).draft.data["call_id"] for entry in file.entries(rollout_id)]


def test_an_event_comes_back_as_it_was_written(files: Files) -> None:
    written = event(1, text='line\nfeed, "quotes", \u00e9\u2028 and \0')
    file = files.open()
    file.append([written])
    assert file.read(file.entries("r")[0]) == written


def test_entries_are_kept_across_a_restart_oldest_first(files: Files) -> None:
    file = files.open(segment_bytes=300)
    for number in range(10):
        file.append([event(number, "even" if number % 2 == 0 else "odd")])
    assert len(files.lines()) > 1
    file.close()
    again = files.open()
    assert again.rollouts() == ["even", "odd"]
    assert calls(again, "odd") == ["c-1", "c-3", "c-5", "c-7", "c-9"]


def test_what_is_done_does_not_come_back(files: Files) -> None:
    file = files.open()
    file.append([event(number) for number in range(4)])
    file.done(file.entries("r")[:3])
    file.close()
    assert calls(files.open()) == ["c-3"]


def test_segments_are_removed_when_all_in_them_is_done(files: Files) -> None:
    file = files.open(segment_bytes=300)
    for number in range(6):
        file.append([event(number)])
    first = files.lines()[0]
    file.done(file.entries("r")[:-1])
    assert not first.exists()
    file.done(file.entries("r"))
    assert files.lines() == []
    assert list(files.folder.glob("*/*.done")) == []
    assert (len(file), file.size_bytes, file.rollouts()) == (0, 0, [])
    file.append([event(7)])
    assert calls(file) == ["c-7"]


@pytest.mark.parametrize("cut", [1, 5, 60])
def test_a_torn_tail_is_dropped_alone_and_said(
    files: Files, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    file = files.open()
    file.append([event(1), event(2), event(3)])
    file.close()
    path = files.lines()[0]
    os.truncate(path, path.stat().st_size - cut)
    again = files.open()
    assert calls(again) == ["c-1", "c-2"]
    assert "cut off" in caplog.text
    assert again.damaged == 0
    again.append([event(4)])
    assert calls(again) == ["c-1", "c-2", "c-4"]


def test_a_damaged_line_costs_no_other(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    file = files.open()
    file.append([event(1), event(2), event(3)])
    second = file.entries("r")[1]
    file.close()
    path = files.lines()[0]
    content = bytearray(path.read_bytes())
    content[second.offset + second.size // 2] ^= 0x01
    path.write_bytes(bytes(content))
    again = files.open()
    assert calls(again) == ["c-1", "c-3"]
    assert again.damaged == 1
    assert "damaged" in caplog.text


def test_damage_after_the_start_is_found_on_reading(files: Files) -> None:
    file = files.open()
    file.append([event(1)])
    path = files.lines()[0]
    path.write_bytes(path.read_bytes().replace(b"c-1", b"c-9"))
    with pytest.raises(Damaged):
        file.read(file.entries("r")[0])


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"zz 3 abc\n", b"00000000 x abc\n", encode(event(1))[:-1]]
)
def test_a_line_that_was_not_written_so_is_damaged(line: bytes) -> None:
    with pytest.raises(Damaged):
        decode(line)


def test_a_full_spill_refuses_and_keeps_what_it_has(files: Files) -> None:
    file = files.open(max_bytes=600)
    file.append([event(1, text="x" * 200)])
    with pytest.raises(StoreError, match="spill is full"):
        file.append([event(2), event(3, text="x" * 400)])
    assert calls(file) == ["c-1"]
    file.append([event(4)])
    file.done(file.entries("r"))
    file.append([event(5, text="x" * 400)])
    assert calls(file) == ["c-5"]


def test_a_failing_disk_leaves_no_part_of_an_event(files: Files) -> None:
    """The kernel's own limit on file sizes makes a write end in the middle."""
    program = """
import resource, signal, sys
from pathlib import Path
from agl_core.errors import StoreError
from agl_core.gateway.spill import SpillFile
from agl_core.gateway.spill_segment import SpilledEvent
from agl_core.records import EventDraft

def event(n, size):
    data = {"call_id": f"c-{n}", "retries": 0, "text": "x" * size}
    draft = EventDraft(event_type="model_request", data=data)
    return SpilledEvent(rollout_id="r", attempt_id="a", timestamp=1.0, draft=draft)

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
file = SpillFile(Path(sys.argv[1]), max_bytes=10**6)
file.append([event(1, 10)])
try:
    file.append([event(2, 10), event(3, 5000)])
except StoreError as exc:
    print("refused", exc.message)
file.append([event(4, 10)])
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(files.folder)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert "refused the spill failed" in done.stdout
    assert calls(files.open()) == ["c-1", "c-4"]


def test_c47_what_was_appended_survives_a_kill(files: Files) -> None:
    program = """
import os, signal, sys
from pathlib import Path
from agl_core.gateway.spill import SpillFile
from agl_core.gateway.spill_segment import SpilledEvent
from agl_core.records import EventDraft

file = SpillFile(Path(sys.argv[1]), max_bytes=10**6)
for n in range(5):
    draft = EventDraft(event_type="model_request", data={"call_id": f"c-{n}", "retries": 0})
    file.append([SpilledEvent(rollout_id="r", attempt_id="a", timestamp=1.0, draft=draft)])
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(files.folder)], timeout=30, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert calls(files.open()) == [f"c-{n}" for n in range(5)]


def test_only_the_owner_may_read_it(files: Files) -> None:
    file = files.open()
    file.append([event(1), event(2)])
    file.done(file.entries("r")[:1])
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in files.folder.rglob("*")}
    assert modes == {
        "durable-0": 0o700,
        "lock": 0o600,
        "00000001.spill": 0o600,
        "00000001.done": 0o600,
    }


def test_two_services_do_not_meet_in_one_folder(files: Files) -> None:
    first, second = files.open(), files.open()
    first.append([event(1)])
    second.append([event(2)])
    assert (calls(first), calls(second)) == (["c-1"], ["c-2"])
    assert {path.parent.name for path in files.lines()} == {"durable-0", "durable-1"}


def test_what_a_dead_service_left_is_taken_over_with_its_notes(files: Files) -> None:
    first, second = files.open(), files.open()
    first.append([event(1)])
    second.append([event(2), event(3)])
    second.done(second.entries("r")[:1])
    first.close()
    second.close()
    assert calls(files.open()) == ["c-1", "c-3"]


def test_what_a_living_service_has_is_left_alone(files: Files) -> None:
    first, second = files.open(), files.open()
    second.append([event(2)])
    first.close()
    third = files.open()
    assert third.rollouts() == []
    assert calls(second) == ["c-2"]


def test_events_of_a_store_that_forgot_them_are_not_replayed(files: Files) -> None:
    first = SpillFile(files.folder, max_bytes=ROOM, keeps=False)
    first.append([event(1)])
    durable = files.open()
    assert durable.rollouts() == []
    durable.append([event(2)])
    first.close()
    assert [path.parent.name for path in files.lines()] == ["durable-0"]
    second = SpillFile(files.folder, max_bytes=ROOM, keeps=False)
    second.open()
    assert second.rollouts() == []
    second.close()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.raises(ConfigError, match=r"capture\.spill_dir .*file"):
        SpillFile(taken / "spill", max_bytes=ROOM).open()
    with pytest.raises(StoreError, match=r"capture\.spill_dir"):
        SpillFile(taken / "spill", max_bytes=ROOM).append([event(1)])
