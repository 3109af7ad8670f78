"""However the application ends, the terminal is restored and no engine is left.

``KVCHAT_TEST_SIGNALS=100`` sends 100 signals at random moments, as ``.ci/long`` does.
"""

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import start_app
from support.environment import environ
from support.lost_text import MAX_LOSS_S, WORDS, loss
from support.patience import PATIENCE_S, wait_until
from support.pty_run import PtyRun

from kvchat.conversations.store import ConversationStore
from kvchat.tui.app import ENDING

SIGNALS = int(os.environ.get("KVCHAT_TEST_SIGNALS", "1"))
F4 = b"\x1bOS"
# Alternate screen, mouse and bracketed paste are switched off at the end, and the cursor comes back.
RESTORED = (b"\x1b[?1049l", b"\x1b[?1000l", b"\x1b[?1003l", b"\x1b[?2004l", b"\x1b[?25h")


def modes_left_on(written: bytes) -> list[bytes]:
    """The terminal modes that are still on."""
    switched_on = {off: off[:-1] + (b"l" if off.endswith(b"h") else b"h") for off in RESTORED}
    return [off for off, on in switched_on.items() if written.rfind(off) <= written.rfind(on)]


def children(pid: int) -> list[int]:
    command = ["ps", "-o", "pid=", "--ppid", str(pid)]
    return [int(line) for line in subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()]


def is_alive(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


@contextmanager
def started_in(folder: Path, ignored: tuple[signal.Signals, ...] = ()) -> Iterator[PtyRun]:
    """The application as a shell starts it, except that it ignores some signals."""
    handled = signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT, signal.SIGINT  # a shell's background jobs ignore some
    handlers = dict.fromkeys(handled, signal.SIG_DFL) | dict.fromkeys(ignored, signal.SIG_IGN)
    before = {number: signal.signal(number, action) for number, action in handlers.items()}
    run = PtyRun(start_app.command(folder), environ(TERM="xterm-256color", FAKE_LEDGER=str(folder / "ledger")))
    for number, handler in before.items():
        signal.signal(number, handler)
    try:
        yield run
    finally:
        run.close()


@pytest.fixture
def started(tmp_path, request):
    """Starts the application; a test may name signals that it ignores."""
    with started_in(tmp_path, getattr(request, "param", ())) as run:
        yield run


@pytest.fixture
def application(started):
    started.until(start_app.READY)
    return started


# All of ENDING share a handler; test_a_signal_at_any_moment_restores_the_terminal sends the others in the long form.
def test_a_signal_restores_the_terminal_and_ends_the_engine(application, count):
    (engine,) = children(application.process.pid)
    application.process.send_signal(signal.SIGTERM)
    count["signals"] += 1
    assert application.finish() == 128 + signal.SIGTERM
    assert not modes_left_on(application.written)
    wait_until(lambda: not is_alive(engine))


def test_repeated_signals_restore_the_terminal(application, count):
    while application.process.poll() is None:
        application.process.send_signal(signal.SIGINT)
        count["signals"] += 1
        application.read(0.02)
    application.finish()
    assert not modes_left_on(application.written)


def test_an_early_signal_restores_the_terminal(started):
    started.until("\x1b[?1049h")
    started.process.send_signal(signal.SIGHUP)
    assert started.finish() == 128 + signal.SIGHUP
    assert not modes_left_on(started.written)


def test_a_signal_at_any_moment_restores_the_terminal(tmp_path, count):
    for turn in range(SIGNALS):
        rng = random.Random(turn)
        number = rng.choice(ENDING)
        (folder := tmp_path / str(turn)).mkdir()
        with started_in(folder) as run:
            if turn % 2:  # during an answer
                run.until(start_app.READY)
                run.type(b"slow\r")
            at = time.monotonic() + rng.uniform(0, 3)
            while (wait_s := at - time.monotonic()) > 0:
                run.read(wait_s)
            engines = children(run.process.pid)
            run.process.send_signal(number)
            count["signals"] += 1
            assert run.finish() in (128 + number, -number), (turn, number)  # -number: before it takes the terminal
        assert b"\x1b[?1049h" not in run.written or not modes_left_on(run.written), (turn, number)
        wait_until(lambda engines=engines: not any(map(is_alive, engines)))


@pytest.mark.parametrize("started", [(), (signal.SIGHUP, signal.SIGTERM)], indirect=True, ids=["handled", "ignored"])
def test_a_vanished_terminal_ends_application_and_engine(application, tmp_path):
    """A vanished terminal, as after a dropped SSH connection; all but the last second of the answer is on disk."""
    (engine,) = children(application.process.pid)
    application.type(b"slow\r")
    application.until("window moves")
    until = time.monotonic() + 2.5
    while (wait_s := until - time.monotonic()) > 0:
        application.read(wait_s)
    vanished = time.time()
    os.close(application._terminal)
    application._terminal = os.open(os.devnull, os.O_RDWR)
    application.process.wait(PATIENCE_S)
    wait_until(lambda: not is_alive(engine))
    store = ConversationStore(tmp_path / "chats.db")
    question, answer = store.load(store.latest().id).path
    store.close()
    assert question.text == "slow"
    assert answer.text == (WORDS * 10_000)[: len(answer.text)]
    lost = loss(tmp_path / "ledger", vanished, len(answer.text))
    assert lost.seconds <= MAX_LOSS_S, lost


def test_a_signal_ends_application_and_editor(tmp_path):
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
    assert not modes_left_on(run.written)
