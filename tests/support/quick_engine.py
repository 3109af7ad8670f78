"""The fake engine, quicker: hundreds of applications start one each, and nine tenths of that is importing the protocol.

Here it is forked from a process that has imported it. The program ``launch_engine.py``, which needs nothing, stands for
it: it ends as the engine does, and the engine ends with it.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from support.environment import environ
from support.fake_engine import FakeEngine

SERVE = "import sys; from support.quick_engine import serve; serve(int(sys.argv[1]))"


@contextmanager
def started() -> Iterator[tuple[str, ...]]:
    """The command that starts an engine as long as this lasts."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        address = f"{folder}/engine"  # a test's own folder has too long a name for a socket
        listener.bind(address)
        listener.listen()
        command = [sys.executable, "-c", SERVE, str(listener.fileno())]
        with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=environ()):
            yield (sys.executable, "-S", "-I", str(Path(__file__).with_name("launch_engine.py")), address)


def serve(descriptor: int) -> None:
    """Fork an engine for every program that asks, until stdin ends."""
    listener = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        client, _ = listener.accept()
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            _guard(client)
        client.close()


def _guard(client: socket.socket) -> NoReturn:
    """Be the parent of one engine: tell how it ended, and end it with the program that stands for it."""
    size, streams, _, _ = socket.recv_fds(client, 4, 3)
    asked = client.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
    alive, held = os.pipe()  # until the engine ends, however it does
    if not (engine := os.fork()):
        client.close()
        _run(streams, *asked.split(b"\0"))
    for descriptor in (held, *streams):
        os.close(descriptor)
    is_alone = client in select.select([client, alive], [], [])[0]
    if is_alone:
        os.kill(engine, signal.SIGKILL)
    _, status = os.waitpid(engine, 0)
    if not is_alone:
        client.sendall(b"%d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _run(streams: list[int], folder: bytes, *environment: bytes) -> NoReturn:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environb.clear()
    os.environb.update(pair.split(b"=", 1) for pair in environment)
    code = 1
    try:
        FakeEngine().serve()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001  # whatever it is, as Python's own end
        traceback.print_exc()
    finally:
        os._exit(code)
