"""What the processors have spent is counted of those that may be used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvchat import process

TICKS = os.sysconf("SC_CLK_TCK")


def test_only_usable_processors_count_and_a_guests_time_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 10})
    lines = [
        "cpu  9999 9999 9999 9999 9999 9999 9999 9999 9999 9999",
        "cpu0 7777 0 0 0 0 0 0 0 0 0",
        "cpu1 1 2 3 4 5 6 7 8 1 2",
        "cpu10 10 0 0 20 0 0 0 0 10 0",
        "intr 5 5",
    ]
    stat = tmp_path / "stat"
    stat.write_text("\n".join(lines))
    assert process.processor_time(stat) == (pytest.approx(66 / TICKS), pytest.approx(29 / TICKS), 2)


@pytest.mark.parametrize("text", [None, "", "cpu 1 2 3 4 5 6 7 8"])
def test_a_system_that_does_not_tell_is_none(tmp_path: Path, text: str | None) -> None:
    stat = tmp_path / "stat"
    if text is not None:
        stat.write_text(text)
    assert process.processor_time(stat) is None


def test_time_goes_on_here() -> None:
    found = process.processor_time()
    if found is None:
        pytest.skip("the system does not tell")
    assert found.processors == len(os.sched_getaffinity(0))
    assert found.total > found.idle > 0
