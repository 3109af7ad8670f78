"""Entries of folders, for paths that are typed: read on a thread, because a folder may be slow and typing may not."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import NamedTuple

FRESH_S = 2.0  # what was read longer ago is read again
REMEMBERED = 16
MAX_ENTRIES = 20_000
MAX_WITH_BELOW, MAX_DEPTH, WALK_S = 5_000, 6, 0.5  # names are matched at each key, so that few milliseconds are left
SKIPPED = ("node_modules", "__pycache__")


class Entry(NamedTuple):
    """A file or folder by its name, or by its path where it lies below the folder that was read.

    ``size`` is in bytes, None of a folder and where it cannot be read.
    """

    name: str
    is_folder: bool = False
    size: int | None = None


Entries = Callable[[str], Sequence[Entry]]
"""Given a path as it is typed, "" for the present folder, what lies there; nothing where that cannot be read."""


def read(folder: str) -> tuple[Entry, ...]:
    """The entries of a folder now; in the present folder also those further below, the nearest first."""
    found = _entries(folder)
    if not folder.startswith(("/", "~", "..")):
        _add_below(folder, found)
    return tuple(found)


def _entries(folder: str, below: str = "") -> list[Entry]:
    """The entries of ``below``, a folder in ``folder``."""
    try:
        with os.scandir(os.path.expanduser(folder + below) or ".") as found:
            return [_entry(below, one) for one in itertools.islice(found, MAX_ENTRIES)]
    except OSError:
        return []


def _add_below(folder: str, found: list[Entry]) -> None:
    """Walk the folders in ``found``, which grows by what lies in them; none that is hidden or a link."""
    until = time.monotonic() + WALK_S
    for entry in found:
        if len(found) >= MAX_WITH_BELOW or time.monotonic() > until:
            break
        name = entry.name.rpartition("/")[2]
        is_walked = entry.is_folder and name[0] != "." and name not in SKIPPED and entry.name.count("/") < MAX_DEPTH
        if is_walked and not os.path.islink(folder + entry.name):
            found += _entries(folder, f"{entry.name}/")[: MAX_WITH_BELOW - len(found)]


class FolderReader:
    """Knows what lay in folders when they were read last; ``changed`` is called when that has become something else."""

    def __init__(self, changed: Callable[[], None], read: Entries = read) -> None:
        self._changed = changed
        self._read = read
        self._known: dict[str, tuple[Sequence[Entry], float]] = {}
        self._reading: set[str] = set()

    def entries(self, folder: str) -> Sequence[Entry]:
        """The known entries of a folder, at once; none as long as it has not been read."""
        entries, read_at = self._known.get(folder, ((), float("-inf")))
        if folder not in self._reading and time.monotonic() - read_at > FRESH_S:
            self._reading.add(folder)
            # What is changed then is changed as by who asks now: Textual knows by the context whose widgets they are.
            back = partial(asyncio.get_running_loop().call_soon_threadsafe, context=copy_context())
            # A daemon: a folder that never answers must not keep the application from ending.
            threading.Thread(target=self._work, args=(folder, back), daemon=True).start()
        return entries

    def _work(self, folder: str, back: Callable[..., object]) -> None:
        entries = self._read(folder)
        with suppress(RuntimeError):  # the application has ended meanwhile
            back(self._take, folder, entries)

    def _take(self, folder: str, entries: Sequence[Entry]) -> None:
        self._reading.discard(folder)
        before, _ = self._known.pop(folder, ((), 0.0))
        self._known[folder] = (entries, time.monotonic())
        while len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]
        if entries != before:
            self._changed()


def _entry(below: str, found: os.DirEntry[str]) -> Entry:
    path = below + found.name
    try:
        if found.is_dir():
            return Entry(path, is_folder=True)
        return Entry(path, size=found.stat().st_size)
    except OSError:
        return Entry(path)
