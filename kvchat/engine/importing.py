"""Whether Python imports something right now."""

from __future__ import annotations

from types import FrameType

IMPORTER = "<frozen importlib._bootstrap>"


def is_importing(frame: FrameType | None) -> bool:
    """Whether ``frame`` runs inside an import: what is cut off there cannot be imported in this process any more.

    Parts of torch that were imported already stay, but are no attributes of what is imported next.
    """
    while frame is not None and frame.f_code.co_filename != IMPORTER:
        frame = frame.f_back
    return frame is not None
