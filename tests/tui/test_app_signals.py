"""However the application is ended the terminal is given back, and no engine is left."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import start_app
from support.environment import environ
from support.patience import PATIENCE_S, wait_until
from support.pty_run import PtyRun

from kvchat.tui.app import ENDING

F4 = b"\x1bOS"
# What was switched on is switched off at the end: alternate screen, mouse, pastes; the cursor comes back.
RESTORED = (b"\x1b[?1049l", b"\x1b[?1000l", b"\x1b[?1003l", b"\x1b[?2004l", b"\x1b[?25h")


def kept(written: bytes) -> list[bytes]:
    """What was not switched off last."""
    switched_on = {off: off[:-1] + (b"l" if off.endswith(b"h") else b"h") for off in RESTORED}
    return [off for off, on in switched_on.items() if written.rfind(off) <= written.rfind(on)]


def children(pid: int) -> list[int]:
    command = ["ps", "-o", "pid=", "--ppid", str(pid)]
    return [int(line) for line in subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()]


def is_alive(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


@pytest.fixture
def started(tmp_path: Path, request: pytest.FixtureRequest):
    """The application as a shell starts it; a test may name signals that it does not hear."""
    heard_by_all = signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT, signal.SIGINT  # a shell's background jobs ignore some
    ways = dict.fromkeys(heard_by_all, signal.SIG_DFL) | dict.fromkeys(getattr(request, "param", ()), signal.SIG_IGN)
    heard = {number: signal.signal(number, way) for number, way in ways.items()}
    run = PtyRun(start_app.command(tmp_path), environ(TERM="xterm-256color"))
    for number, handler in heard.items():
        signal.signal(number, handler)
    yield run
    run.close()


@pytest.fixture
def application(started: PtyRun):
    started.until(start_app.READY)
    return started


@pytest.mark.parametrize("number", ENDING, ids=lambda number: number.name)
def test_a_signal_restores_the_terminal_and_ends_the_engine(application: PtyRun, number: signal.Signals) -> None:
    (engine,) = children(application.process.pid)
    application.process.send_signal(number)
    assert application.finish() == 128 + number
    assert not kept(application.written)
    wait_until(lambda: not is_alive(engine))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_sent_again_and_again_restores_the_terminal(application: PtyRun, number: signal.Signals) -> None:
    while application.process.poll() is None:
        application.process.send_signal(number)
        application.read(0.02)
    application.finish()
    assert not kept(application.written)


def test_a_signal_as_soon_as_the_terminal_is_taken_gives_it_back(started: PtyRun) -> None:
    started.until("\x1b[?1049h")
    started.process.send_signal(signal.SIGTERM)
    assert started.finish() == 128 + signal.SIGTERM
    assert not kept(started.written)


@pytest.mark.parametrize(
    "started",
    [(), (signal.SIGHUP,), (signal.SIGHUP, signal.SIGTERM)],
    indirect=True,
    ids=["told", "under nohup", "hears nothing"],
)
def test_a_terminal_that_vanishes_ends_application_and_engine(application: PtyRun) -> None:
    (engine,) = children(application.process.pid)
    os.close(application._terminal)
    application._terminal = os.open(os.devnull, os.O_RDWR)
    application.process.wait(PATIENCE_S)
    wait_until(lambda: not is_alive(engine))


def test_a_signal_while_the_editor_has_the_terminal_ends_both(tmp_path: Path) -> None:
    editor = "import sys, time; print('editing', flush=True); time.sleep(3600)"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(editor)}"
    run = PtyRun(start_app.command(tmp_path), environ(TERM="xterm-256color", VISUAL=command, TMPDIR=str(tmp_path)))
    try:
        run.until(start_app.READY)
        run.type(F4)
        run.until("editing")
        started = children(run.process.pid)
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 128 + signal.SIGTERM
    finally:
        run.close()
    assert len(started) == 2
    assert not [pid for pid in started if is_alive(pid)]
    assert not list(tmp_path.glob("*.md"))
    assert not kept(run.written)
