"""The machine's checks over trees that look like /proc and /sys: what is found, and when it is worth a warning."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvchat.doctor import machine
from kvchat.doctor.installation import Check, guarded
from kvchat.doctor.machine import container, host_memory, memory_lock, numa, processors, terminal, wsl

GiB = 2**30
BUS = "00000000:65:00.0"
COLORS = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def sysfs(root: Path, gpu_node: str, nodes: int = 2) -> Path:
    files = {f"devices/system/node/node{i}/cpulist": f"{8 * i}-{8 * i + 7}\n" for i in range(nodes)}
    return tree(root, files | {"devices/system/node/online": "0-1", "bus/pci/devices/0000:65:00.0/numa_node": gpu_node})


def proc_of(root: Path, mems: str = "0-1", policy: str = "default") -> Path:
    status = f"Name:\tx\nMems_allowed:\t3\nMems_allowed_list:\t{mems}\n"
    return tree(root, {"self/status": status, "self/numa_maps": f"55d0 {policy} file=/x mapped=2 N0=2\n"})


@pytest.mark.parametrize(
    ("cpus", "mems", "policy", "warns"),
    [
        ({1, 9}, "0-1", "default", ""),
        ({8, 9}, "1", "bind:1", ""),
        ({8, 9}, "0-1", "bind=static:1", ""),
        ({8, 9}, "0-1", "prefer:0", ""),
        ({0, 7}, "0-1", "default", "processors only"),
        ({8, 9}, "0", "default", "may not take its memory"),
        ({8, 9}, "0-1", "bind:0", "may not take its memory"),
        ({8, 9}, "0-1", "interleave:0-1", ""),
    ],
)
def test_a_process_bound_away_from_its_gpu_is_warned(tmp_path, cpus, mems, policy, warns):
    sys, proc = sysfs(tmp_path / "sys", "1\n"), proc_of(tmp_path / "proc", mems, policy)
    check = numa(BUS, sys, proc, frozenset(cpus))
    assert check.found.startswith("2 nodes, 00000000:65:00.0 at node 1")
    assert check.state == ("warning" if warns else "ok")
    assert warns in check.found
    assert ("--cpunodebind=1 --membind=1" in check.advice) == bool(warns)


def test_numa_where_there_is_none_or_it_does_not_tell(tmp_path):
    assert numa(BUS, tmp_path) == Check("NUMA", "ok", "n/a")
    sys = sysfs(tmp_path / "sys", "-1\n")
    assert numa(BUS, sys, tmp_path).found == f"2 nodes, {BUS} at n/a"
    assert numa("0001:00:00.0", sys, tmp_path).found.endswith("at n/a")
    assert numa("", sys, tmp_path) == Check("NUMA", "ok", "2 nodes")
    assert numa(BUS, sysfs(tmp_path / "one", "0", nodes=1), tmp_path, frozenset({99})).state == "ok"


def limited(root: Path, limit: int, used: int) -> tuple[Path, Path]:
    proc = tree(root / "proc", {"self/cgroup": "0::/\n", "meminfo": f"MemAvailable: {8 * 2**20} kB\n"})
    return proc, tree(root / "cg", {"memory.max": str(limit), "memory.current": str(used)})


def test_memory_and_the_containers_limit(tmp_path):
    roomy, tight = limited(tmp_path / "a", 16 * GiB, 5 * GiB), limited(tmp_path / "b", 4 * GiB, 3 * GiB)
    assert container(*roomy) == Check("container", "ok", "5.0 GiB of 16.0 GiB used")
    assert host_memory(*roomy) == Check("host memory", "ok", "8.0 GiB free")
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
def test_more_threads_than_the_container_gives_processors(tmp_path, monkeypatch, files, threads, state):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(8)))
    check = processors(threads, tree(tmp_path, files))
    assert check.state == state
    assert (" 0.5" in check.found) == ("50000" in "".join(files.values()))
    assert ("n/a" in check.found) == (threads is None)


def test_wsl_is_known_by_its_kernel(tmp_path):
    windows = tree(tmp_path, {"sys/kernel/osrelease": "5.15.153.1-microsoft-standard-WSL2\n"})
    assert wsl(windows).state == "warning"
    assert wsl(tree(tmp_path / "x", {"sys/kernel/osrelease": "6.1.0\n"})) == Check("WSL", "ok", "no")
    assert wsl(tmp_path / "y").found == "n/a"


def test_the_memory_lock_is_a_reading_only():
    assert memory_lock(8 * 2**20) == Check("memory lock", "ok", "8.0 MiB")
    assert memory_lock(machine.resource.RLIM_INFINITY).found == "unlimited"


def test_a_check_that_fails_is_a_reading_that_is_missing():
    check = guarded("NUMA", lambda: 1 // 0)
    assert (check.name, check.state, "ZeroDivisionError" in check.advice) == ("NUMA", "warning", True)


def test_this_machine_has_an_answer_to_everything():
    found = list(machine.checks((BUS, "nonsense"), 4))
    assert [check.name for check in found].count("NUMA") == 2
    assert not [check for check in found if check.found == "n/a" and check.advice]


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
def test_the_terminal(environ, size, state, words):
    check = terminal(environ, True, size)
    assert (check.state, words in check.found) == (state, True)


def test_without_a_terminal():
    assert terminal(COLORS, False).found.startswith("n/a")
