"""However the application is ended the terminal is given back, and no engine is left."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from support import start_app
from support.environment import environ
from support.patience import PATIENCE_S, wait_until
from support.pty_run import PtyRun

# What was switched on is switched off at the end: alternate screen, mouse, pastes; the cursor comes back.
RESTORED = (b"\x1b[?1049l", b"\x1b[?1000l", b"\x1b[?1003l", b"\x1b[?2004l", b"\x1b[?25h")


def children(pid: int) -> list[int]:
    command = ["ps", "-o", "pid=", "--ppid", str(pid)]
    return [int(line) for line in subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()]


def is_alive(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


@pytest.fixture
def application(tmp_path: Path):
    ignored = signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell's background jobs ignore it, and hand that on
    run = PtyRun(start_app.command(tmp_path), environ(TERM="xterm-256color"))
    signal.signal(signal.SIGQUIT, ignored)
    run.until(start_app.READY)
    yield run
    run.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT], ids=lambda number: number.name)
def test_a_signal_restores_the_terminal_and_ends_the_engine(application: PtyRun, number: signal.Signals) -> None:
    (engine,) = children(application.process.pid)
    application.process.send_signal(number)
    assert application.finish() == 128 + number
    assert not [off for off in RESTORED if off not in application.written]
    wait_until(lambda: not is_alive(engine))


def test_a_terminal_that_vanishes_ends_application_and_engine(application: PtyRun) -> None:
    (engine,) = children(application.process.pid)
    os.close(application._terminal)
    application._terminal = os.open(os.devnull, os.O_RDWR)
    application.process.wait(PATIENCE_S)
    wait_until(lambda: not is_alive(engine))
