"""The worker in its own process: its streams, and what ends it."""

import os
import subprocess
import sys

import pytest
from support.environment import environ
from support.patience import PATIENCE_S, wait_until
from support.streams import read_event
from support.worker_child import CHAT

from kvchat.protocol import wire
from kvchat.protocol.messages import Command, Event, Failed, Finished, Load, Loaded, Loading, Started, Stop

FIRST = Load("first")

SERVE_A_FAKE = """
import os, sys, time, types
from support.environment import environ
from support.fake_session import FakeSession
from kvchat.engine import worker as mailboxes, worker
from kvchat.engine.worker import Progress

def on_token(session, n):
    print("a library prints")
    os.write(1, b"a C library prints")
    time.sleep({pause})

session = FakeSession({pieces}, on_token)
sys.modules["kvchat.engine.session"] = types.SimpleNamespace(open_session=session.open)
worker.main()
"""

# Inserted before the last line: sets an event once a load was interrupted.
RECORD_INTERRUPTS = """
import threading
interrupted, interrupt = threading.Event(), worker._interrupt
worker._interrupt = lambda: (interrupt(), interrupted.set())
"""


def start(
    pause: float = 0.0, pieces: str = "['x'] * 5", before: str = "", path: tuple[str, ...] = ()
) -> subprocess.Popen[bytes]:
    """Start the process; it runs the code in ``before`` first and also imports from ``path``."""
    code = SERVE_A_FAKE.format(pause=pause, pieces=pieces).replace("worker.main()", f"{before}\nworker.main()")
    env = environ(PYTHONPATH=os.pathsep.join((environ()["PYTHONPATH"], *path)))
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, env=env)


def receive(process: subprocess.Popen[bytes], kind: type | tuple[type, ...]) -> Event:
    assert process.stdout
    while not isinstance(event := read_event(process.stdout), kind):
        assert event is not None
    return event


def send(process: subprocess.Popen[bytes], *commands: Command) -> None:
    assert process.stdin
    process.stdin.write(b"".join(map(wire.encode, commands)))
    process.stdin.flush()


def test_library_output_goes_to_stderr():
    with start() as process:
        send(process, Load(), CHAT)
        receive(process, Finished)
        _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert b"a library prints" in log
    assert b"a C library prints" in log


@pytest.mark.parametrize("pause", [0.001, 1000.0], ids=["between two tokens", "deep in a step"])
def test_process_ends_mid_answer_when_stdin_closes(pause):
    with start(pause, "['x'] * 10_000_000") as process:
        send(process, Load(), CHAT)
        receive(process, Started)
        assert process.stdin
        process.stdin.close()
        assert process.wait(PATIENCE_S) == (0 if pause < 1 else 1)


def test_process_ends_quietly_when_its_stdout_closes():
    with start(0.001, "['x'] * 10_000_000") as process:
        send(process, Load(), CHAT)
        receive(process, Started)
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.wait(PATIENCE_S) == 0
        assert b"Error" not in process.stderr.read()


def test_stop_reaches_a_silent_load():
    waits = "sys.modules['kvchat.engine.session'].open_session = lambda load, progress: time.sleep(3600)"
    with start(before=waits) as process:
        send(process, FIRST)
        receive(process, Loading)
        send(process, Stop())
        stopped = receive(process, Failed)
        assert ("first" in stopped.title, stopped.fatal) == (True, True)
        assert process.stdin
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0


def test_engine_can_load_after_a_stop_during_imports(tmp_path):
    """With modules in place of torch: the second is imported while the first waits, and is no attribute of it later.

    The first waits until the stop has interrupted it.
    """
    package = tmp_path / "slow"
    package.mkdir()
    begun = tmp_path / "begun"
    waits = f"open({str(begun)!r}, 'w'); __main__.interrupted.wait({PATIENCE_S})"
    (package / "__init__.py").write_text(f"import __main__, slow.part; {waits}; slow.part")
    (package / "part.py").write_text("")
    load = "lambda load, progress: (__import__('slow').part, progress('imported'), session.open(load, progress))[-1]"
    before = f"sys.modules['kvchat.engine.session'].open_session = {load}\n{RECORD_INTERRUPTS}"
    with start(before=before, path=(str(tmp_path),)) as process:
        send(process, FIRST)
        wait_until(begun.exists)
        send(process, Stop())
        stopped = receive(process, (Loaded, Failed))
        assert ("first" in stopped.title, stopped.fatal) == (True, True)
        send(process, FIRST)
        assert isinstance(receive(process, (Loaded, Failed)), Loaded)
        assert process.stdin
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
