"""Files mentioned in a question as ``@path`` or ``@"a path"``: completed while it is typed, read when it is sent."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import copy_context
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvchat.conversations import attachments
from kvchat.errors import UsageError
from kvchat.files import read_text
from kvchat.units import size

OFFERED = 50
_SINGLE = r"""'[^'\n]+'(?:(?:\\'|"'")'[^'\n]*')*"""  # a shell's way to write a quote inside: '\'' or '"'"'
MENTION = re.compile(rf"""(?<!\S)(\\?)@(?:"([^"\n]+)"|({_SINGLE})|([^\s"](?:\\ |\S)*))""")
_BEGUN = re.compile(r"""(?<!\S)@(?:"([^"\n]*)|([^\s"]*))$""")
_PLAIN_PATH = re.compile(r"(~|\.{0,2}/)|.*\.\w{1,4}$")  # unlike a decorator such as @app.route
PUNCTUATION = ".,;:!?)]}'"
FRESH_S = 2.0  # then a folder is read again
REMEMBERED = 16
MAX_ENTRIES = 20_000
MAX_WITH_BELOW, MAX_DEPTH, WALK_S = 5_000, 6, 0.5  # all names are matched at each key, within milliseconds
SKIPPED = ("node_modules", "__pycache__")


class Part(NamedTuple):
    """A part of a question; ``@`` mentions a file only in a part that ``is_typed``."""

    text: str
    is_typed: bool = True


def mentioned(text: str) -> list[str]:
    """Return the names of the files that a text seems to mention."""
    return [*dict.fromkeys(_named(found)[0] for found in MENTION.finditer(text) if not found[1])]


def attach(parts: Iterable[Part], limit: int) -> str:
    """Return the text to send: the files that typed parts mention, at most ``limit`` bytes in all, then the question.

    In the question, a mention becomes the file's name; a question of nothing but mentions is left out.

    Raises:
        KvchatError: a file does not exist, cannot be read, is not text or is too large.
    """
    files: dict[str, str] = {}
    written, rest = "", ""

    def replace(found: re.Match[str]) -> str:
        name, after, is_quoted = _named(found)
        if found[1]:
            return found[0][_is_meant(found) :]
        if not _is_file(name, is_quoted):
            return found[0]
        if name not in files:
            room = limit - sum(len(text.encode("utf-8", "replace")) for text in files.values())
            files[name] = read_text(Path(os.path.expanduser(name)), max(room, 0))
        return name + after

    for text, is_typed in parts:
        written += MENTION.sub(replace, text) if is_typed else text
        rest += MENTION.sub("", text) if is_typed else text
    fenced = [attachments.fenced(name, text) for name, text in files.items()]
    return "\n\n".join(filter(None, (*fenced, written if rest.strip() or not files else "")))


def literal(text: str) -> str:
    """Return how to type a text so that it is sent unchanged: with ``\\@`` where ``@`` would mean a file."""
    mentions = {found[0]: found for found in MENTION.finditer(text)}  # a check reads a folder; a paste may repeat one
    meant = {written for written, found in mentions.items() if not found[1] and _is_meant(found)}
    return MENTION.sub(lambda found: "\\" * (found[0] in meant) + found[0], text)


def mention(path: str) -> str:
    """Return the mention of a file, in quotes if its path needs them."""
    if '"' in path:
        return f"@{shlex.quote(path)}"
    return f'@"{path}"' if re.search(r"\s", path) else f"@{path}"


def dropped(text: str) -> str:
    """Return a text pasted after an ``@``: if it is the paths of several files, the others get an ``@`` too."""
    with suppress(ValueError):  # a quote is not closed
        paths = shlex.split(text)
        if len(paths) > 1 and all(path.startswith("/") and _exists(path) for path in paths):
            return " ".join(map(mention, paths)).removeprefix("@")
    return text


def unquoted(path: str) -> str:
    """Return a path without the quotes or backslashes that a shell needs, or that a terminal adds to a dropped file."""
    if path.startswith(("'", '"')):
        with suppress(ValueError):  # it is not closed
            return " ".join(shlex.split(path))
    return re.sub(r"\\(\W)", r"\1", path)


def offer(before: str, entries: Entries) -> Offer | None:
    """Return suggestions for the mention at the end of ``before``; None if there is no mention."""
    begun = _BEGUN.search(before)
    if begun is None:
        return None
    typed = begun[1] if begun[1] is not None else begun[2]
    folder = typed[: typed.rfind("/") + 1]
    whole = (typed, typed.rstrip(PUNCTUATION)) if begun[1] is None else ()  # names a file already: Enter sends it
    is_whole = any(folder + entry.name in whole and not entry.is_folder for entry in entries(folder))
    found = []
    for path, label, doc, _ in matching(typed, entries):  # a file ends its mention with a space, a folder does not
        text = mention(path).removesuffix('"') if path.endswith("/") else f"{mention(path)} "
        if text.rstrip() != begun[0]:
            found.append(Suggestion(text, label, doc))
    return Offer(begun[0], tuple(found), takes_by_enter=not is_whole)


def matching(typed: str, entries: Entries) -> list[Suggestion]:
    """Return suggested paths for ``typed``, from its folder and below; the best matches of its last part come first.

    A folder's path ends in a slash.
    """
    folder, begun = typed[: typed.rfind("/") + 1], typed[typed.rfind("/") + 1 :]
    found = [(rank, entry) for entry in entries(folder) if (rank := _rank(entry.name, begun)) is not None]
    found.sort(key=lambda one: (one[0], one[1].name.count("/"), one[1].name.lower()))
    return [_suggest(folder, entry) for _, entry in found[:OFFERED]]


def _rank(path: str, begun: str) -> int | None:
    """Rank a path: 0 if its name starts with ``begun``, 1 if it contains it, 2 if its letters are in order, else None.

    Hidden files need a typed dot, files in subfolders a typed letter; a name that cannot be typed never matches.
    """
    name, wanted = path.rpartition("/")[2].lower(), begun.lower()
    if not path.isprintable() or '"' in path:
        return None
    if begun.startswith("."):
        return 0 if path.startswith(begun) else None
    if name[0] == "." or ("/" in path and not begun):
        return None
    if name.startswith(wanted):
        return 0
    if wanted in name:
        return 1
    letters = iter(path.lower())
    return 2 if all(letter in letters for letter in wanted) else None


def _suggest(folder: str, entry: Entry) -> Suggestion:
    path = folder + entry.name
    if entry.is_folder:
        return Suggestion(f"{path}/", f"{entry.name}/")
    return Suggestion(path, entry.name, "" if entry.size is None else size(entry.size))


def _named(found: re.Match[str]) -> tuple[str, str, bool]:
    """Return the name in a mention, the punctuation after it, and whether the name is quoted."""
    _, double, single, bare = found.groups()
    if bare is None:
        return double or unquoted(single), "", True
    return *_split_punctuation(unquoted(bare)), False


def _split_punctuation(name: str) -> tuple[str, str]:
    """Split a mentioned name from the sentence's punctuation after it."""
    bare = name.rstrip(PUNCTUATION)
    if not bare or _exists(name):
        return name, ""
    return bare, name[len(bare) :]


def _is_file(name: str, is_quoted: bool) -> bool:
    """Return whether ``@name`` means a file; a word that neither exists nor looks like a path is text, as a decorator.

    Raises:
        UsageError: it looks like a path or like the name of a file, but does not exist.
    """
    if _exists(name):
        return True
    path = Path(os.path.expanduser(name))
    try:
        near = get_close_matches(path.name, os.listdir(path.parent), n=1, cutoff=0.75)
    except OSError:
        near = []
    if not (is_quoted or near or _PLAIN_PATH.match(name)):
        return False
    hint = f'Did you mean "{near[0]}"?' if near else "Check the path."
    raise UsageError(f'There is no file "{name}".', hint, f"Write \\@{name} to send it as text.")


def _is_meant(found: re.Match[str]) -> bool:
    """Return whether a mention means a file, even one that does not exist."""
    name, _, is_quoted = _named(found)
    try:
        return _is_file(name, is_quoted)
    except UsageError:
        return True


def _exists(name: str) -> bool:
    return os.path.lexists(os.path.expanduser(name))  # reading a link that leads nowhere says what is wrong with it


class Entry(NamedTuple):
    """A file or folder, named relative to the folder that was read.

    ``size`` is in bytes; None for a folder and if unknown.
    """

    name: str
    is_folder: bool = False
    size: int | None = None


Entries = Callable[[str], Sequence[Entry]]
"""Lists the folder at a path as typed, "" for the current one; nothing if it cannot be read."""


def read(folder: str) -> tuple[Entry, ...]:
    """Return the entries of a folder; within the current folder also those of subfolders, the nearest first."""
    found = _entries(folder)
    if not folder.startswith(("/", "~", "..")):
        _add_below(folder, found)
    return tuple(found)


def _entries(folder: str, below: str = "") -> list[Entry]:
    try:
        with os.scandir(os.path.expanduser(folder + below) or ".") as found:
            return [_entry(below, one) for one in itertools.islice(found, MAX_ENTRIES)]
    except OSError:
        return []


def _add_below(folder: str, found: list[Entry]) -> None:
    """Append the entries of the folders in ``found``, and of those appended, except hidden ones and links."""
    until = time.monotonic() + WALK_S
    for entry in found:
        if len(found) >= MAX_WITH_BELOW or time.monotonic() > until:
            break
        name = entry.name.rpartition("/")[2]
        is_walked = entry.is_folder and name[0] != "." and name not in SKIPPED and entry.name.count("/") < MAX_DEPTH
        if is_walked and not os.path.islink(folder + entry.name):
            found += _entries(folder, f"{entry.name}/")[: MAX_WITH_BELOW - len(found)]


def _entry(below: str, found: os.DirEntry[str]) -> Entry:
    path = below + found.name
    try:
        if found.is_dir():
            return Entry(path, is_folder=True)
        return Entry(path, size=found.stat().st_size)
    except OSError:
        return Entry(path)


class FolderReader:
    """Reads folders in the background and remembers them; ``changed`` is called when a folder has changed."""

    def __init__(self, changed: Callable[[], None], read: Entries = read) -> None:
        self._changed = changed
        self._read = read
        self._known: dict[str, tuple[Sequence[Entry], float]] = {}
        self._reading: set[str] = set()

    def entries(self, folder: str) -> Sequence[Entry]:
        """Return the remembered entries of a folder without waiting; none until it has been read."""
        entries, read_at = self._known.get(folder, ((), float("-inf")))
        if folder not in self._reading and time.monotonic() - read_at > FRESH_S:
            self._reading.add(folder)
            # In the caller's context, from which Textual knows the application whose widgets ``changed`` changes.
            back = partial(asyncio.get_running_loop().call_soon_threadsafe, context=copy_context())
            # A daemon, so that a folder that never answers cannot keep the application from ending.
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


class Suggestion(NamedTuple):
    """``text`` replaces the typed text; ``label`` and ``doc`` are shown; ``is_current`` marks the current value."""

    text: str
    label: str
    doc: str = ""
    is_current: bool = False


class Offer(NamedTuple):
    """Suggestions for ``typed``, the end of the text before the cursor; ``usage`` says what is expected.

    Tab accepts a suggestion; Enter accepts one chosen by the arrows, or with ``takes_by_enter`` also the first.
    """

    typed: str
    suggestions: tuple[Suggestion, ...]
    usage: str = ""
    takes_by_enter: bool = False
