"""Print results on stdout, everything else on stderr, without control characters for a terminal."""

from __future__ import annotations

import math
import shutil
import sys
import time
from contextlib import suppress
from io import TextIOWrapper

from kvchat.foreign_text import visible

LINE_S = 10.0  # seconds between lines of progress in a file or a pipe
_since = math.inf  # when the work in progress began, or printed its last line


def replace_unknown_characters() -> None:
    """Print a question mark for a character that the locale's encoding lacks; a plain C locale has few."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def echo(text: str) -> None:
    """Print lines for a person on stdout."""
    write(f"{visible(text)}\n")


def write(text: str) -> None:
    """Write to stdout: unchanged to a file or a pipe, with control characters made visible to a terminal."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def note(text: str) -> None:
    """Print a line that begins with the program's name on stderr."""
    report(f"kvchat: {text}")


def report(text: str) -> None:
    """Print lines for a person on stderr; ignore that its terminal or pipe is gone, which a server outlives."""
    with suppress(OSError):
        sys.stderr.write(f"{visible(text)}\n")
        sys.stderr.flush()


def progress(stage: str) -> None:
    """Show ``stage`` on stderr, cut to a line, in place of the previous stage; an empty one clears the line.

    In a file or a pipe, print a line every ``LINE_S`` of work instead.
    """
    global _since
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{visible(stage)[: shutil.get_terminal_size().columns - 1]}")
        sys.stderr.flush()
    elif not stage:
        _since = math.inf
    elif _since == math.inf:
        _since = time.monotonic()
    elif time.monotonic() - _since >= LINE_S:
        _since = time.monotonic()
        note(stage)
