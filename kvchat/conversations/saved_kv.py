"""The files with K/V beside the database: the engine writes them, deleting a conversation sets its file aside.

They are a convenience: what cannot be moved or is missing is computed again.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from kvchat import paths

ASIDE = ".deleted"


class SavedKv:
    """The files in ``folder``, which need not exist."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set_aside(self, conversation: str) -> None:
        """The conversation is deleted; its file can be brought back until ``purge``."""
        path = paths.saved_kv(self._folder, conversation)
        with suppress(OSError):
            os.utime(path)
            path.rename(_aside(path))

    def bring_back(self, conversation: str) -> None:
        """The conversation is restored."""
        path = paths.saved_kv(self._folder, conversation)
        with suppress(OSError):
            _aside(path).rename(path)

    def purge(self, after_s: float) -> None:
        """Delete what was set aside longer ago than that."""
        for path in self._folder.glob(f"*{paths.SAVED_KV}{ASIDE}"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > after_s:
                    path.unlink()


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ASIDE)
