"""The replaying engine: ``python -m kvchat.replay.engine FILE`` sends a recording's events at their times.

To the application it looks like any engine, a child process that speaks the protocol on stdin and stdout, but it needs
no model, torch or GPU. ``Pace`` changes its speed; commands that need a model are refused.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from kvchat.errors import KvchatError
from kvchat.protocol import messages, recording, wire
from kvchat.protocol.figures import Planned, Snapshot
from kvchat.protocol.recording import Entry

MAX_GAP_S = 2.0  # longer pauses in a recording are cut to this
REFUSAL = ("This is a recording.", "There is no model behind it.", "`kvchat` alone starts a chat.")


class Player:
    """Plays entries to ``events``; ``read`` takes commands on its own thread."""

    def __init__(self, entries: Sequence[Entry], events: BinaryIO) -> None:
        self._entries = entries
        self._events = events
        self._changed = threading.Condition()
        self._speed = 1.0
        self._closed = False
        self._unanswered = 0  # questions of the recording that the application has not sent yet
        self._mode = ""
        self._details = messages.Details(0)

    def play(self) -> None:
        """Send every event at its time, then wait for the application to close."""
        now = 0.0
        for entry in self._entries:
            self._wait(min(entry.seconds - now, MAX_GAP_S))
            if self._closed:
                return
            now = entry.seconds
            self._note(entry.event)
            self._send(entry.event)
        self._send(messages.Replayed(now))
        with self._changed:
            self._changed.wait_for(lambda: self._closed)

    def read(self, commands: BinaryIO) -> None:
        """Execute commands until the application closes."""
        with suppress(ValueError, OSError):
            while (body := wire.read(commands)) is not None:
                self._do(wire.decode_command(body))
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _do(self, command: messages.Command) -> None:
        match command:
            case messages.Pace(speed):
                with self._changed:
                    self._speed = speed
                    self._changed.notify()
            case messages.Chat() if self._unanswered:
                self._unanswered -= 1  # the application's reply to ``Asked``
            case messages.Switch():
                self._send(messages.SwitchRefused(self._mode, " ".join(REFUSAL)))
            case messages.Chat() | messages.Compare() | messages.HideNeedle() | messages.Rebuild():
                self._send(messages.Failed(*REFUSAL))
            case messages.Plan(load):
                self._send(Planned(load.model, None, " ".join(REFUSAL)))
            case messages.Watch(True):
                self._send(self._details)  # the application waits for details, and the recording may have no more

    def _note(self, event: messages.Event) -> None:
        match event:
            case messages.Asked():
                self._unanswered += 1
            case messages.Loaded() | messages.Switched() | Snapshot():
                self._mode = event.mode
            case messages.Details():
                self._details = event

    def _wait(self, seconds: float) -> None:
        """Wait for ``seconds`` of the recording, at the current speed."""
        with self._changed:
            while seconds > 0 and not self._closed:
                began, speed = time.monotonic(), self._speed
                self._changed.wait(seconds / speed if speed else None)
                seconds -= (time.monotonic() - began) * speed

    def _send(self, event: messages.Event) -> None:
        with self._changed, suppress(BrokenPipeError):
            self._events.write(wire.encode(event))
            self._events.flush()


def main() -> None:
    try:
        entries = recording.read(Path(sys.argv[1]))
    except KvchatError as error:
        sys.exit(f"kvchat: {error}")
    player = Player(entries, sys.stdout.buffer)
    threading.Thread(target=player.read, args=(sys.stdin.buffer,), daemon=True).start()
    player.play()


if __name__ == "__main__":
    main()
