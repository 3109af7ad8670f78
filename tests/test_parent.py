from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

import pytest
from support.environment import environ
from support.patience import PATIENCE_S, wait_until

from kvchat import process as process_module
from kvchat.cli import chat
from kvchat.protocol import wire
from kvchat.protocol.client import ENGINE
from kvchat.protocol.messages import Load
from kvchat.tui import models

# Prints the child's process id once the child has called die_with_parent; the child never looks at its stdin.
START = """
import subprocess, sys, time
from kvchat.process import die_with_parent
if sys.argv[1:]:
    die_with_parent()
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


# The child begins to be tied to its parent when that is gone, which the end of its stdin says.
TOO_LATE = """
import os, subprocess, sys
from kvchat.process import die_with_parent
if sys.argv[1:]:
    sys.stdin.read()
    die_with_parent(int(sys.argv[1]))
    print("it goes on")
else:
    subprocess.Popen([*sys.orig_argv, str(os.getpid())], stdin=subprocess.PIPE)
    os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_the_child_ends_with_a_parent_that_ended_before_it_was_tied_to_it() -> None:
    command = [sys.executable, "-c", TOO_LATE]
    assert subprocess.run(command, capture_output=True, env=environ(), timeout=PATIENCE_S, check=True).stdout == b""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
@pytest.mark.parametrize("load", [b"", wire.encode(Load())])
def test_an_engine_whose_application_is_gone_ends_before_it_imports_anything(load: bytes) -> None:
    """Killed within 0.2 s of the engine's start, the application was outlived by 1.0 to 1.3 s; a load took 2 s more."""
    no_parent, pipe = os.getpid() - 1, subprocess.PIPE
    command = [sys.executable, "-X", "importtime", "-m", "kvchat.engine", str(no_parent)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environ()) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdin.write(load)
        process.stdin.flush()  # and left open: it does not wait for the end of it
        assert process.wait(PATIENCE_S) == 0
        imported = {line.split("|")[-1].strip() for line in process.stderr.read().decode().splitlines()}
        assert process.stdout.read() == b""
    assert "kvchat.process" in imported
    assert not imported & {"kvchat.engine.worker", "pydantic", "torch"}


def test_the_application_starts_an_engine_that_ends_with_it() -> None:
    assert ENGINE[-2:] == ("kvchat.engine", str(os.getpid()))


def test_other_systems_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", None)
    process_module.die_with_parent()


def test_nothing_of_the_folder_where_it_is_started_is_imported(tmp_path):
    """A person may start kvchat beside a random.py of their own, which ended the engine."""
    (tmp_path / "random.py").write_text("raise SystemExit(9)")
    for command in (process_module.python("-c", "import random"), process_module.python("-m", "random")):
        assert subprocess.run(command, cwd=tmp_path, stdout=subprocess.DEVNULL).returncode == 0
    for command in (ENGINE, models.DOWNLOAD, chat.ENGINE):
        assert command[:2] == process_module.python()
