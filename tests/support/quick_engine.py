"""The fake engine, faster: hundreds of applications start one each, and importing the protocol takes 90 % of that time.

Here it is forked from a process that has imported it. The program ``launch_engine.py``, which imports nothing of
kvchat, is its proxy: it exits as the engine does, and the engine is killed with it.
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
    """The command that starts an engine within this block."""
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
    """Be the parent of one engine: report its exit code to its proxy, and kill it if the proxy ends first."""
    size, streams, _, _ = socket.recv_fds(client, 4, 3)
    asked = client.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
    alive, held = os.pipe()  # open until the engine ends, however it ends
    if not (engine := os.fork()):
        client.close()
        _run(streams, *asked.split(b"\0"))
    for descriptor in (held, *streams):
        os.close(descriptor)
    proxy_ended = client in select.select([client, alive], [], [])[0]
    if proxy_ended:
        os.kill(engine, signal.SIGKILL)
    _, status = os.waitpid(engine, 0)
    if not proxy_ended:
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
    except BaseException:  # noqa: BLE001  # any, as at Python's own exit
        traceback.print_exc()
    finally:
        os._exit(code)
