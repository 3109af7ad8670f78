"""Threads that sleep after a short wait: set before torch is imported, and never against the user's own choice."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvchat import process

SHOWS = (
    "import os, sys; print(os.environ.get('OMP_WAIT_POLICY'), os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
)
ENTRIES = {
    "command line": "import sys; sys.argv = ['kvchat', '--version']\n"
    "from kvchat.cli import main\nmain.app = lambda **kwargs: None\nmain.main()",
    "engine": "import os; os.dup2(os.open(os.devnull, os.O_RDONLY), 0)\n"
    "from kvchat.engine import worker\n"
    "worker.claim_stdio = lambda: (open(os.devnull, 'rb'), open(os.devnull, 'wb'))\n"
    "worker.main()",
    "Python": "import sys, kvchat.engine\nkvchat.engine.session = sys\nsys.load = print\nkvchat.load",
}


def policy_of(entry: str, **chosen: str) -> list[str]:
    unset = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-c", f"{ENTRIES[entry]}\n{SHOWS}"]
    ran = subprocess.run(command, env=environ | chosen, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


@pytest.mark.parametrize("entry", ENTRIES)
def test_threads_sleep_after_a_short_wait(entry: str) -> None:
    assert policy_of(entry) == ["PASSIVE", str(process.SPINS), "False"]


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_users_choice_stays(entry: str) -> None:
    assert policy_of(entry, OMP_WAIT_POLICY="ACTIVE") == ["ACTIVE", "None", "False"]
    assert policy_of(entry, GOMP_SPINCOUNT="1000") == ["None", "1000", "False"]


def test_another_program_gets_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {"PATH": "/bin"}
    monkeypatch.setattr(os, "environ", dict(before))
    process.spin_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == str(process.SPINS)
    assert process.as_the_user_left_it() == before
    os.environ["GOMP_SPINCOUNT"] = "7"
    assert process.as_the_user_left_it() == os.environ


NO_LIMIT = "max 100000"
EACH_ITS_CORE = ["0", "1", "2", "3", "4", "5", "6", "7"]
TWO_A_CORE = ["0,4", "1,5", "2,6", "3,7"] * 2


def machine(folder: Path, siblings: list[str]) -> Path:
    """A folder like the system's, with the processors of the same core as each names them."""
    for number, of_core in enumerate(siblings):
        (folder / f"cpu{number}" / "topology").mkdir(parents=True)
        (folder / f"cpu{number}" / "topology" / "thread_siblings_list").write_text(f"{of_core}\n")
    return folder


@pytest.mark.parametrize(
    ("quota", "usable", "siblings", "chosen", "expected"),
    [
        ("250000 100000", range(8), EACH_ITS_CORE, {}, "2"),
        ("50000 100000", range(8), EACH_ITS_CORE, {}, "1"),
        ("250000 100000", range(2), EACH_ITS_CORE, {}, None),
        (NO_LIMIT, range(8), EACH_ITS_CORE, {}, None),
        ("250000 100000", range(8), EACH_ITS_CORE, {"OMP_NUM_THREADS": "6"}, "6"),
        ("250000 100000", range(8), EACH_ITS_CORE, {"MKL_NUM_THREADS": "6"}, None),
        (NO_LIMIT, range(8), TWO_A_CORE, {}, "4"),
        ("600000 100000", range(8), TWO_A_CORE, {}, "4"),
        ("250000 100000", range(8), TWO_A_CORE, {}, "2"),
        (NO_LIMIT, (0, 4, 1), TWO_A_CORE, {}, "2"),
        (NO_LIMIT, range(8), TWO_A_CORE, {"OMP_NUM_THREADS": "8"}, "8"),
        (NO_LIMIT, range(9), TWO_A_CORE, {}, None),
        ("600000 100000", range(9), TWO_A_CORE, {}, "6"),
    ],
)
def test_a_thread_for_each_core_and_no_more_than_the_container_grants(
    quota: str,
    usable: Iterable[int],
    siblings: list[str],
    chosen: dict[str, str],
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(usable))
    monkeypatch.setattr(os, "environ", dict(chosen))
    process.use_physical_cores(tmp_path, machine(tmp_path / "cpu", siblings))
    assert os.environ.get("OMP_NUM_THREADS") == expected


def test_a_system_that_tells_nothing_is_left_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    process.use_physical_cores(tmp_path, tmp_path / "absent")
    assert os.environ == {}


# ---- What the processors have spent is counted of those that may be used


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
