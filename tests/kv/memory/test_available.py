"""Free host memory, read from fake /proc and /sys/fs/cgroup trees."""

from pathlib import Path

import pytest
import torch

from kvchat.kv.memory import available, rates

MiB = 2**20


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def proc(tmp_path):
    meminfo = f"MemTotal: 9999999 kB\nMemFree: 1 kB\nMemAvailable:    {8192 * 1024} kB\nHugePages_Total: 0\n"
    return tree(tmp_path / "proc", {"meminfo": meminfo})


def v2(limit: object, used: int, cache: int = 0) -> dict[str, str]:
    stat = f"anon 5\ninactive_file {cache}\n"
    return {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": stat}


def groups(root: Path, layout: dict[str, dict[str, str]]) -> Path:
    return tree(root, {f"{group}/{name}": text for group, files in layout.items() for name, text in files.items()})


def test_the_system_decides_free_memory_without_a_container(proc, tmp_path):
    assert available.host_free(proc, tmp_path / "nothing") == 8192 * MiB
    tree(proc, {"self/cgroup": "0::/\n"})
    assert available.container_limit(proc, groups(tmp_path / "cg", {".": v2("max", 5)})) is None


@pytest.mark.parametrize("path", ["/", "/docker/abc", "/not/seen/from/here"])
def test_the_tightest_enclosing_cgroup_limits_memory(proc, tmp_path, path):
    tree(proc, {"self/cgroup": f"0::{path}\n"})
    layout = {".": v2(1000 * MiB, 300 * MiB, 100 * MiB), "docker": v2("max", 0), "docker/abc": v2(900 * MiB, 850 * MiB)}
    cgroups = groups(tmp_path / "cg", layout)
    free = 50 * MiB if "abc" in path else 800 * MiB  # 100 of the 300 MiB are file cache, which can be reclaimed
    assert available.host_free(proc, cgroups) == free


def test_cgroup_v1_limits_are_read(proc, tmp_path):
    tree(proc, {"self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/a/b\n0::/\n"})
    stat = f"cache 9\ninactive_file 1\ntotal_inactive_file {10 * MiB}\n"
    limited = {"memory.limit_in_bytes": f"{100 * MiB}", "memory.usage_in_bytes": f"{70 * MiB}", "memory.stat": stat}
    unlimited = {"memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": "5"}
    cgroups = groups(tmp_path / "cg", {"memory/a": limited, "memory/a/b": unlimited, "memory": unlimited})
    assert available.container_limit(proc, cgroups) == available.Limit(100 * MiB, 60 * MiB)
    assert available.host_free(proc, cgroups) == 40 * MiB


def test_a_cgroup_over_its_limit_has_no_free_memory(proc, tmp_path):
    tree(proc, {"self/cgroup": "0::/\n"})
    assert available.host_free(proc, groups(tmp_path / "cg", {".": v2(100, 200)})) == 0


@pytest.mark.parametrize("text", ["", "max", "garbage", "-5"])
def test_unreadable_limits_are_ignored(proc, tmp_path, text):
    tree(proc, {"self/cgroup": f"{text}\n0::/\n", "meminfo": "MemAvailable: lots kB\n"})
    free = available.host_free(proc, groups(tmp_path / "cg", {".": {"memory.max": text, "memory.current": text}}))
    assert free > 0


def test_usable_memory_leaves_a_margin():
    assert available.usable(100 * 2**30) == 100 * 2**30 - available.MARGIN
    assert available.usable(1000) == 940


# ---- Rates are measured in the memory available


CPU = torch.device("cpu")


def test_rates_are_measured_with_less_if_memory_is_short(monkeypatch):
    taken = list[int]()

    def seconds(run, device):
        taken.append(run().nbytes)
        return 1.0

    monkeypatch.setattr(rates, "seconds", seconds)
    monkeypatch.setattr(available, "free_bytes", lambda device: 2**22)
    rates.read(CPU, torch.float32, 2**26)
    assert 0 < max(taken) <= 2**20


def test_the_link_is_measured_without_pinned_memory(monkeypatch):
    def refused(tensor):
        raise RuntimeError("cannot pin")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refused)
    assert rates.link(CPU, True, 2**16) > 0
