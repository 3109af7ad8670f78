"""The engine's server in a thread, driven through pipes, and a clock that is advanced by hand."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

from support.fake_session import FakeLoader
from support.patience import PATIENCE_S
from support.streams import read_event

from kvchat.engine import worker
from kvchat.engine.worker import Loader
from kvchat.protocol import wire
from kvchat.protocol.figures import Snapshot
from kvchat.protocol.messages import (
    Chat,
    Command,
    Turn,
)

CHAT = Chat((Turn("user", "hello"),))


class Clock:
    """A clock that is advanced by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Child:
    """A server in a thread, driven through pipes."""

    def __init__(self, loader: FakeLoader | Loader, clock: Callable[[], float]) -> None:
        stdin, self._stdin = os.pipe()
        self._stdout, stdout = os.pipe()
        self.commands, self.events = os.fdopen(self._stdin, "wb"), os.fdopen(self._stdout, "rb", buffering=0)
        self._ends = os.fdopen(stdin, "rb"), os.fdopen(stdout, "wb")
        self.server = worker.Server(self._ends[1], loader, clock)
        self._threads = [
            threading.Thread(target=self.server.read, args=(self._ends[0],), daemon=True),
            threading.Thread(target=self._run, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        self.server.run()
        self._ends[1].close()

    def send(self, *commands: Command) -> None:
        self.commands.write(b"".join(map(wire.encode, commands)))
        self.commands.flush()

    def until(self, *kinds: type) -> list[wire.Message]:
        """Events up to and including the first of the given kinds; snapshots only if requested."""
        events = []
        while select.select([self.events], [], [], PATIENCE_S)[0] and (event := read_event(self.events)) is not None:
            if not isinstance(event, Snapshot) or Snapshot in kinds:
                events.append(event)
            if isinstance(event, kinds):
                return events
        raise AssertionError(f"the server sent nothing more after {events}")

    def close(self) -> None:
        if not self.commands.closed:
            self.commands.close()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        self.events.close()
        self._ends[0].close()


def tick(clock: Clock, seconds: float) -> None:
    clock.now += seconds
