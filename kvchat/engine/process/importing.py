"""Detects that Python is importing a module."""

from __future__ import annotations

from types import FrameType

IMPORTER = "<frozen importlib._bootstrap>"


def is_importing(frame: FrameType | None) -> bool:
    """True if ``frame`` runs inside an import; a module whose import is cut off cannot be imported again here.

    Parts of torch that were imported already stay, but are no attributes of what is imported next.
    """
    while frame is not None and frame.f_code.co_filename != IMPORTER:
        frame = frame.f_back
    return frame is not None
