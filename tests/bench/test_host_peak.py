"""The peak of a process's memory, read from made-up files."""

from __future__ import annotations

from kvchat.bench import timing


def test_the_peak_is_forgotten_and_read(tmp_path):
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\n")
    assert timing.forget_peak(tmp_path)
    assert (tmp_path / "clear_refs").read_text() == "5"
    assert timing.read_peak(tmp_path) == 2048 * 1024


def test_where_the_system_does_not_tell_nothing_is_claimed(tmp_path):
    assert not timing.forget_peak(tmp_path / "absent")
    assert timing.read_peak(tmp_path) is None
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\n")
    assert timing.read_peak(tmp_path) is None
