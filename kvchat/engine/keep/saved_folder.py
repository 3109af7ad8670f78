"""The folder of saved K/V: a file for each conversation, the least recently used ones deleted beyond a limit."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from kvchat import paths

DISK_SHARE = 2  # of what is free on the disk at most one part in so many is taken


class SavedFolder:
    """``folder`` need not exist; ``limit`` is in bytes."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit

    def path(self, conversation: str) -> Path:
        """The path of a conversation's K/V file; it need not exist."""
        return paths.saved_kv(self._folder, conversation)

    def latest_first(self) -> list[Path]:
        """The files, the one used last first."""
        return [path for _, path in sorted(self._used(), reverse=True)]

    def touch(self, path: Path) -> None:
        """Note that a file is used."""
        with suppress(OSError):
            os.utime(path)

    def delete(self, conversation: str) -> None:
        """Delete a conversation's file, if there is one; one that cannot be deleted stays."""
        with suppress(OSError):
            self.path(conversation).unlink()

    def make_room(self, path: Path, size: int) -> int:
        """Delete files until ``path`` may grow to ``size`` bytes; how large it may become, where that is less.

        None is deleted for one that would not fit alone: it gets what the others leave.
        """
        others = [other for other in self.latest_first() if other != path]
        allowed = self._allowed()
        taken = sum(map(_size, others))
        while others and taken + size > allowed >= size:
            oldest = others.pop()
            taken -= _size(oldest)
            with suppress(OSError):
                oldest.unlink()
        return max(0, min(size, allowed - taken))

    def _allowed(self) -> int:
        """Bytes of all files, of those there now and more."""
        there = next((place for place in (self._folder, *self._folder.parents) if place.exists()), self._folder)
        free = shutil.disk_usage(there).free
        return min(self._limit, sum(map(_size, self.latest_first())) + free // DISK_SHARE)

    def _used(self) -> list[tuple[float, Path]]:
        found = []
        for path in self._folder.glob(f"*{paths.SAVED_KV}*"):
            with suppress(OSError):
                found.append((path.stat().st_mtime, path))
        return found


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0
