"""Busy processes are gone with their measurement, and what others took is counted."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvchat.bench import timing


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    if not listed.exists():
        pytest.skip("the system does not list a process's children")
    return [int(child) for child in listed.read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_busy_processes_are_gone_afterwards_also_when_the_measurement_fails():
    before = set(children(os.getpid()))
    started = set()

    def measure() -> None:
        with timing.keep_busy(2):
            started.update(set(children(os.getpid())) - before)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure()
    assert len(started) == 2
    assert not any(map(is_alive, started))


def test_they_end_by_themselves_when_the_measurement_was_killed():
    script = "from kvchat.bench.timing import keep_busy\nwith keep_busy(1): print(flush=True); input()"
    killed = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with killed:
        assert killed.stdout
        killed.stdout.readline()
        (orphan,) = children(killed.pid)
        killed.kill()
    deadline = time.monotonic() + 60
    while is_alive(orphan):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("threads", "load", "share"), [(1, 0, 1.0), (2, 2, 0.5), (2, 0, 1.0), (1, 1, 1.0), (64, 2, 0.5), (1, 7, 0.25)]
)
def test_the_fair_share_of_two_processors(monkeypatch, threads, load, share):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert timing.fair_share(threads, load) == share


def test_what_others_took(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    ticks = os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1})
    stat.write_text("cpu  9 9 9 9 9 9 9 9 9 9\ncpu1 100 0 0 100 0 0 0 0 50 0\n")
    monkeypatch.setattr(time, "process_time", lambda: 1.0)
    before = timing.sample_processors(stat)
    stat.write_text(f"cpu1 {100 + 6 * ticks} 0 0 {100 + 3 * ticks} {ticks} 0 0 0 50 0\n")
    monkeypatch.setattr(time, "process_time", lambda: 5.0)
    assert timing.share_of_others(before, timing.sample_processors(stat)) == [pytest.approx(0.2)]
    assert timing.share_of_others(before, before) == []


def test_a_child_is_none_of_the_others_while_it_runs_and_when_it_has_ended():
    before = timing.sample_processors()
    if before is None:
        pytest.skip("the system does not tell")
    own = time.process_time()
    with timing.keep_busy(1):
        deadline = time.monotonic() + 60
        while timing.sample_processors()[2] - before[2] < 0.5 + time.process_time() - own:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        running = timing.sample_processors()[2]
    assert timing.sample_processors()[2] >= running - 0.05


def test_where_the_system_does_not_tell_nothing_is_claimed(tmp_path):
    assert timing.sample_processors(tmp_path / "none") is None
    assert timing.share_of_others(None, (1.0, 1.0, 1.0)) == []
