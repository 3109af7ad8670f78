"""Queues between the engine's threads and the application: commands received, events to send."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

from kvchat.protocol import wire
from kvchat.protocol.messages import Chat, Command, Compare, Event, InAnswer, Load, Rebuild, Stop, Text

TEXT_S = 1 / 30
MAX_WAITING_BYTES = 2 * wire.MAX_MESSAGE_BYTES
COMMAND_BYTES = 2**10  # what a command takes beside its text
STOPPABLE = Load | Chat | Rebuild | Compare


@dataclass(frozen=True)
class Refused:
    """In place of a command that cannot be read."""

    reason: str


class Inbox:
    """Commands in order, filled by the reader thread."""

    def __init__(self) -> None:
        self._commands: deque[tuple[Command | Refused, int]] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self.closed = False

    def put(self, command: Command | Refused, nbytes: int) -> None:
        """Append a command that was ``nbytes`` long.

        Raises:
            ValueError: more wait than memory should be spent on.
        """
        with self._changed:
            self._waiting_bytes += nbytes + COMMAND_BYTES
            if self._waiting_bytes > MAX_WAITING_BYTES:
                raise ValueError(f"{len(self._commands):,} commands wait to be done; no more are taken")
            self._commands.append((command, nbytes))
            self._changed.notify()

    def close(self) -> None:  # also waiting ones have no reader for their events
        with self._changed:
            self.closed = True
            self._changed.notify()

    def get(self, timeout: float | None) -> Command | Refused | None:
        """The next command; None after ``timeout`` seconds (None: never) or when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._commands or self.closed, timeout)
            return self._pop() if self._commands and not self.closed else None

    def get_in_answer(self) -> Command | Refused | None:
        """The next command if it can be done between two tokens; a Load or Chat keeps its place and all behind it."""
        with self._changed:
            return self._pop() if self._commands and isinstance(self._commands[0][0], InAnswer) else None

    def stops(self) -> bool:
        """True if a waiting ``Stop`` is meant for the work just begun: no other work it could stop waits before it."""
        with self._changed:
            commands = (command for command, _ in self._commands)
            ahead = itertools.takewhile(lambda command: not isinstance(command, STOPPABLE), commands)
            return any(isinstance(command, Stop) for command in ahead)

    def _pop(self) -> Command | Refused:
        command, nbytes = self._commands.popleft()
        self._waiting_bytes -= nbytes + COMMAND_BYTES
        return command


class Outbox:
    """Events to the application, text in batches; always flushed before any other event."""

    def __init__(self, stream: BinaryIO, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._pieces: list[Text] = []
        self._flushed = float("-inf")

    def send(self, event: Event) -> None:
        if isinstance(event, Text):
            self._pieces.append(event)
            if self._clock() - self._flushed >= TEXT_S:
                self.flush()
        else:
            self.flush()
            self._write(event)

    def flush(self) -> None:
        if self._pieces:
            self._write(Text("".join(p.text for p in self._pieces), sum(p.tokens for p in self._pieces)))
            self._pieces.clear()
            self._flushed = self._clock()

    def _write(self, event: Event) -> None:
        self._stream.write(wire.encode(event))
        self._stream.flush()
