"""Recordings: events are read back with their times; damaged files are refused, naming the line."""

import gzip
import json
import stat
from itertools import count

import pytest
from support.full_disk import full_disk

from kvchat.errors import DoesNotFitError, UsageError
from kvchat.paths import bundled_recording
from kvchat.protocol import recording
from kvchat.protocol.figures import Snapshot, Stats
from kvchat.protocol.messages import Asked, Chat, Finished, Loaded, Started, Stop, Switched, Text, Turn
from kvchat.protocol.recording import Entry, Recorder, read

TURNS = (Turn("user", "one"), Turn("assistant", "1"), Turn("user", "two\u2028\x1b[0m"))
EVENTS = (Started(3, 0), Text("hé\n", 1), Snapshot("full", {}, 1.0, 2, 3, 4, 5), Finished("eos", "hé", Stats()))


def clock():
    """A clock that advances half a second per reading."""
    return (0.5 * at for at in count(201)).__next__


@pytest.fixture
def recorded(tmp_path):
    path = tmp_path / "one.jsonl"
    recorder = Recorder(path, "1.2.3", clock())
    for command in (Chat(TURNS), Stop()):
        recorder.note_command(command)
    for event in EVENTS:
        recorder.note(event)
    recorder.close()
    return path


def test_questions_and_events_are_read_with_their_times(recorded):
    entries = read(recorded)
    assert entries == [Entry(0.5 * at, event) for at, event in enumerate((Asked("two\u2028\x1b[0m"), *EVENTS), 1)]
    assert stat.S_IMODE(recorded.stat().st_mode) == 0o600
    packed = recorded.with_suffix(".gz")
    packed.write_bytes(gzip.compress(recorded.read_bytes()))
    assert read(packed) == entries


def test_an_existing_file_is_not_overwritten(recorded, tmp_path):
    before = recorded.read_bytes()
    with pytest.raises(UsageError, match="exists"):
        Recorder(recorded, "1")
    assert recorded.read_bytes() == before
    for impossible in (recorded / "below", tmp_path / ("n" * 300), tmp_path / "a\0b"):
        with pytest.raises(UsageError, match="cannot be written"):
            Recorder(impossible, "1")


def test_a_recording_stops_at_the_maximum_length(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "MAX_BYTES", 2000)
    recorder, reports = Recorder(tmp_path / "long", "1", clock()), []
    recorder.report = reports.append
    for _ in range(100):
        recorder.note(Text("word " * 5, 1))
    assert len(reports) == 1
    assert "maximum length" in reports[0]
    assert 10 < len(read(tmp_path / "long")) < 60


def test_a_full_disk_ends_a_recording_after_a_whole_event(tmp_path):
    recorder, reports = Recorder(tmp_path / "full", "1", clock()), []
    recorder.report = reports.append
    with full_disk():
        for _ in range(100):
            recorder.note(Text("word " * 5, 1))
        with pytest.raises(UsageError, match="cannot be written"):
            Recorder(tmp_path / "begun", "1" * 1000)
    assert len(reports) == 1
    assert read(tmp_path / "full")
    assert not (tmp_path / "begun").exists()


def damaged(good: bytes) -> dict[str, bytes]:
    lines = good.split(b"\n")
    later = json.dumps({"format": recording.FORMAT, "version": 2}).encode()
    return {
        "not a kvchat recording": b"",
        "line 1": b'{"format": "other"}\n',
        "version 2": b"\n".join([later, *lines[1:]]),
        "truncated": good[:-5],
        "line 3": b"\n".join([*lines[:2], b"[1.0, {}]", *lines[3:]]),
        "line 4": b"\n".join([*lines[:3], b'["soon", ' + lines[3].split(b",", 1)[1], *lines[4:]]),
        "damaged": gzip.compress(good)[:-20],
        "protocol": b"\n".join([lines[0], b'[1, {"type":"Stop"}]', b""]),
    }


@pytest.mark.parametrize("what", damaged(b"0\n1,2\n2\n3,4\n5"))
def test_damaged_recordings_are_refused_with_a_reason(recorded, what):
    recorded.write_bytes(damaged(recorded.read_bytes())[what])
    with pytest.raises(UsageError, match=f"(?i){what}"):
        read(recorded)


def test_missing_and_oversized_files_are_refused(recorded, tmp_path, monkeypatch):
    with pytest.raises(UsageError):
        read(tmp_path / "none")
    recorded.write_bytes(gzip.compress(b"0" * 5000))
    monkeypatch.setattr(recording, "MAX_BYTES", 2000)
    with pytest.raises(DoesNotFitError):
        read(recorded)


def test_the_bundled_recording_switches_modes():
    events = [entry.event for entry in read(bundled_recording())]
    assert sum(isinstance(event, Loaded) for event in events) == 1
    assert [event.mode for event in events if isinstance(event, Switched)] == ["streaming", "speculative", "full"]
    answers = [event.text for event in events if isinstance(event, Finished)]
    assert len(answers) == sum(isinstance(event, Asked) for event in events)
    assert bundled_recording().stat().st_size < 100_000
