"""Threads that sleep while they wait: set before torch is imported, and never against the user's own choice."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SHOWS = "import os, sys; print(os.environ.get('OMP_WAIT_POLICY'), 'torch' in sys.modules)"
ENTRIES = {
    "command line": "import sys; sys.argv = ['kvchat', '--version']\n"
    "from kvchat.cli import main\nmain.app = lambda **kwargs: None\nmain.main()",
    "engine": "import os; os.dup2(os.open(os.devnull, os.O_RDONLY), 0)\n"
    "from kvchat.engine import worker\n"
    "worker._take_streams = lambda: (open(os.devnull, 'rb'), open(os.devnull, 'wb'))\n"
    "worker.main()",
}


def policy_of(entry: str, **chosen: str) -> list[str]:
    unset = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-c", f"{ENTRIES[entry]}\n{SHOWS}"]
    ran = subprocess.run(command, env=environ | chosen, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


@pytest.mark.parametrize("entry", ENTRIES)
def test_threads_sleep_while_they_wait(entry: str) -> None:
    assert policy_of(entry) == ["PASSIVE", "False"]


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_users_choice_stays(entry: str) -> None:
    assert policy_of(entry, OMP_WAIT_POLICY="ACTIVE") == ["ACTIVE", "False"]
    assert policy_of(entry, GOMP_SPINCOUNT="1000") == ["None", "False"]
