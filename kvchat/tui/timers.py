"""Timers that come, on a busy machine too."""

from __future__ import annotations

from textual.timer import Timer


def unskipped(timer: Timer) -> Timer:
    """Let a timer that was just made come late, and not never.

    Textual skips a turn that is over before it begins to wait for it. A timer of one turn is lost for good where the
    process stands still for that long between two lines; what waits for it, a new size or a growing answer, is too.
    """
    timer._skip = False
    return timer
