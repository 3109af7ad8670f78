"""A program in a pseudo terminal: its output, byte for byte, and keys typed into it."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from support.patience import PATIENCE_S


class PtyRun:
    """``written`` are the bytes that reached the terminal; stdin, stdout and stderr are the terminal unless given.

    ``folder`` is the program's working folder.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        width: int = 220,
        height: int = 160,
        folder: Path | None = None,
        **streams: int,
    ) -> None:
        self.written = b""
        self._terminal, child = os.openpty()
        self.resize(width, height)
        environ = {name: value for name, value in environ.items() if name not in ("COLUMNS", "LINES")}
        streams = {"stdin": child, "stdout": child, "stderr": child, **streams}
        self.process = subprocess.Popen(command, env=environ, cwd=folder, start_new_session=True, **streams)
        os.close(child)

    def resize(self, width: int, height: int) -> None:
        """Change the size in cells; a program with this controlling terminal gets SIGWINCH."""
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def until(self, text: str) -> None:
        """Read until a text has been written."""
        deadline = time.monotonic() + PATIENCE_S
        while text.encode() not in self.written:
            assert time.monotonic() < deadline, f"{text} did not come in {self.written[-3000:]!r}"
            assert self.read(0.1) or self.process.poll() is None, f"it ended before {text}: {self.written[-3000:]!r}"

    def type(self, keys: bytes) -> None:
        os.write(self._terminal, keys)

    def finish(self) -> int:
        """Read to the end; return the exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it does not end: {self.written[-3000:]!r}"
            self.read(0.1)
        while self.read(0.1):
            pass
        return self.process.returncode

    def close(self) -> None:
        """Kill the program if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._terminal)

    def read(self, wait_s: float) -> bytes:
        """Read what has been written, waiting at most ``wait_s`` for the first byte."""
        if not select.select([self._terminal], [], [], wait_s)[0]:
            return b""
        data = b""
        with suppress(OSError):  # the terminal of an ended program
            data = os.read(self._terminal, 65536)
        self.written += data
        return data
