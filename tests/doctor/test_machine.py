"""The machine's checks on fake /proc and /sys trees: what they find, and when they warn."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvchat.doctor import machine
from kvchat.doctor.installation import Check, guarded
from kvchat.doctor.machine import container, host_memory, numa, processors, terminal, wsl

GiB = 2**30
BUS = "00000000:65:00.0"
COLORS = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(("cpus", "warns"), [({1, 9}, False), ({8, 9}, False), ({0, 7}, True)])
def test_a_process_bound_away_from_its_gpu_is_a_warning(tmp_path, monkeypatch, cpus, warns):
    files = {"devices/system/node/node1/cpulist": "8-15,24\n", "bus/pci/devices/0000:65:00.0/numa_node": "1\n"}
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: cpus)
    check = numa(BUS, tree(tmp_path, files))
    assert check.found.startswith("00000000:65:00.0 at node 1")
    assert check.state == ("warning" if warns else "ok")
    assert ("--cpunodebind=1 --membind=1" in check.advice) == warns


@pytest.mark.parametrize("files", [{}, {"bus/pci/devices/0000:65:00.0/numa_node": "-1\n"}])
def test_unknown_numa_nodes_are_ok(tmp_path, files):
    assert numa(BUS, tree(tmp_path, files)) == Check("NUMA", "ok", f"{BUS} at an unknown node")


def limited(root: Path, limit: int, used: int) -> tuple[Path, Path]:
    proc = tree(root / "proc", {"self/cgroup": "0::/\n", "meminfo": f"MemAvailable: {8 * 2**20} kB\n"})
    return proc, tree(root / "cg", {"memory.max": str(limit), "memory.current": str(used)})


def test_memory_checks_respect_the_container_limit(tmp_path):
    roomy, tight = limited(tmp_path / "a", 16 * GiB, 5 * GiB), limited(tmp_path / "b", 4 * GiB, 3 * GiB)
    assert container(*roomy) == Check("container", "ok", "5.0 GiB of 16.0 GiB used")
    assert host_memory(*roomy) == Check("RAM", "ok", "8.0 GiB free")
    assert (container(*tight).state, host_memory(*tight).found) == ("warning", "1.0 GiB free")
    assert host_memory(*tight).state == "warning"
    assert container(tmp_path, tmp_path).found == "no memory limit"


@pytest.mark.parametrize(
    ("files", "threads", "state"),
    [
        ({"cpu.max": "50000 100000\n"}, 2, "warning"),
        ({"cpu.max": "50000 100000\n"}, 1, "ok"),
        ({"cpu.max": "max 100000\n"}, 64, "ok"),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 64, "warning"),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64, "ok"),
        ({}, None, "ok"),
    ],
)
def test_more_threads_than_processors_are_a_warning(tmp_path, monkeypatch, files, threads, state):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(8)))
    check = processors(threads, tree(tmp_path, files))
    assert check.state == state
    assert (" 0.5" in check.found) == ("50000" in "".join(files.values()))
    assert ("n/a" in check.found) == (threads is None)


def test_wsl_is_recognized_by_its_kernel(tmp_path):
    windows = tree(tmp_path, {"sys/kernel/osrelease": "5.15.153.1-microsoft-standard-WSL2\n"})
    assert wsl(windows).state == "warning"
    assert wsl(tree(tmp_path / "x", {"sys/kernel/osrelease": "6.1.0\n"})) == Check("WSL", "ok", "no")
    assert wsl(tmp_path / "y") == Check("WSL", "ok", "no")


def test_a_crashing_check_becomes_a_warning():
    check = guarded("NUMA", lambda: 1 // 0)
    assert (check.name, check.state, "ZeroDivisionError" in check.advice) == ("NUMA", "warning", True)


def test_no_check_crashes_on_this_machine():
    assert not [check for check in machine.checks(4) if check.found == "n/a" and check.advice]


@pytest.mark.parametrize(
    ("environ", "size", "state", "words"),
    [
        (COLORS, (80, 24), "ok", "80x24"),
        (COLORS, (80, 11), "warning", "80x11"),
        (COLORS, (39, 90), "warning", "39x90"),
        (COLORS | {"TERM": "dumb"}, (80, 24), "warning", "TERM=dumb"),
        ({}, (80, 24), "warning", "TERM=n/a COLORTERM=n/a"),
        ({"TERM": "screen"}, (80, 24), "ok", "approximated"),
    ],
)
def test_small_and_dumb_terminals_are_a_warning(monkeypatch, environ, size, state, words):
    monkeypatch.setattr(machine.os, "environ", environ)
    monkeypatch.setattr(machine.sys, "stdout", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(machine.shutil, "get_terminal_size", lambda: size)
    check = terminal()
    assert (check.state, words in check.found) == (state, True)


def test_a_missing_terminal_is_reported(monkeypatch):
    monkeypatch.setattr(machine.sys, "stdout", SimpleNamespace(isatty=lambda: False))
    assert terminal().found.startswith("none")
