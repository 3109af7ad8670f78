from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from support.environment import environ
from support.patience import PATIENCE_S, wait_until

from kvchat.engine import parent

# Prints the child's process id once the child has called end_with_parent; the child never looks at its stdin.
START = """
import subprocess, sys, time
from kvchat.engine.parent import end_with_parent
if sys.argv[1:]:
    end_with_parent()
    print("ready", flush=True)
    time.sleep(3600)
process = subprocess.Popen([*sys.orig_argv, "child"], stdout=subprocess.PIPE)
process.stdout.readline()
print(process.pid, flush=True)
time.sleep(3600)
"""


def state(pid: int) -> str:
    """A letter as ps shows it; empty for a process that is gone."""
    command = ["ps", "-o", "stat=", "-p", str(pid)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()[:1]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_the_child_ends_with_its_parent(stopped: bool, ending: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", START], stdout=subprocess.PIPE, env=environ()) as process:
        assert process.stdout
        child = int(process.stdout.readline())
        if stopped:
            os.kill(child, signal.SIGSTOP)
        process.send_signal(ending)
        process.wait(PATIENCE_S)
        wait_until(lambda: state(child) in ("", "Z"))


def test_other_systems_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(parent.ctypes, "CDLL", None)
    parent.end_with_parent()
