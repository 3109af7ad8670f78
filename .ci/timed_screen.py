"""The application in a pseudo terminal, timed from a key to the last byte that the terminal is sent for it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import start_app
from support.environment import environ
from support.pty_run import PtyRun

STILL_S = 0.3  # without a byte for so long the screen is complete
Taken = tuple[float, float]  # milliseconds that passed, and those of them computed by the application's process


class TimedScreen:
    """The application over a fake engine, in a terminal of so many cells; it goes on with the latest conversation."""

    def __init__(self, folder: Path, width: int, height: int) -> None:
        self._begun = time.perf_counter()
        environment = environ(HOME=str(folder), XDG_STATE_HOME=str(folder / "state"))
        self._pty = PtyRun([*start_app.command(folder), "resume"], environment, width, height, folder)
        self._pid = self._pty.process.pid

    def opened(self, word: str) -> Taken:
        """Wait for a word of the conversation, then for the engine; the first from the start of the process on."""
        self._pty.until(word)
        taken = 1000 * (time.perf_counter() - self._begun), 1000 * self._computed()
        self._pty.until(start_app.READY)
        self.settle()
        return taken

    def echo(self, letter: str) -> Taken:
        """Type a letter that was not on the screen yet, until it is."""
        return self._timed(lambda: self._pty.type(letter.encode()), lambda: self._shown(letter))

    def complete(self, keys: bytes = b"", size: tuple[int, int] | None = None) -> Taken:
        """Type keys or change the size, until the screen stands still."""
        return self._timed(lambda: self._pty.resize(*size) if size else self._pty.type(keys), self._still)

    def type(self, keys: bytes, until: str = "") -> None:
        """Type keys and wait for a text, or else until the screen stands still."""
        self._pty.written = b""
        self._pty.type(keys)
        if until:
            self._pty.until(until)
        else:
            self.settle()

    def settle(self) -> None:
        """Wait until nothing more is written."""
        while self._pty.read(STILL_S):
            pass

    def rest(self, seconds: float) -> None:
        """Let the application write for a while."""
        until = time.perf_counter() + seconds
        while (left := until - time.perf_counter()) > 0:
            self._pty.read(left)

    def peak_bytes(self) -> int:
        """The most memory that the application's process has had so far."""
        status = Path(f"/proc/{self._pid}/status").read_text(encoding="utf-8")
        return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])

    def close(self) -> None:
        """End the application."""
        self._pty.close()

    def _timed(self, do: Callable[[], None], wait: Callable[[], float]) -> Taken:
        self._pty.written = b""
        begun, before = time.perf_counter(), self._computed()
        do()
        ended = wait()
        return 1000 * (ended - begun), 1000 * (self._computed() - before)

    def _shown(self, letter: str) -> float:
        self._pty.until(letter)
        return time.perf_counter()

    def _still(self) -> float:
        self._pty.until("\x1b")
        last = time.perf_counter()
        while self._pty.read(STILL_S):
            last = time.perf_counter()
        return last

    def _computed(self) -> float:
        return time.clock_gettime(~self._pid << 3 | 2)  # the clock that clock_getcpuclockid(3) names
