"""Threads that sleep after a short wait: set before torch is imported, and never against the user's own choice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvchat import threads

SHOWS = (
    "import os, sys; print(os.environ.get('OMP_WAIT_POLICY'), os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
)
ENTRIES = {
    "command line": "import sys; sys.argv = ['kvchat', '--version']\n"
    "from kvchat.cli import main\nmain.app = lambda **kwargs: None\nmain.main()",
    "engine": "import os; os.dup2(os.open(os.devnull, os.O_RDONLY), 0)\n"
    "from kvchat.engine.process import worker\n"
    "worker.take_streams = lambda: (open(os.devnull, 'rb'), open(os.devnull, 'wb'))\n"
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
    assert policy_of(entry) == ["PASSIVE", str(threads.SPINS), "False"]


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_users_choice_stays(entry: str) -> None:
    assert policy_of(entry, OMP_WAIT_POLICY="ACTIVE") == ["ACTIVE", "None", "False"]
    assert policy_of(entry, GOMP_SPINCOUNT="1000") == ["None", "1000", "False"]


def test_another_program_gets_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {"PATH": "/bin"}
    monkeypatch.setattr(os, "environ", dict(before))
    threads.spin_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == str(threads.SPINS)
    assert threads.as_the_user_left_it() == before
    os.environ["GOMP_SPINCOUNT"] = "7"
    assert threads.as_the_user_left_it() == os.environ


@pytest.mark.parametrize(
    ("quota", "cores", "chosen", "expected"),
    [
        ("250000 100000", 8, {}, "2"),
        ("50000 100000", 8, {}, "1"),
        ("250000 100000", 2, {}, None),
        ("max 100000", 8, {}, None),
        ("250000 100000", 8, {"OMP_NUM_THREADS": "6"}, "6"),
        ("250000 100000", 8, {"MKL_NUM_THREADS": "6"}, None),
    ],
)
def test_a_container_gets_no_more_threads_than_it_grants_processors(
    quota: str,
    cores: int,
    chosen: dict[str, str],
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cores)))
    monkeypatch.setattr(os, "environ", dict(chosen))
    threads.stay_within_share(tmp_path)
    assert os.environ.get("OMP_NUM_THREADS") == expected
